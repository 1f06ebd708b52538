"""Where documents come from: readers that stream them one by one, and say where a bad one stands."""

import gzip
import io
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast, runtime_checkable

import zstandard
from typing_extensions import override

from datamodules.sources.locations import File, file_size, files_fingerprint

_NAMED = 3  # of the documents that a message is about

_log = logging.getLogger(__name__)

# UTF-8, without the byte-order mark that some editors put in front.
ENCODING = "utf-8-sig"

LARGEST_DOCUMENT = 1 << 28
"""Bytes of a document as it is stored, unpacked: a hundred times a long book. A few kilobytes can unpack to more than
all memory."""

_PACKED_BYTES = 1 << 14  # taken at a time: what they unpack to is in memory


class Document(NamedTuple):
    """One text and the name by which messages and result files cite it.

    Attributes:
        prompt_end: How many characters at its front are the prompt to which the rest is the response.
    """

    name: str
    text: str
    prompt_end: int = 0


class NoDocumentError(ValueError):
    """A source has no document, or none that is wanted."""


class Source(Protocol):
    """A corpus: an iterable of documents, always in the same order, never in memory as a whole."""

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        ...

    def fingerprint(self) -> str:
        """A text that changes whenever the documents may have changed, and not with their place or time."""
        ...


@runtime_checkable
class SizedSource(Protocol):
    """A source that may know how much text it has, so that progress can be told."""

    def text_bytes(self) -> int | None:
        """About how many bytes all its texts have in UTF-8, had without reading them; None if that is not known."""
        ...


@dataclass(frozen=True)
class TextFiles:
    """Every file is a document, plain or compressed (``.gz``, ``.zst``).

    Args:
        files: The files, read in this order.
        titles: Title of each document by file stem; its name is then ``"<stem> <title>"``.
    """

    files: tuple[File, ...]
    titles: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        for file in self.files:
            stem = file.name.removesuffix(file.suffix if is_packed(file) else "").removesuffix(".txt")
            with opened(file) as stream:
                content = stream.read(LARGEST_DOCUMENT + 1)
            check_size(content, str(file))
            name = f"{stem} {self.titles.get(stem, '')}".rstrip()
            yield Document(name, checked_text(decoded(content, str(file)), str(file)))

    def fingerprint(self) -> str:
        """Content and order of the files."""
        return f"text {files_fingerprint(self.files)}"

    def text_bytes(self) -> int | None:
        """Size of the files, if they are plain."""
        return _plain_bytes(self.files)


@dataclass(frozen=True)
class TextFolder:
    """Every ``.txt`` file of a local folder is a document, in the order of the file names.

    Args:
        folder: The folder; subfolders are not searched.
        titles: As in `TextFiles`.
    """

    folder: Path
    titles: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        return iter(self._files())

    def fingerprint(self) -> str:
        """Content and order of the files."""
        return self._files().fingerprint()

    def text_bytes(self) -> int | None:
        """Size of the files."""
        return self._files().text_bytes()

    def _files(self) -> TextFiles:
        files = tuple(sorted(self.folder.glob("*.txt")))
        if not files:
            raise FileNotFoundError(
                f"No .txt file in {self.folder}. Name a folder that holds one text file per document."
            )
        return TextFiles(files, self.titles)


@dataclass(frozen=True)
class JsonLines:
    """Documents in JSON-lines files, plain or compressed (``.gz``, ``.zst``), one JSON object per line.

    Args:
        files: The files, read in this order.
        text_fields: Names the text may go by; the first one present is used.
        name_fields: Fields that make up the document's name; without any of them it is ``"<file>:<line>"``.
        where: ``(field, value)``: only documents whose field holds that value; dots reach into nested objects.
        prompt_field: Field of a prompt. The document is prompt and text, joined as they are.
    """

    files: tuple[File, ...]
    text_fields: tuple[str, ...] = ("text",)
    name_fields: tuple[str, ...] = ()
    where: tuple[str, Any] | None = None
    prompt_field: str | None = None

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        found = False
        for file in self.files:
            with opened(file) as lines:
                for number, line in enumerate(lines_of(lines), start=1):
                    check_size(line, f"{file}:{number}")
                    document = self._document(line, file, number) if not line.isspace() else None
                    if document is not None:
                        found = True
                        yield document
        if not found:
            raise NoDocumentError(no_document(self.where, self.files))

    def fingerprint(self) -> str:
        """Content and order of the files, and which documents are taken."""
        prompt = f" {self.prompt_field}" if self.prompt_field is not None else ""
        return f"json {files_fingerprint(self.files)} {self.text_fields} {self.where}{prompt}"

    def text_bytes(self) -> int | None:
        """Size of the files, if they are plain and all is wanted: a little too much, JSON has quotes and names."""
        return None if self.where else _plain_bytes(self.files)

    def _document(self, line: bytes, file: File, number: int) -> Document | None:
        """The document on a line; none if it is not wanted."""
        place = f"{file}:{number}"
        record = parsed_line(line, place)
        if self.where and nested(record, self.where[0]) != self.where[1]:
            return None
        present = [name for name in self.text_fields if name in record]
        if not present:
            raise ValueError(
                f"{place}: no field {' or '.join(map(repr, self.text_fields))} for the text, only {sorted(record)}."
                " Rename the field that holds it."
            )
        text, prompt = checked_text(record[present[0]], place), self._prompt(record, place)
        if is_empty(text):
            prompt = ""
        return Document(record_name(record, self.name_fields, f"{file.name}:{number}"), prompt + text, len(prompt))

    def _prompt(self, record: dict[str, Any], place: str) -> str:
        if self.prompt_field is None:
            return ""
        if self.prompt_field not in record:
            raise ValueError(
                f"{place}: no field {self.prompt_field!r} for the prompt, only {sorted(record)}. Name the one that"
                " holds it."
            )
        return checked_text(record[self.prompt_field], f"{place}, {self.prompt_field!r}")


