"""Find the documents of a corpus in files of any kind, share them out, and read one part at a time.

A part is the unit of reading: a file, or a row group of a parquet file.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow
from fsspec.core import url_to_fs

from datamodules.sources.content import checked_text, checked_tokens
from datamodules.sources.locations import JSON_LINES, PARQUET, File, RemoteFile, find_files, fixed_folder, is_url
from datamodules.sources.parquet import opened_table
from datamodules.sources.records import decoded, nested, opened, read_document, read_records

PARTS_PER_SHARD = 4
"""Minimum number of parts for each shard to read separate parts; with fewer, each reads some rows of all parts."""

TOKEN_HASH = "token_hash"
"""Column with the SHA-256 of a document's token ids, as 64-bit integers."""

_READER_THREADS = 32  # they read parquet footers and the first documents, and mostly wait
_NAMED_FIELDS = 20  # at most, in an error
_FIRST_DOCUMENTS = 64  # of a file, one of which must have text


class DocumentRef(NamedTuple):
    """Origin of a document of a corpus, by which its scores are stored."""

    key: str  # name of the document in the corpus; not necessarily unique
    file: str  # name of its file; file and row together are unique
    row: int  # index of its row or line in the file
    columns: dict[str, Any]  # other columns of the corpus that are stored with its scores, by name
    error: str | None = None  # why it cannot be read, or None


class Part(NamedTuple):
    """A file, or a row group of a parquet file."""

    file: str  # name in `CorpusFiles.files`
    row_group: int | None
    first: int  # number of the first row
    rows: int | None  # None for JSON lines, which are not counted


@dataclass(frozen=True)
class Share:
    """Rows of a part: those whose number modulo ``step`` is ``first``."""

    part: Part
    first: int
    step: int

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and row % self.step == self.first

    def count(self) -> int | None:
        """Return the number of rows; None for JSON lines."""
        if self.part.rows is None:
            return None
        start = self.part.first
        stop = self.part.first + self.part.rows
        return len(range(start + (self.first - start) % self.step, stop, self.step))


class CorpusColumns(NamedTuple):
    """Names of parquet columns or JSON fields; dots reach into nested fields."""

    text: str
    key: str | None
    others: tuple[str, ...]
    tokens: str | None = None  # lists of token ids, which are the documents instead of texts

    @property
    def content(self) -> str:
        """Name of the column with the documents."""
        if self.tokens is None:
            return self.text
        return self.tokens


