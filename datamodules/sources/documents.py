"""Stream documents from files, with errors that name the place of a bad document."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from datamodules.sources.content import Content, Document, checked_text
from datamodules.sources.locations import PARQUET, File, file_size, files_fingerprint
from datamodules.sources.records import decoded, is_packed, nested, read_document, read_records

_log = logging.getLogger(__name__)


class NoDocumentError(ValueError):
    """Raised by a source without any matching document."""


class Source(Protocol):
    """Iterable of documents, always in the same order and never all in memory."""

    def __iter__(self) -> Iterator[Document]: ...

    def fingerprint(self) -> str:
        """Return a text that changes whenever the documents may have changed, but not with their paths or times."""


@dataclass(frozen=True)
class TextFiles:
    """Source whose files are one document each, plain or compressed (``.gz``, ``.zst``)."""

    files: tuple[File, ...]
    titles: Mapping[str, str] = field(default_factory=dict)  # by file stem; a document is named "<stem> <title>"

    def __iter__(self) -> Iterator[Document]:
        for file in self.files:
            stem = file.name
            if is_packed(file):
                stem = stem.removesuffix(file.suffix)
            stem = stem.removesuffix(".txt")
            name = f"{stem} {self.titles.get(stem, '')}".rstrip()
            yield Document(name, checked_text(decoded(read_document(file), str(file)), str(file)))

    def fingerprint(self) -> str:
        """Describe content and order of the files."""
        return f"text {files_fingerprint(self.files)}"


def text_folder(folder: Path, titles: Mapping[str, str] | None = None) -> TextFiles:
    """Find the ``.txt`` files of a local folder, without its subfolders, in the order of their names."""
    files = tuple(sorted(folder.glob("*.txt")))
    if not files:
        raise FileNotFoundError(f"No .txt file in {folder}. Use a folder with one text file per document.")
    return TextFiles(files, titles or {})


@dataclass(frozen=True)
class RecordFiles:
    """Source whose documents are lines of JSON-lines files, plain or compressed, or rows of parquet files.

    A document is named by ``name_fields``, or ``"<file>:<number>"``. With ``where = (field, value)``, only documents
    whose field has this value are read; dots reach into nested objects.
    """

    files: tuple[File, ...]
    content: Content = field(default_factory=Content)
    name_fields: tuple[str, ...] = ()
    where: tuple[str, Any] | None = None

    def __iter__(self) -> Iterator[Document]:
        columns = [*self.content.columns, *self.name_fields]
        if self.where:
            columns += [self.where[0], self.where[0].partition(".")[0]]
        found = False
        for file in self.files:
            first = 0 if file.name.endswith(PARQUET) else 1  # lines count from 1, as in editors
            for number, parse in read_records(file, columns, text_columns=self.content.alternatives, first=first):
                record = parse()
                if self.where is None or nested(record, self.where[0]) == self.where[1]:
                    found = True
                    name = record_name(record, self.name_fields, f"{file.name}:{number}")
                    yield self.content.read(record, name, f"{file}:{number}")
        if not found:
            wanted = f" with {self.where[0]} == {self.where[1]!r}" if self.where else ""
            raise NoDocumentError(f"No document{wanted} in {', '.join(map(str, self.files))}. Use other files.")

    def fingerprint(self) -> str:
        """Describe content and order of the files, and which documents are read."""
        return f"records {files_fingerprint(self.files)} {self.content} {self.where}"


@dataclass(frozen=True)
class FirstDocuments:
    """The first documents of a source; the others are not read."""

    source: Source
    count: int

    def __iter__(self) -> Iterator[Document]:
        return islice(self.source, self.count)

    def fingerprint(self) -> str:
        """Combine the source's fingerprint and the number of documents."""
        return f"{self.source.fingerprint()} first {self.count}"


def first_documents(source: Source, count: int) -> Source:
    """Return the first ``count`` documents of a source, whose other files are not even hashed if each is a document."""
    if isinstance(source, TextFiles):
        return replace(source, files=source.files[:count])
    return FirstDocuments(source, count)


def with_text(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents that are not empty; warn about empty ones, and raise an error if all are empty."""
    first_empty = ""
    taken = empty = 0
    for document in documents:
        if document.is_empty():
            empty += 1
            first_empty = first_empty or document.name
        else:
            taken += 1
            yield document
    if empty and not taken:
        raise NoDocumentError(f"All of the {empty:,} documents are empty, such as '{first_empty}'. Use other files.")
    if empty:
        _log.warning("Skipped %d empty documents of %d, such as '%s'.", empty, taken + empty, first_empty)


def record_name(record: Mapping[str, Any], fields: tuple[str, ...], place: str) -> str:
    """Join the given fields into a name, or return the place if the record lacks all of them."""
    return " ".join(str(record[field]).strip() for field in fields if record.get(field)) or place


def text_bytes(source: Source) -> int | None:
    """Estimate the bytes of all texts from the sizes of uncompressed files, for progress bars; None if unknown."""
    if not isinstance(source, TextFiles | RecordFiles):
        return None
    if isinstance(source, RecordFiles) and (source.where or source.content.tokens is not None):
        return None
    total = 0
    for file in source.files:
        if is_packed(file) or file.name.endswith(PARQUET):
            return None
        size = file_size(file)
        if size is None:
            return None
        total += size
    return total
