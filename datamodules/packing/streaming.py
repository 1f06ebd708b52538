"""Pack a corpus while it is read, and resume at the exact token where a run stopped."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from datamodules.packing.positions import PoSE
from datamodules.packing.sequences import Row, collate_rows, make_row
from datamodules.sources.content import Document
from datamodules.sources.documents import NoDocumentError, RecordFiles, Source, TextFiles
from datamodules.sources.locations import file_identities, file_size
from datamodules.sources.splits import HashSplit
from datamodules.token_store.tokenize import DocumentEncoder, recipe_checksum
from lightning_modules.batch import PackedBatch
from lightning_modules.utilities.collectives import gathered


class Cursor(NamedTuple):
    """Position in a stream: pass over the files, file within the pass, document, and next token."""

    round: int = 0
    file: int = 0
    document: int = 0
    token: int = 0
    content: str = ""  # identity of the file's content; missing in older checkpoints


def file_sources(source: Source | None) -> list[Source]:
    """Split a source into one source per file; raise a ``ValueError`` if it does not consist of files."""
    if isinstance(source, HashSplit):
        return [replace(source, source=each) for each in file_sources(source.source)]
    if isinstance(source, TextFiles | RecordFiles):
        return [replace(source, files=(file,)) for file in source.files]
    raise ValueError(
        "Only files can be streamed: set `train` to files, such as hf://datasets/owner/name/**/*.parquet for a hub"
        " dataset."
    )


@dataclass(eq=False)
class StreamedRows(IterableDataset[tuple[Row, Cursor]]):
    """Endless packed sequences of documents as they are read, each with the cursor of the following sequence.

    Every worker of every process is a stream with its own files: no two streams read the same file. A stream reads its
    files in an order that depends on the seed, the stream and the pass, and the documents of a file in their order.
    Nothing is dropped: tokens that do not fill a sequence begin the next one, in the next file or pass. With ``pose``,
    the positions of a sequence depend on the seed, the stream and the place where the sequence begins.
    """

    files: Sequence[Source]
    encoder: DocumentEncoder
    sequence_length: int
    isolate_documents: bool = True
    pose: PoSE | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    cursors: Sequence[Cursor] = ()  # for the stream of each worker
    first: int = 0  # worker whose stream gives the next batch

    @override
    def __iter__(self) -> Iterator[tuple[Row, Cursor]]:
        number = 0
        workers = 1
        info = get_worker_info()
        if info:
            number = info.id
            workers = info.num_workers
        # The loader always asks worker 0 first, so worker 0 takes the stream whose turn it is.
        worker = (number + self.first) % workers
        cursor = self.cursors[worker] if self.cursors else Cursor()
        return self._pack_rows(self.rank * workers + worker, self.world_size * workers, cursor)

    def _pack_rows(self, stream: int, streams: int, cursor: Cursor) -> Iterator[tuple[Row, Cursor]]:
        segments: list[NDArray[np.int64]] = []  # of the sequence in progress
        missing = self.sequence_length
        begin = cursor  # of the sequence in progress
        for place, tokens in self._read_documents(stream, streams, cursor):
            used = 0
            while used < len(tokens):
                # 1. Take the tokens that the sequence still needs from the document.
                if not segments:
                    begin = place._replace(token=place.token + used)
                segments.append(tokens[used : used + missing])
                used += len(segments[-1])
                missing -= len(segments[-1])
                # 2. Yield a full sequence. A run that resumes from its cursor begins with the following token.
                if missing == 0:
                    ends = np.cumsum([len(segment) for segment in segments])
                    if not self.isolate_documents:
                        ends = ends[-1:]
                    row = make_row(np.concatenate(segments), ends)
                    if self.pose is not None:
                        positions = self.pose.positions(ends, [self.seed, stream, *begin[:4]])
                        row["position_ids"] = torch.from_numpy(positions)
                    yield row, place._replace(token=place.token + used)
                    segments = []
                    missing = self.sequence_length

    def _read_documents(self, stream: int, streams: int, cursor: Cursor) -> Iterator[tuple[Cursor, NDArray[np.int64]]]:
        """Yield the tokens of each document from the cursor on, and their position."""
        # 1. Every stream draws the same permutation of all files and takes every `streams`-th of them.
        own = np.random.default_rng(self.seed).permutation(len(self.files))[stream::streams]
        for turn in count(cursor.round):
            found = False
            # 2. Shuffle the stream's files again in each pass.
            order = np.random.default_rng([self.seed, stream, turn]).permutation(own).tolist()
            for index, file in enumerate(order):
                if (turn, index) < cursor[:2]:  # read before the cursor
                    continue
                is_of_cursor = (turn, index) == cursor[:2]
                content = self._check_content(file, cursor.content if is_of_cursor else "")
                # 3. In the cursor's file, documents before the cursor are parsed but not tokenized; the cursor's
                #    document is tokenized whole and continues with its next token.
                for number, document in self._read_file(file):
                    found = True
                    place = Cursor(turn, index, number, content=content)
                    if place[:3] >= cursor[:3]:
                        skip = cursor.token if place[:3] == cursor[:3] else 0
                        yield place._replace(token=skip), self.encoder([document]).tokens[skip:]
            if not found and turn > cursor.round:  # the first pass may have started in the middle
                raise ValueError(f"The {len(order)} files of stream {stream} have no document. Use other files.")

    def _check_content(self, file: int, expected: str) -> str:
        """Return the identity of a file's content. It must be the expected one, or the cursor would be meaningless."""
        source = self.files[file]
        (stored,) = source.source.files if isinstance(source, HashSplit) else source.files  # type: ignore[attr-defined]
        (content,) = file_identities([stored])
        if expected not in ("", content):
            raise ValueError(
                f"{stored} has changed since the checkpoint was saved, which is in the middle of this file. Restore the"
                " file, or start without `--ckpt_path`."
            )
        return content

    def _read_file(self, file: int) -> Iterator[tuple[int, Document]]:
        """Yield each document of a file with its index; a file without documents is not an error here."""
        with suppress(NoDocumentError):
            for number, document in enumerate(self.files[file]):  # empty documents are counted, but skipped
                if not document.is_empty():
                    yield number, document