def checked_text(text: object, place: str) -> str:
    """The text of the document at ``place``, once it is sure to be one.

    Raises:
        ValueError: If it is no string, or cannot be written as UTF-8. It may be empty: see `with_text`.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: the text must be a string, got {type(text).__name__}. Mend or remove this document."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise ValueError(f"{place}: character {error.start} is half a surrogate pair. Remove or replace it.") from error
    return text


def is_empty(text: str) -> bool:
    """Whether there is nothing but white space in a text, and so nothing to learn from or to score."""
    return not text or text.isspace()


def with_text(documents: Iterable[Document]) -> Iterator[Document]:
    """The documents that are not empty; a line in the log says how many were, and names the first.

    Raises:
        NoDocumentError: If all are empty.
    """
    empty: list[str] = []
    taken = count = 0
    for document in documents:
        if not is_empty(document.text):
            taken += 1
            yield document
            continue
        count += 1
        if count <= _NAMED:
            empty.append(document.name)
    if count:
        names = ", ".join(map(repr, empty)) + (" and others" if count > _NAMED else "")
        if taken == 0:
            raise NoDocumentError(f"All of the {count:,} documents are empty ({names}). Name other files.")
        _log.warning("Left out %s empty documents of %s: %s.", f"{count:,}", f"{taken + count:,}", names)


def nested(record: Any, path: str) -> Any:
    """The value at a dotted path such as ``"meta.pile_set_name"``, or ``None``."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def record_name(record: Mapping[str, Any], fields: tuple[str, ...], place: str) -> str:
    """The given fields in one line, or the place if the record has none of them."""
    return " ".join(str(record[field]).strip() for field in fields if record.get(field)) or place


def no_document(where: tuple[str, Any] | None, files: tuple[File, ...]) -> str:
    """What to say when files hold nothing that is wanted."""
    wanted = f" with {where[0]} == {where[1]!r}" if where else ""
    return f"No document{wanted} in {', '.join(map(str, files))}. Name other files."


def is_packed(file: File) -> bool:
    """Whether a file is compressed."""
    return file.suffix in (".gz", ".zst")


@contextmanager
def opened(file: File) -> Iterator[BinaryIO]:
    """The file's bytes, fetched and unpacked as they are read.

    Raises:
        ValueError: If the file is damaged.
    """
    with ExitStack() as stack:
        stream: BinaryIO = stack.enter_context(file.open("rb"))
        if file.suffix == ".gz":
            stream = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=stream)))
        elif file.suffix == ".zst":
            stream = cast(BinaryIO, stack.enter_context(io.BufferedReader(_ZstdFrames(stream))))
        try:
            yield stream
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise ValueError(f"{file}: the compressed file is damaged ({error}). Fetch it again.") from error


class _ZstdFrames(io.RawIOBase):
    """The bytes in zstd frames that follow each other; `zstandard`'s own reader takes a torn frame for the end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._unpacked = memoryview(b"")

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            packed = b""
            if self._frame.eof:
                packed = self._frame.unused_data
                self._frame, self._begun = zstandard.ZstdDecompressor().decompressobj(), False
            packed = packed or self._stream.read(_PACKED_BYTES)
            if not packed:
                if self._begun:
                    raise EOFError("it ends in the middle of a zstd frame")
                return 0
            self._begun, self._unpacked = True, memoryview(self._frame.decompress(packed))
        size = min(len(buffer), len(self._unpacked))
        buffer[:size], self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return size


def _plain_bytes(files: tuple[File, ...]) -> int | None:
    """Size of all files; None if some are compressed or of unknown size."""
    sizes = [None if is_packed(file) else file_size(file) for file in files]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """The lines; of one that is too long as much as shows it."""
    while line := stream.readline(LARGEST_DOCUMENT + 1):
        yield line
        while len(line) > LARGEST_DOCUMENT and not line.endswith(b"\n"):  # for whoever goes on behind it
            line = stream.readline(LARGEST_DOCUMENT + 1)


def check_size(content: bytes, place: str) -> None:
    """Raise a ``ValueError`` for more bytes than a document may have."""
    if len(content) > LARGEST_DOCUMENT:
        raise ValueError(
            f"{place}: a document of more than {LARGEST_DOCUMENT:,} bytes. Split it, or remove it if it is no text."
        )


def decoded(content: bytes, place: str) -> str:
    """The text of bytes in UTF-8; a ``ValueError`` that names the place if they are not."""
    try:
        return content.decode(ENCODING)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: byte {error.start} is not UTF-8 ({error.reason})."
            " Convert the file to UTF-8, or remove the document."
        ) from error


def parsed_line(line: bytes, place: str) -> dict[str, Any]:
    """The object on a line of JSON lines; a ``ValueError`` that names the place if there is none."""
    text = decoded(line, place)
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: malformed JSON ({error}). Each line must hold one whole JSON object.") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise ValueError(f"{place}: JSON that Python does not read ({error}). Mend or remove this line.") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{place}: expected a JSON object, got {type(record).__name__}. Each line must hold one object."
        )
    return record
