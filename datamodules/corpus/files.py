"""Find the documents of a corpus in files of any kind without reading them, and read one part at a time.

A part is the unit of reading: a file, or a row group of a parquet file.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow
from fsspec.core import url_to_fs

from datamodules.sources.documents import checked_text
from datamodules.sources.locations import (
    JSON_LINES,
    PARQUET,
    File,
    RemoteFile,
    file_identities,
    file_size,
    find_files,
    is_url,
)
from datamodules.sources.records import (
    MAX_DOCUMENT,
    decoded,
    is_packed,
    lines_of,
    nested,
    opened,
    opened_table,
    parsed_line,
    read_document,
    read_records,
)
from lightning_modules.batch import DocumentRef
from lightning_modules.utilities.identity import file_state

_READER_THREADS = 32  # they read parquet footers and the first lines of other files, and mostly wait
_NAMED_FIELDS = 20  # at most, in an error
_COMPRESSION_RATIO = 4  # estimated bytes of text per byte of a compressed file
_SAMPLE_LINES, _SAMPLE_BYTES = 64, 1 << 18  # about as many are read from the start of each JSON-lines file
_MIN_SAMPLE_LINES = 8  # however long, before a file counts as having no documents
_COUNTED_BYTES = 1 << 26  # lines of local files up to this size are counted


class Part(NamedTuple):
    """A file, or a row group of a parquet file."""

    file: int  # index of the file
    row_group: int | None
    first: int  # number of the first row
    rows: int | None  # None if unknown before the file is read
    size: int  # estimated bytes of text
    expected_rows: float | None  # estimated number of rows


class CorpusColumns(NamedTuple):
    """Names of parquet columns or JSON fields; dots reach into nested fields."""

    text: str
    key: str | None
    others: tuple[str, ...]


@dataclass(frozen=True)
class CorpusFiles:
    """Files of documents: rows of parquet, lines of JSON, and text files."""

    files: tuple[File, ...]
    names: tuple[str, ...]  # as in results: paths relative to the folder or pattern that was searched
    parts: tuple[Part, ...]
    columns: CorpusColumns
    column_types: dict[str, pyarrow.DataType]  # of `CorpusColumns.others`; values of JSON lines become strings
    fields: tuple[str, ...] = ()  # columns of the parquet files, and fields in the first lines of the JSON-lines files

    def versions(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return the content identities of files, by default of all; local files are hashed (`file_identities`)."""
        files = dict(zip(self.names, self.files, strict=True))
        chosen = list(files if names is None else names)
        return dict(zip(chosen, file_identities(files[name] for name in chosen), strict=True))

    def states(self, names: Iterable[str] | None = None) -> dict[str, list[int]]:
        """Return size, inode and times of local files, by default of all, which show whether one may have changed."""
        files = dict(zip(self.names, self.files, strict=True))
        chosen = files if names is None else names
        return {name: file_state(file) for name in chosen if isinstance(file := files[name], Path)}

    def read(self, part: Part, wanted: Callable[[int], bool]) -> Iterator[tuple[DocumentRef, str]]:
        """Yield reference and text of the wanted rows of a part; a broken document has an ``error`` and no text.

        Raises:
            ValueError: If the rest of the file cannot be read.
        """
        file, name = self.files[part.file], self.names[part.file]
        for row, record in self._read_wanted(file, part, wanted):
            ref = DocumentRef(name if is_text(name) else f"{name}:{row}", name, row, {})
            text = ""
            try:
                content = record()
                ref = self._with_key(ref, content, f"{file}:{row}")  # first, so that a document without text has one
                text = self._read_text(content, f"{file}:{row}")
            except (ValueError, OverflowError) as error:  # dates and durations beyond Python's range overflow
                ref = ref._replace(error=" ".join(str(error).split()))
            yield ref, text

    def _with_key(self, ref: DocumentRef, record: Mapping[str, Any], place: str) -> DocumentRef:
        """Add the corpus's key and columns to a reference."""
        key = ref.key
        if self.columns.key is not None and not is_text(ref.file):
            if (value := nested(record, self.columns.key)) is None:
                raise ValueError(f"{place}: no key in {self.columns.key!r}.")
            key = checked_text(str(value), f"{place}, {self.columns.key!r}")
        values = {column: nested(record, column) for column in self.columns.others}
        for column, value in values.items():
            if isinstance(value, str):
                checked_text(value, f"{place}, {column!r}")
            elif value is not None and self.column_types[column] == pyarrow.string():
                values[column] = json.dumps(value, default=str)
        return ref._replace(key=key, columns=values)

    def _read_text(self, record: Mapping[str, Any], place: str) -> str:
        if (text := nested(record, self.columns.text)) is None:
            found = "it is null" if self.columns.text in record else f"found {sorted(record)[:_NAMED_FIELDS]}"
            raise ValueError(f"{place}: no text in {self.columns.text!r}: {found}.")
        return checked_text(text, place)

    def _read_wanted(
        self, file: File, part: Part, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Callable[[], Mapping[str, Any]]]]:
        """Yield the number of each wanted row, and a function that returns its columns or raises a ``ValueError``."""
        if not is_text(file.name):
            given = (self.columns.text, self.columns.key, *self.columns.others)
            columns = [column.partition(".")[0] for column in given if column]
            yield from read_records(file, columns, wanted, row_group=part.row_group, first=part.first)
        elif wanted(0):
            content, names = read_document(file), reversed(self.columns.text.split("."))
            yield 0, lambda: reduce(lambda value, name: {name: value}, names, decoded(content, str(file)))  # type: ignore[arg-type]


