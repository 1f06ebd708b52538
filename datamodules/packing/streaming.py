"""Make rows while the corpus is read, and resume at the very token where a run stopped."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from datamodules.packing.sequences import Row, collate_rows, make_row
from datamodules.sources.documents import Document, NoDocumentError, RecordFiles, Source, TextFiles, is_empty
from datamodules.sources.locations import file_identities, file_size
from datamodules.sources.splits import HashSplit
from datamodules.token_store.tokenize import Encoder
from lightning_modules.batch import PackedBatch
from lightning_modules.utilities.collectives import gathered


class Cursor(NamedTuple):
    """Position of a stream: its pass over its files, the file in that, the document, and its next token."""

    round: int = 0
    file: int = 0
    document: int = 0
    token: int = 0
    content: str = ""  # identity of the file's content; older checkpoints do not have it


def file_sources(source: Source) -> list[Source]:
    """One source for each file; a ``ValueError`` if the source is not made of files."""
    if isinstance(source, HashSplit):
        return [replace(source, source=each) for each in file_sources(source.source)]
    if isinstance(source, TextFiles | RecordFiles):
        return [replace(source, files=(file,)) for file in source.files]
    raise ValueError(
        "Only files can be streamed: name those of a hub dataset as hf://datasets/owner/name/**/*.parquet."
    )


@dataclass(eq=False)
class StreamedRows(IterableDataset[tuple[Row, Cursor]]):
    """Yield endless rows of documents as they are read, each with the cursor of the row that follows it.

    Files are divided among streams, of which each worker of each process is one: no two read the same file. A stream
    reads its files in an order that depends on the seed, the stream and the pass; documents of a file follow each
    other. Nothing is dropped: tokens that do not fill a row begin the next one, in the next file or pass.
    """

    files: Sequence[Source]
    encoder: Encoder
    sequence_length: int
    isolate_documents: bool = True
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    cursors: Sequence[Cursor] = ()  # of the stream of each worker
    first: int = 0  # worker whose stream is next

    @override
    def __iter__(self) -> Iterator[tuple[Row, Cursor]]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        # The loader asks worker 0 first: it takes the stream whose turn it is.
        worker = (number + self.first) % workers
        cursor = self.cursors[worker] if self.cursors else Cursor()
        return self._rows(self.rank * workers + worker, self.world_size * workers, cursor)

    def _rows(self, stream: int, streams: int, cursor: Cursor) -> Iterator[tuple[Row, Cursor]]:
        parts: list[NDArray[np.int64]] = []
        missing = self.sequence_length
        for place, tokens in self._documents(stream, streams, cursor):
            used = 0
            while used < len(tokens):
                parts.append(tokens[used : used + missing])
                used, missing = used + len(parts[-1]), missing - len(parts[-1])
                if missing == 0:
                    ends = np.cumsum([len(part) for part in parts])
                    row = make_row(np.concatenate(parts), ends if self.isolate_documents else ends[-1:])
                    yield row, place._replace(token=place.token + used)
                    parts, missing = [], self.sequence_length

    def _documents(self, stream: int, streams: int, cursor: Cursor) -> Iterator[tuple[Cursor, NDArray[np.int64]]]:
        """Yield the tokens of each document from the cursor on, and where they begin."""
        own = np.random.default_rng(self.seed).permutation(len(self.files))[stream::streams]
        for turn in count(cursor.round):
            found = False
            order = np.random.default_rng([self.seed, stream, turn]).permutation(own).tolist()
            for index, file in enumerate(order):
                if (turn, index) < cursor[:2]:
                    continue
                content = self._content(file, cursor.content if (turn, index) == cursor[:2] else "")
                for number, document in self._read(file):
                    found = True
                    place = Cursor(turn, index, number, content=content)
                    if place[:3] >= cursor[:3]:
                        skip = cursor.token if place[:3] == cursor[:3] else 0
                        yield place._replace(token=skip), self.encoder([document]).tokens[skip:]
            if not found and turn > cursor.round:  # a whole pass
                raise ValueError(
                    f"None of the {len(order)} files of stream {stream} holds a document. Name other files."
                )

    def _content(self, file: int, expected: str) -> str:
        """Identify a file's content, and refuse other content than expected: a position in it would mean nothing."""
        source = self.files[file]
        (stored,) = source.source.files if isinstance(source, HashSplit) else source.files  # type: ignore[attr-defined]
        (content,) = file_identities([stored])
        if expected not in ("", content):
            raise ValueError(
                f"{stored} has changed since the checkpoint was written, in the middle of this file. Restore it, or"
                " start without `--ckpt_path`."
            )
        return content

    def _read(self, file: int) -> Iterator[tuple[int, Document]]:
        """Yield each document of a file with its number; a file without any is not an error here."""
        with suppress(NoDocumentError):
            for number, document in enumerate(self.files[file]):  # empty ones are counted, and left out
                if not is_empty(document.text):
                    yield number, document