@dataclass(frozen=True)
class CorpusFiles:
    """Files of documents: rows of parquet, lines of JSON, and text files."""

    files: Mapping[str, File]  # by name, which is the path relative to the folder or pattern that was searched
    parts: tuple[Part, ...]
    columns: CorpusColumns
    column_types: dict[str, pyarrow.DataType]  # of `DocumentRef.columns`; values of JSON lines become strings

    def shares(self, shard: int, shards: int) -> list[Share]:
        """Return what one of several shards reads; together they read every row once.

        If there are enough parts, a shard reads every ``shards``-th part. Otherwise it reads all parts and takes every
        ``shards``-th row, because reading is cheap compared to scoring.
        """
        if len(self.parts) >= PARTS_PER_SHARD * shards:
            return [Share(part, 0, 1) for part in self.parts[shard::shards]]
        # Shift the first row from part to part, or shard 0 would get the extra row of every part.
        return [Share(part, (shard - number) % shards, shards) for number, part in enumerate(self.parts)]

    def read(self, part: Part, wanted: Callable[[int], bool]) -> Iterator[tuple[DocumentRef, Any]]:
        """Yield reference and text of the wanted rows of a part; a broken document has an ``error`` and no text.

        With `CorpusColumns.tokens`, an array of token ids takes the place of a text, and `TOKEN_HASH` is in the
        columns of the reference.

        Raises:
            ValueError: If the rest of the file cannot be read.
        """
        file = self.files[part.file]
        name = part.file
        for row, parse in self._read_wanted(file, part, wanted):
            ref = DocumentRef(name if is_text(name) else f"{name}:{row}", name, row, {})
            content: Any = ""
            try:
                record = parse()
                ref = self._with_key(ref, record, f"{file}:{row}")  # first, so that a document without text has one
                content = self._read_content(record, f"{file}:{row}")
                if self.columns.tokens is not None:
                    identity = hashlib.sha256(content.astype("<i8").tobytes()).hexdigest()
                    ref = ref._replace(columns={**ref.columns, TOKEN_HASH: identity})
            except (ValueError, OverflowError) as error:  # dates and durations beyond Python's range overflow
                ref = ref._replace(error=" ".join(str(error).split()))
            yield ref, content

    def _read_wanted(
        self, file: File, part: Part, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Callable[[], Mapping[str, Any]]]]:
        """Yield the number of each wanted row, and a function that returns its columns or raises a ``ValueError``."""
        if not is_text(file.name):
            names = _all_columns(self.columns)
            columns = [*names, *(name.partition(".")[0] for name in names)]  # a name may have dots itself
            yield from read_records(file, columns, wanted, row_group=part.row_group, first=part.first)
        elif wanted(0):
            content = read_document(file)
            yield 0, lambda: {self.columns.text: decoded(content, str(file))}

    def _with_key(self, ref: DocumentRef, record: Mapping[str, Any], place: str) -> DocumentRef:
        """Add the corpus's key and columns to a reference."""
        key = ref.key
        if self.columns.key is not None and not is_text(ref.file):
            value = nested(record, self.columns.key)
            if value is None:
                raise ValueError(f"{place}: no key in {self.columns.key!r}: found {sorted(record)[:_NAMED_FIELDS]}.")
            key = checked_text(str(value), f"{place}, {self.columns.key!r}")
        values = {column: nested(record, column) for column in self.columns.others}
        for column, value in values.items():
            if isinstance(value, str):
                checked_text(value, f"{place}, {column!r}")
            elif value is not None and self.column_types[column] == pyarrow.string():
                values[column] = json.dumps(value, default=str)
        return ref._replace(key=key, columns=values)

    def _read_content(self, record: Mapping[str, Any], place: str) -> Any:
        column = self.columns.content
        content = nested(record, column)
        if content is None:
            kind = "text" if self.columns.tokens is None else "token ids"
            found = "it is null" if column in record else f"found {sorted(record)[:_NAMED_FIELDS]}"
            raise ValueError(f"{place}: no {kind} in {column!r}: {found}.")
        if self.columns.tokens is None:
            return checked_text(content, place)
        return checked_tokens(content, place)

    def check_first_documents(self, part: Part) -> None:
        """Raise a ``ValueError`` if all of the first documents of a part are broken."""
        errors = []
        try:
            for ref, _ in islice(self.read(part, lambda _: True), _FIRST_DOCUMENTS):
                if ref.error is None:
                    return
                errors.append(ref.error)
        except (ValueError, OSError):
            return  # a damaged file is reported when the documents of all others are done
        if errors:
            error, _ = Counter(errors).most_common(1)[0]
            option = "--text_column" if self.columns.tokens is None else "--token_column"
            raise ValueError(
                f"{error} The first {len(errors)} documents of this file are all broken: set `{option}` and"
                " `--key_column` to existing fields, remove such files, or set `--allowed_failures 1`."
            )


def find_corpus(paths: Sequence[str], columns: CorpusColumns, *, check: bool = True) -> CorpusFiles:
    """Find documents from the names of files and the footers of parquet files.

    Paths are as in `find_files`; kinds of files may be mixed. With ``check``, a file without text is refused, because
    all its documents would fail.
    """
    # 1. Name the files.
    named = _name_all_files(paths)
    texts = list(filter(is_text, named))
    if columns.tokens is not None and texts:
        raise ValueError(
            f"'{texts[0]}' is a text file, which has no column {columns.tokens!r} of token ids: pass only .parquet and"
            " .jsonl files, or leave out `--token_column`."
        )
    # 2. Split parquet files into row groups, and compare the types of their columns.
    with ThreadPoolExecutor(_READER_THREADS) as pool:
        found = list(pool.map(partial(_split_file, columns=columns), named, named.values()))
    parts: list[Part] = []
    types_of_files = []
    for own_parts, own_types in found:
        parts += own_parts
        types_of_files.append(own_types)
    types = _common_types(named, types_of_files)
    if not all(name.endswith(PARQUET) for name in named):
        types = dict.fromkeys(columns.others, pyarrow.string())
    if columns.tokens is not None:
        types[TOKEN_HASH] = pyarrow.string()
    corpus = CorpusFiles(named, tuple(parts), columns, types)
    # 3. Read the first documents of each file.
    if check:
        first = [part for part in parts if part.first == 0 and not is_text(part.file)]
        with ThreadPoolExecutor(_READER_THREADS) as pool:
            list(pool.map(corpus.check_first_documents, first))
    return corpus