def find_corpus(paths: Sequence[str], columns: CorpusColumns, *, lenient: bool = False) -> CorpusFiles:
    """Find documents from the footers of parquet files and the first lines of JSON-lines files.

    Paths are as in `find_files`; kinds of files may be mixed. ``lenient`` accepts files without text if other files
    have some.
    """
    # 1. Name the files. Names identify documents in results, so they must differ.
    named: dict[str, File] = {}
    for path in paths:
        for name, file in _name_files(path):
            if str(named.setdefault(name, file)) != str(file):
                raise ValueError(
                    f"Two files are called '{name}': {named[name]} and {file}. Use a common folder or pattern, such as"
                    " 'corpus/**/*.parquet'."
                )
    # 2. Split parquet files into row groups, and compare the types of their columns.
    names, files = tuple(named), tuple(named.values())
    with ThreadPoolExecutor(_READER_THREADS) as pool:
        found = list(pool.map(partial(_split_file, columns=columns), range(len(files)), files))
    types: dict[str, pyarrow.DataType] = {}
    for file, (_, own, _) in zip(files, found, strict=True):
        for column, kind in own.items():
            if types.setdefault(column, kind) != kind:
                raise ValueError(
                    f"{file}: column {column!r} has type {kind}, but {types[column]} in other files. Remove it from"
                    " `data.columns`, or use one type in all files."
                )
    # 3. Count the lines of JSON-lines files, or estimate their number from the first ones.
    samples = _sample_files(files, [columns.text, *([columns.key] if columns.key else [])], lenient=lenient)
    lines, size = sum(sample.lines for sample in samples), sum(sample.size for sample in samples)

    everything = _Sample(lines, size)  # files that cannot be read are taken to be like all others
    parts = tuple(_with_rows(part, samples[part.file], everything) for own_parts, *_ in found for part in own_parts)
    typed = all(file.name.endswith(PARQUET) for file in files)
    column_types = {column: types[column] if typed else pyarrow.string() for column in columns.others}
    fields = {name for _, _, own in found for name in own}.union(*(sample.fields for sample in samples))
    return CorpusFiles(files, names, parts, columns, column_types, tuple(sorted(fields)))


def _with_rows(part: Part, own: "_Sample", everything: "_Sample") -> Part:
    """Return a part with the number of its rows, or with an estimate from the first lines of its file."""
    if part.rows is not None or not everything.lines:
        return part
    if own.rows is not None:
        return part._replace(expected_rows=own.rows)
    sample = own if own.lines else everything
    return part._replace(expected_rows=part.size * sample.lines / sample.size)


def _name_files(path: str) -> Iterator[tuple[str, File]]:
    """Yield the files at a path, with their paths relative to the folder, or to the fixed part of the pattern."""
    files = find_files(path)
    folder = path.partition("*")[0].rpartition("/")[0] or "." if "*" in path else path  # before the first wildcard
    root = PurePosixPath(url_to_fs(folder)[1] if is_url(path) else Path(folder).expanduser())
    for file in files:
        place = PurePosixPath(file.path if isinstance(file, RemoteFile) else file)
        name = place.relative_to(root) if place.is_relative_to(root) and place != root else PurePosixPath(file.name)
        yield checked_text(str(name), f"The name of {str(name)!r}"), file


