"""Where documents come from: readers that stream them one by one, and say where a bad one stands."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast, runtime_checkable

import zstandard

# UTF-8, without the byte-order mark that some editors put in front.
ENCODING = "utf-8-sig"


class Document(NamedTuple):
    """One text and the name by which messages and result files cite it."""

    name: str
    text: str


class Source(Protocol):
    """A corpus: an iterable of documents, always in the same order, never in memory as a whole."""

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        ...

    def fingerprint(self) -> str:
        """A text that changes whenever the documents may have changed, had without reading them."""
        ...


@runtime_checkable
class SizedSource(Protocol):
    """A source that may know how much text it has, so that progress can be told."""

    def text_bytes(self) -> int | None:
        """About how many bytes all its texts have in UTF-8, had without reading them; None if that is not known."""
        ...


@dataclass(frozen=True)
class TextFolder:
    """Every ``.txt`` file of a folder is a document, in the order of the file names.

    Args:
        folder: The folder; subfolders are not searched.
        titles: Title of each document by file stem; its name is then ``"<stem> <title>"``.
    """

    folder: Path
    titles: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        for file in self._files():
            name = f"{file.stem} {self.titles.get(file.stem, '')}".rstrip()
            yield Document(name, checked_text(_decoded(file.read_bytes(), str(file)), str(file)))

    def fingerprint(self) -> str:
        """Names, sizes and modification times of the files."""
        return f"text {files_fingerprint(self._files())}"

    def text_bytes(self) -> int:
        """Size of the files."""
        return sum(file.stat().st_size for file in self._files())

    def _files(self) -> list[Path]:
        files = sorted(self.folder.glob("*.txt"))
        if not files:
            raise FileNotFoundError(
                f"No .txt file in {self.folder}. Name a folder that holds one text file per document."
            )
        return files


@dataclass(frozen=True)
class JsonLines:
    """Documents in JSON-lines files, plain or compressed (``.gz``, ``.zst``), one JSON object per line.

    Args:
        files: The files, read in this order.
        text_fields: Names the text may go by; the first one present is used.
        name_fields: Fields that make up the document's name; without any of them it is ``"<file>:<line>"``.
        where: ``(field, value)``: only documents whose field holds that value; dots reach into nested objects.
    """

    files: tuple[Path, ...]
    text_fields: tuple[str, ...] = ("text",)
    name_fields: tuple[str, ...] = ()
    where: tuple[str, str] | None = None

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        found = False
        for file in self.files:
            with _opened(file) as lines:
                for number, line in enumerate(lines, start=1):
                    document = self._document(line, file, number) if not line.isspace() else None
                    if document is not None:
                        found = True
                        yield document
        if not found:
            wanted = f" with {self.where[0]} == {self.where[1]!r}" if self.where else ""
            raise ValueError(f"No document{wanted} in {', '.join(map(str, self.files))}. Name other files.")

    def fingerprint(self) -> str:
        """Names, sizes and modification times of the files, and which documents are taken."""
        return f"json {files_fingerprint(self.files)} {self.text_fields} {self.where}"

    def text_bytes(self) -> int | None:
        """Size of the files, if they are plain and all is wanted: a little too much, JSON has quotes and names."""
        if self.where or any(file.suffix in (".gz", ".zst") for file in self.files):
            return None
        return sum(file.stat().st_size for file in self.files)

    def _document(self, line: bytes, file: Path, number: int) -> Document | None:
        """The document on a line; none if it is not wanted."""
        place = f"{file}:{number}"
        record = _parsed(line, place)
        if self.where and nested(record, self.where[0]) != self.where[1]:
            return None
        present = [name for name in self.text_fields if name in record]
        if not present:
            raise ValueError(
                f"{place}: no field {' or '.join(map(repr, self.text_fields))} for the text, only {sorted(record)}."
                " Rename the field that holds it."
            )
        return Document(
            record_name(record, self.name_fields, f"{file.name}:{number}"), checked_text(record[present[0]], place)
        )


def checked_text(text: object, place: str) -> str:
    """The text of the document at ``place``, once it is sure to be one.

    Raises:
        ValueError: If it is no string, holds nothing but white space, or cannot be written as UTF-8.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: the text must be a string, got {type(text).__name__}. Mend or remove this document."
        )
    if not text or text.isspace():
        raise ValueError(f"{place}: the document is empty. Remove it: there is nothing to learn from or to score.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise ValueError(f"{place}: character {error.start} is half a surrogate pair. Remove or replace it.") from error
    return text


def nested(record: Any, path: str) -> Any:
    """The value at a dotted path such as ``"meta.pile_set_name"``, or ``None``."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def record_name(record: Mapping[str, Any], fields: tuple[str, ...], place: str) -> str:
    """The given fields in one line, or the place if the record has none of them."""
    return " ".join(str(record[field]).strip() for field in fields if record.get(field)) or place


def files_fingerprint(files: list[Path] | tuple[Path, ...]) -> str:
    """Hash of names, sizes and modification times: what tells an edit of many gigabytes without reading them."""
    stats = [(file.name, file.stat()) for file in files]
    listing = json.dumps(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
    return sha256(listing.encode()).hexdigest()


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked on the fly."""
    with ExitStack() as stack:
        stream = cast(BinaryIO, stack.enter_context(file.open("rb")))
        if file.suffix == ".gz":
            stream = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=stream)))
        elif file.suffix == ".zst":
            unpacked = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
            stream = cast(BinaryIO, stack.enter_context(io.BufferedReader(unpacked)))
        try:
            yield stream
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise ValueError(f"{file}: the compressed file is damaged ({error}). Fetch it again.") from error


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode(ENCODING)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: byte {error.start} is not UTF-8 ({error.reason})."
            " Convert the file to UTF-8, or remove the document."
        ) from error


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(_decoded(line, place))
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: malformed JSON ({error}). Each line must hold one whole JSON object.") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{place}: expected a JSON object, got {type(record).__name__}. Each line must hold one object."
        )
    return record
