"""Read each document of a corpus once, for any number of processes and workers, and batch documents by length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from lightning.pytorch.strategies import Strategy
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from datamodules.corpus.files import CorpusFiles, Part
from datamodules.packing.evaluation_documents import document_row, empty_row
from datamodules.packing.sequences import Row, collate_rows
from datamodules.sources.documents import is_empty
from lightning_modules.batch import DocumentRef, PackedBatch
from lightning_modules.scoring.corpus.failures import LEFT_OUT
from lightning_modules.scoring.corpus.shards import ReadProgress
from lightning_modules.scoring.token_scores import shorten_text, text_sha256

PARTS_PER_STREAM = 4  # with fewer parts, each stream reads some rows of all parts
POOL_DOCUMENTS, POOL_BATCHES = 256, 32  # limits of the pool from which documents of similar length are batched
_MAX_FAILED = 256  # failed documents that wait for a batch


@dataclass(frozen=True)
class CorpusRows:
    """Tokenizer of documents; those with more than ``max_tokens`` tokens are cut or skipped."""

    tokenizer: PreTrainedTokenizerFast
    add_special_tokens: bool
    max_tokens: int | None
    overlong: Literal["cut", "skip"]

    def __call__(self, ref: DocumentRef, text: str) -> tuple[DocumentRef, Row | None]:
        """Return the reference and the sequence, or without a sequence the reference with its ``error``."""
        if ref.error is not None:
            return ref, None
        if is_empty(text):
            return ref._replace(error=f"{LEFT_OUT}the text is empty or only white space"), None
        kept = self.max_tokens if self.overlong == "cut" else None
        try:
            row = document_row(
                text, self.tokenizer, name=ref.key, add_special_tokens=self.add_special_tokens, max_tokens=kept
            )
        except ValueError as error:
            return ref._replace(error=str(error)), None
        tokens = len(row["input_ids"])
        if self.max_tokens is not None and tokens > self.max_tokens:
            reason = f"{LEFT_OUT}{tokens} tokens exceed `max_tokens` = {self.max_tokens}"
            return ref._replace(error=reason), None
        ref = ref._replace(truncated=len(row["text"]) < len(text), text_hash=text_sha256(text))
        return ref._replace(first_words=shorten_text(text)), row


Reading = tuple[PackedBatch, list[str]]
"""A batch, and the files that turned out unreadable since the preceding batch."""


class CorpusStream(IterableDataset[Reading]):
    """Batches of the documents that are not scored yet; each worker of each process reads its own `shares`.

    A batch has one document, or several of similar length with at most ``batch_tokens`` tokens including padding.
    """

    def __init__(
        self,
        corpus: CorpusFiles,
        done: Mapping[str, NDArray[np.int64]],
        make_row: Callable[[DocumentRef, str], tuple[DocumentRef, Row | None]],
        *,
        batch_tokens: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self.corpus = corpus
        self.make_row = make_row
        self.batch_tokens = batch_tokens
        self.rank = rank
        self.world_size = world_size
        self.parts: list[Part] = []  # parts with documents left
        self.done: list[NDArray[np.int64]] = []  # rows of each part that are scored already, ascending
        # The shard must not depend on what is done: other runs, with other shards, know only their own rows.
        self.own: list[Share] = []  # rows of each of these parts that belong to the shard
        for number, first, step in shares(len(corpus.parts), shard, shards):
            part = corpus.parts[number]
            rows = done.get(corpus.names[part.file], np.empty(0, np.int64))
            end = np.iinfo(np.int64).max if part.rows is None else part.first + part.rows
            rows = rows[slice(*np.searchsorted(rows, (part.first, end)))]
            if part.rows is None or len(rows) < part.rows:
                self.parts.append(part)
                self.done.append(rows)
                self.own.append(Share(number, first, step))

    @override
    def __iter__(self) -> Iterator[Reading]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return self._make_batches(self.rank * workers + worker, self.world_size * workers)

    def expected(self, workers: int) -> int | None:
        """Estimate the number of documents of this process; None if the size of a part is unknown."""
        if any(part.expected_rows is None for part in self.parts):
            return None
        both = zip(self.parts, self.done, strict=True)
        rows = [max((part.expected_rows or 0) - len(done), 0) for part, done in both]
        own = range(self.rank * workers, (self.rank + 1) * workers)
        taken = [share for stream in own for share in self._own_shares(stream, self.world_size * workers)]
        return round(sum(rows[share.part] / share.step for share in taken))

    def _own_shares(self, stream: int, streams: int) -> Iterator["Share"]:
        """Yield the rows of parts of the shard that a stream of this run reads."""
        for part, first, step in shares(len(self.parts), stream, streams):
            own = self.own[part]
            yield Share(part, own.first + own.step * first, own.step * step)

    def _make_batches(self, stream: int, streams: int) -> Iterator[Reading]:
        pool: list[tuple[DocumentRef, Row]] = []
        failed: list[DocumentRef] = []
        unreadable: list[str] = []
        for item in self._read_documents(stream, streams):
            # 1. Collect documents, so that those of similar length can share a batch.
            if isinstance(item, str):
                unreadable.append(item)
            elif item[1] is None:
                failed.append(item[0])
            else:
                pool.append((item[0], item[1]))
            # 2. Batch them when the pool is full. Failures travel with a batch, because the callback that records them
            #    runs in another process than the worker that finds them.
            if self._is_full(pool) or len(failed) >= _MAX_FAILED:
                yield from self._make_readings(pool, failed, unreadable)
                pool, failed, unreadable = [], [], []
        yield from self._make_readings(pool, failed, unreadable)

    def _read_documents(self, stream: int, streams: int) -> Iterator[tuple[DocumentRef, Row | None] | str]:
        """Yield reference and sequence of each document of a stream, or why the rest of a part cannot be read."""
        for index, first, step in self._own_shares(stream, streams):
            part, rows = self.parts[index], self.done[index]
            done = frozenset(rows[rows % step == first].tolist())  # of a large file, only the rows of this stream

            def wanted(row: int, done: frozenset[int] = done, first: int = first, step: int = step) -> bool:
                return row % step == first and row not in done

            try:
                for ref, text in self.corpus.read(part, wanted):
                    yield self.make_row(ref, text)
            except (ValueError, OSError) as error:
                yield f"{self.corpus.names[part.file]}: {' '.join(str(error).split())}"

    def _is_full(self, pool: Sequence[tuple[DocumentRef, Row]]) -> bool:
        if self.batch_tokens is None:
            return len(pool) > 0
        tokens = sum(len(row["input_ids"]) for _, row in pool)
        return len(pool) >= POOL_DOCUMENTS or tokens >= POOL_BATCHES * self.batch_tokens

    def _make_readings(
        self, pool: list[tuple[DocumentRef, Row]], failed: list[DocumentRef], unreadable: list[str]
    ) -> Iterator[Reading]:
        for group in _group_by_length(pool, self.batch_tokens or 0):
            batch = collate_rows([row for _, row in group])
            batch["document_refs"], batch["failed"] = [ref for ref, _ in group], failed
            yield batch, unreadable
            failed, unreadable = [], []
        if failed or unreadable:
            batch = idle_batch()
            batch["failed"] = failed
            yield batch, unreadable


class Share(NamedTuple):
    """Rows of a part that a stream reads: those whose number modulo ``step`` is ``first``."""

    part: int
    first: int
    step: int


def shares(parts: int, stream: int, streams: int) -> list[Share]:
    """Return what one of several streams reads. Together, the streams read every row once.

    If there are enough parts, a stream reads every ``streams``-th part. Otherwise it reads all parts and takes every
    ``streams``-th row, because reading is cheap compared to scoring.
    """
    if parts >= PARTS_PER_STREAM * streams:
        return [Share(part, 0, 1) for part in range(stream, parts, streams)]
    # Shift the first row from part to part, or stream 0 would get the extra row of every part.
    return [Share(part, (stream - part) % streams, streams) for part in range(parts)]


def _group_by_length(pool: list[tuple[DocumentRef, Row]], batch_tokens: int) -> Iterator[list[tuple[DocumentRef, Row]]]:
    """Group documents of similar length into batches of at most ``batch_tokens`` tokens, or of one longer document."""
    group: list[tuple[DocumentRef, Row]] = []
    for item in sorted(pool, key=lambda item: len(item[1]["input_ids"])):
        if group and len(item[1]["input_ids"]) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def idle_batch() -> PackedBatch:
    """Return a batch of one unscored token, for a process that has no documents left while others do."""
    batch = collate_rows([empty_row()])
    batch["document_refs"], batch["failed"] = [], []
    return batch


def _pass_through(reading: Any) -> Any:
    return reading


class CorpusLoader:
    """Loader of the batches of a process.

    With a strategy in ``lockstep``, all processes make the same number of steps: they agree before each step whether
    any has documents left, and those without get an `idle_batch`. ``options`` are those of `worker_options`.
    """

    def __init__(self, stream: CorpusStream, *, lockstep: Strategy | None = None, **options: Any) -> None:
        self.stream = stream
        self.lockstep = lockstep
        self._options = options
        self._read_documents = 0
        self._complete = False
        self._unreadable: list[str] = []

    def __iter__(self) -> Iterator[PackedBatch]:
        batches = iter(DataLoader(self.stream, batch_size=None, collate_fn=_pass_through, **self._options))
        while True:
            reading = next(batches, None)
            done = reading is None
            if done if self.lockstep is None else self.lockstep.reduce_boolean_decision(done, all=True):
                break
            if reading is None:
                yield idle_batch()
                continue
            batch, unreadable = reading
            self._unreadable += unreadable
            self._read_documents += len(batch["document_refs"]) + len(batch["failed"])
            yield batch
        self._complete = True

    def read_progress(self) -> ReadProgress:
        """Return the progress of this process."""
        return ReadProgress(self._read_documents, self._complete, self._unreadable)