class StreamingLoader:
    """Load batches of :class:`StreamedRows`; Lightning keeps the loader's state in every checkpoint.

    Its length is the run's: with a known length Lightning does not read ahead of the training, which would put a batch
    into a checkpoint that was not trained on. All rows of a batch are of one stream; those of the workers take turns.
    """

    def __init__(
        self, rows: StreamedRows, *, batch_size: int, batches: int, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        self._streams = max(num_workers, 1)
        if len(rows.files) < rows.world_size * self._streams:
            raise ValueError(
                f"{len(rows.files)} file(s) are not enough for {rows.world_size} process(es) x {self._streams}"
                " worker(s): no two read the same file. Split the files, or lower `num_workers`."
            )
        self.rows = rows
        self.batches = batches
        self._options = {"batch_size": batch_size, "num_workers": num_workers, "pin_memory": pin_memory}
        self._done = 0
        self._cursors = [Cursor()] * self._streams

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[PackedBatch]:
        self.rows.cursors, self.rows.first = list(self._cursors), self._done % self._streams
        batches = iter(DataLoader(self.rows, collate_fn=_collate, **self._options))  # type: ignore[arg-type]
        while self._done < self.batches:
            batch, cursor = next(batches)
            self._cursors[self._done % self._streams] = cursor
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches, each stream's cursor, and the settings; all processes must call it."""
        own = [[*map(int, cursor[:4]), cursor.content] for cursor in self._cursors]
        cursors = gathered(own) if self.rows.world_size > 1 else [own]  # the checkpoint is written by the first process
        cursors = cursors[:: len(cursors) // self.rows.world_size]  # of neighbors that read the same, the first
        return {"batches": self._done, "cursors": cursors, **self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after those batches, with the same streams only."""
        order = self._order
        changed = {name: (state.get(name), value) for name, value in order.items() if state.get(name) != value}
        if changed:
            raise ValueError(
                f"A stream resumes only as it was: the checkpoint differs in (then, now) {changed}. Restore these"
                " settings and files."
            )
        self._done = state["batches"]
        self._cursors = [Cursor(*cursor) for cursor in state["cursors"][self.rows.rank]]

    @cached_property  # the names and sizes of thousands of files, and the state may be asked for at each step
    def _order(self) -> dict[str, int]:
        names = "\n".join(_description(source) for source in self.rows.files)
        order = {
            "files": zlib.crc32(names.encode()),
            "tokenizer": self.rows.encoder.checksum,
            "seed": self.rows.seed,
            "world_size": self.rows.world_size,
            "workers": self._streams,
            "batch_size": self._options["batch_size"],
            "sequence_length": self.rows.sequence_length,
        }
        return {name: int(value) for name, value in order.items()}


def _description(source: Any) -> str:
    """Describe a file's name and size and the settings of its documents. Its content is compared when it is read."""
    if isinstance(source, HashSplit):
        return f"{source.split} 1/{source.share} of {_description(source.source)}"
    (file,) = source.files
    return f"{file.name} {file_size(file)} {replace(source, files=())}"


def _collate(items: list[tuple[Row, Cursor]]) -> tuple[PackedBatch, Cursor]:
    return collate_rows([row for row, _ in items]), items[-1][1]