def _split_file(
    index: int, file: File, columns: CorpusColumns
) -> tuple[list[Part], dict[str, pyarrow.DataType], list[str]]:
    """Split a file into parts; of a parquet file, also return types of `CorpusColumns.others` and all its columns."""
    if not file.name.endswith(PARQUET):
        size = (file_size(file) or MAX_DOCUMENT) * (_COMPRESSION_RATIO if is_packed(file) else 1)
        rows = 1 if is_text(file.name) else None
        return [Part(index, None, 0, rows, size, rows)], {}, []
    with opened(file) as stream:
        try:
            table = opened_table(stream, file)
            given = (columns.text, columns.key, *columns.others)
            types = {name: _column_type(table.schema_arrow, name, file) for name in given if name}
            _check_text_type(types[columns.text], columns.text, file)
            parts, first = [], 0
            for number in range(table.num_row_groups):
                group = table.metadata.row_group(number)
                chunks = [group.column(each) for each in range(group.num_columns)]
                sizes = [each.total_uncompressed_size for each in chunks if each.path_in_schema == columns.text]
                size = sum(sizes) or group.total_byte_size
                parts.append(Part(index, number, first, group.num_rows, size, group.num_rows))
                first += group.num_rows
        except pyarrow.ArrowException as error:
            raise ValueError(f"{file}: the parquet file is damaged ({error}). Fetch it again.") from error
    return parts, {name: types[name] for name in columns.others}, table.schema_arrow.names


def _column_type(schema: pyarrow.Schema, path: str, file: File) -> pyarrow.DataType:
    fields: Iterable[pyarrow.Field] = schema
    kind = None
    for name in path.split("."):
        kind = next((field.type for field in fields if field.name == name), None)
        if kind is None:
            raise ValueError(f"{file}: no column {path!r}. Its columns are {sorted(schema.names)}.")
        fields = kind if pyarrow.types.is_struct(kind) else ()
    return kind


def _check_text_type(kind: pyarrow.DataType, column: str, file: File) -> None:
    value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not str(value).endswith(("string", "string_view")):
        raise ValueError(
            f"{file}: column {column!r} has type {kind}, not text. Set `data.text_column` to the text column."
        )


def is_text(name: str) -> bool:
    """Return whether a file is a text file, which is one document."""
    return not name.endswith((*PARQUET, *JSON_LINES))


class _Sample(NamedTuple):
    """Statistics of the first lines of a JSON-lines file; those of other files are empty."""

    lines: int
    size: int  # in bytes
    fields: frozenset[str] = frozenset()  # of any line
    present: frozenset[str] = frozenset()  # required fields that have a value in some line
    rows: int | None = None  # lines of the whole file, if they were counted


def _sample_files(files: Sequence[File], required: Sequence[str], *, lenient: bool = False) -> list[_Sample]:
    """Read the first lines of JSON-lines files.

    A file that lacks a required field is refused, because all its documents would fail.
    """
    with ThreadPoolExecutor(_READER_THREADS) as pool:
        samples = list(pool.map(lambda file: _sample_lines(file, required), files))
    seen = [(file, sample) for file, sample in zip(files, samples, strict=True) if sample.lines]
    wrong = [(file, sample) for file, sample in seen if not sample.present.issuperset(required)]
    if wrong and (not lenient or len(wrong) == len(seen)):
        file, sample = wrong[0]
        others = f" (and of {len(wrong) - 1:,} other files)" if len(wrong) > 1 else ""
        raise ValueError(
            f"None of the first {sample.lines} lines of {file}{others} is a JSON object with a field"
            f" {min(set(required) - sample.present)!r}; found {sorted(sample.fields)[:_NAMED_FIELDS]}. Set"
            " `data.text_column` and `data.key_column` to existing fields, or remove such files."
        )
    return samples


def _sample_lines(file: File, required: Sequence[str]) -> _Sample:
    """Read the first lines of a file, and more if they are long and not all required fields have appeared."""
    lines = size = 0
    fields: set[str] = set()
    present: set[str] = set()
    rows: int | None = None
    if not file.name.endswith(JSON_LINES):
        return _Sample(0, 0)
    # A file that cannot be read is reported later, after the documents of all other files are done.
    with suppress(ValueError, OSError), opened(file) as stream:
        remaining = iter(lines_of(stream))
        for line in remaining:
            size += len(line)
            if line.isspace():
                continue
            lines += 1
            with suppress(ValueError):  # broken lines fail later, as documents
                record = parsed_line(line, "")
                fields |= set(record)
                present |= {field for field in required if nested(record, field) is not None}
            seen_enough = present.issuperset(required) or lines >= _MIN_SAMPLE_LINES
            if lines == _SAMPLE_LINES or (size > _SAMPLE_BYTES and seen_enough):
                break
        if not isinstance(file, RemoteFile) and (file_size(file) or 0) <= _COUNTED_BYTES:
            rows = lines + sum(not line.isspace() for line in remaining)
    return _Sample(lines, size, frozenset(fields), frozenset(present), rows)