class StreamingLoader:
    """Loader of the batches of :class:`StreamedRows`, whose state Lightning saves in every checkpoint.

    Its length is that of the run: without a known length, Lightning prefetches a batch, and checkpoints would count it
    as trained on. A batch comes from one stream; the streams of the workers take turns. ``options`` are further ones of
    `worker_options`.
    """

    def __init__(
        self,
        rows: StreamedRows,
        *,
        batch_size: int,
        steps: int,
        batches_per_step: int = 1,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        self._streams = max(num_workers, 1)
        if len(rows.files) < rows.world_size * self._streams:
            raise ValueError(
                f"{len(rows.files)} file(s) are not enough for {rows.world_size} process(es) x {self._streams}"
                " worker(s), which read different files. Split the files, or lower `num_workers`."
            )
        self.rows = rows
        self.batches = steps * batches_per_step
        self.batches_per_step = batches_per_step
        self._options = {"batch_size": batch_size, "num_workers": num_workers, **options}
        self._done = 0
        self._cursors = [Cursor()] * self._streams

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[PackedBatch]:
        if self._done >= self.batches:  # Lightning would begin one empty epoch after another
            raise ValueError(
                f"The stream has ended after the {self.batches:,} batches of `trainer.max_steps` with"
                f" `trainer.accumulate_grad_batches` = {self.batches_per_step}, and more are needed: set that number"
                " there, and remove callbacks that change it."
            )
        self.rows.cursors = list(self._cursors)
        self.rows.first = self._done % self._streams
        batches = iter(DataLoader(self.rows, collate_fn=_collate_with_cursor, **self._options))
        while self._done < self.batches:
            batch, cursor = next(batches)
            self._cursors[self._done % self._streams] = cursor
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches, the cursors of all streams, and the settings; all processes must call it."""
        own = [[*map(int, cursor[:4]), cursor.content] for cursor in self._cursors]
        cursors = gathered(own) if self.rows.world_size > 1 else [own]  # the first process writes the checkpoint
        # Processes that split the same sequences (Ulysses) are neighbors and have the same cursors: keep one of each.
        cursors = cursors[:: len(cursors) // self.rows.world_size]
        read = {"batches": self._done, "batches_per_step": int(self.batches_per_step)}
        return {**read, "cursors": cursors, **self._order_settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the batches of the state; a ``ValueError`` if the streams are not the same."""
        order = self._order_settings
        state = {"pose_target_length": 0, "pose_chunks": 0, **state}  # missing in older checkpoints
        changed = {name: (state.get(name), value) for name, value in order.items() if state.get(name) != value}
        if changed:
            raise ValueError(
                f"A stream resumes only with the same settings and files, but these have changed since the checkpoint"
                f" (then, now): {changed}. Restore them."
            )
        before = state.get("batches_per_step", 0)
        if before > self.batches_per_step:  # the steps so far have read batches of those to come
            raise ValueError(
                f"A stream cannot resume with `trainer.accumulate_grad_batches` = {self.batches_per_step}, below the"
                f" {before} of the checkpoint, or it would end before `trainer.max_steps`: restore it."
            )
        self._done = state["batches"]
        self._cursors = [Cursor(*cursor) for cursor in state["cursors"][self.rows.rank]]

    @cached_property  # there may be thousands of files, and the state may be needed at each step
    def _order_settings(self) -> dict[str, int]:
        names = "\n".join(_describe_file(source) for source in self.rows.files)
        order = {
            "files": zlib.crc32(names.encode()),
            "tokenizer": recipe_checksum(self.rows.encoder),
            "seed": self.rows.seed,
            "world_size": self.rows.world_size,
            "workers": self._streams,
            "batch_size": self._options["batch_size"],
            "sequence_length": self.rows.sequence_length,
            "pose_target_length": self.rows.pose.target_length if self.rows.pose else 0,
            "pose_chunks": self.rows.pose.chunks if self.rows.pose else 0,
        }
        return {name: int(value) for name, value in order.items()}


def _describe_file(source: Any) -> str:
    """Describe a file by name, size and the settings of its documents. Its content is checked when it is read."""
    if isinstance(source, HashSplit):
        return f"{source.split} 1/{source.share} of {_describe_file(source.source)}"
    (file,) = source.files
    return f"{file.name} {file_size(file)} {replace(source, files=())}"


def _collate_with_cursor(items: list[tuple[Row, Cursor]]) -> tuple[PackedBatch, Cursor]:
    return collate_rows([row for row, _ in items]), items[-1][1]