def read_documents(
    paths: Sequence[str], columns: CorpusColumns, rows: Mapping[str, Collection[int]]
) -> Iterator[tuple[DocumentRef, Any]]:
    """Yield reference and text or token ids of the documents with these row numbers by file, in order of the files.

    Raises:
        ValueError: If a file is missing, or cannot be read.
    """
    corpus = find_corpus(paths, columns, check=False)
    missing = sorted(rows.keys() - corpus.files.keys())
    if missing:
        raise ValueError(f"'{missing[0]}' is not in {', '.join(paths)}: set the files that were scored.")
    for part in corpus.parts:
        numbers = rows.get(part.file)
        if numbers is not None:
            yield from corpus.read(part, frozenset(numbers).__contains__)


def _name_all_files(paths: Sequence[str]) -> dict[str, File]:
    """Return the files at all paths by their names, which identify documents in results and must differ.

    A file that several paths find, such as a folder and one inside it, counts once, under its first name.
    """
    named: dict[str, File] = {}
    places: set[str] = set()
    for path in paths:
        for name, file in _name_files(path):
            place = str(file) if isinstance(file, RemoteFile) else os.path.abspath(file)
            if place in places:
                continue
            places.add(place)
            if name in named:
                raise ValueError(
                    f"Two files are called '{name}': {named[name]} and {file}. Use a common folder or pattern, such as"
                    " 'corpus/**/*.parquet'."
                )
            named[name] = file
    return named


def _name_files(path: str) -> Iterator[tuple[str, File]]:
    """Yield the files at a path, with their paths relative to the folder, or to the fixed part of the pattern."""
    files = find_files(path)
    folder = fixed_folder(path)
    root = PurePosixPath(url_to_fs(folder)[1] if is_url(path) else Path(folder).expanduser())
    for file in files:
        place = PurePosixPath(file.path if isinstance(file, RemoteFile) else file)
        name = PurePosixPath(file.name)
        if place.is_relative_to(root) and place != root:
            name = place.relative_to(root)
        yield checked_text(str(name), f"The name of {str(name)!r}"), file


def _split_file(name: str, file: File, columns: CorpusColumns) -> tuple[list[Part], dict[str, pyarrow.DataType]]:
    """Split a file into parts; of a parquet file, also return the types of `CorpusColumns.others`."""
    if not file.name.endswith(PARQUET):
        return [Part(name, None, 0, 1 if is_text(file.name) else None)], {}
    with opened(file) as stream:
        try:
            table = opened_table(stream, file)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{file}: the parquet file is damaged ({error}). Fetch it again.") from error
        types = {column: _column_type(table.schema_arrow, column, file) for column in _all_columns(columns)}
        parts = []
        first = 0
        for number in range(table.num_row_groups):
            rows = table.metadata.row_group(number).num_rows
            parts.append(Part(name, number, first, rows))
            first += rows
    return parts, {column: types[column] for column in columns.others}


def _common_types(names: Iterable[str], found: Iterable[Mapping[str, pyarrow.DataType]]) -> dict[str, pyarrow.DataType]:
    types: dict[str, pyarrow.DataType] = {}
    for name, own_types in zip(names, found, strict=True):
        for column, kind in own_types.items():
            if types.setdefault(column, kind) != kind:
                raise ValueError(
                    f"{name}: column {column!r} has type {kind}, but {types[column]} in other files. Remove it from"
                    " `--columns`, or use one type in all files."
                )
    return types


def _all_columns(columns: CorpusColumns) -> list[str]:
    return [name for name in (columns.content, columns.key, *columns.others) if name is not None]


def _column_type(schema: pyarrow.Schema, path: str, file: File) -> pyarrow.DataType:
    fields: Iterable[pyarrow.Field] = schema
    kind = None
    for name in [path] if path in schema.names else path.split("."):
        kind = next((field.type for field in fields if field.name == name), None)
        if kind is None:
            raise ValueError(f"{file}: no column {path!r}. Its columns are {sorted(schema.names)}.")
        fields = ()
        if pyarrow.types.is_struct(kind):
            fields = kind
    return kind


def is_text(name: str) -> bool:
    """Return whether a file is a text file, which is one document."""
    return not name.endswith((*PARQUET, *JSON_LINES))
