"""Read each document of a corpus once, for any number of processes and workers, and batch documents by length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from lightning.pytorch.strategies import Strategy
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from datamodules.corpus.files import CorpusFiles
from datamodules.packing.evaluation_documents import document_row, empty_row
from datamodules.packing.sequences import Row, collate_rows
from datamodules.sources.documents import is_empty
from lightning_modules.batch import UNREADABLE, DocumentRef, PackedBatch
from lightning_modules.scoring.corpus.failures import LEFT_OUT
from lightning_modules.scoring.token_scores import shorten_text, text_sha256

PARTS_PER_STREAM = 4  # with fewer parts, each stream reads some rows of all parts
POOL_DOCUMENTS, POOL_BATCHES = 256, 32  # limits of the pool from which documents of similar length are batched
_MAX_FAILED = 256  # failed documents that wait for a batch

Document = tuple[DocumentRef, Row | None]
"""Reference and sequence of a document, or without a sequence a reference with its ``error``."""


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


class CorpusStream(IterableDataset[PackedBatch]):
    """Batches of the documents of a shard that are not scored yet; each worker of each process reads its own `shares`.

    A batch has one document, or several of similar length with at most ``batch_tokens`` tokens including padding.
    ``done`` has the scored rows of each file, ascending. ``shard`` and ``process`` are pairs of an index and a number.
    """

    def __init__(
        self,
        corpus: CorpusFiles,
        done: Mapping[str, NDArray[np.int64]],
        tokenize: Callable[[DocumentRef, str], Document],
        *,
        batch_tokens: int | None = None,
        shard: tuple[int, int] = (0, 1),
        process: tuple[int, int] = (0, 1),
    ) -> None:
        self.corpus = corpus
        self.done = done
        self.tokenize = tokenize
        self.batch_tokens = batch_tokens
        self.shard = shard
        self.process = process

    @override
    def __iter__(self) -> Iterator[PackedBatch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world_size = self.process
        own = self.own_shares(rank * workers + worker, world_size * workers)
        pool: list[Document] = []
        for document in chain.from_iterable(map(self._read_share, own)):
            pool.append(document)
            if self._is_full(pool):
                yield from _make_batches(pool, self.batch_tokens or 0)
                pool = []
        yield from _make_batches(pool, self.batch_tokens or 0)

    def own_shares(self, stream: int, streams: int) -> list[Share]:
        """Return the rows of parts of the shard that a stream of this run reads.

        They depend on neither the scored rows nor other runs, so each process can decide by itself.
        """
        own = shares(len(self.corpus.parts), *self.shard)
        found = []
        for index, first, step in shares(len(own), stream, streams):
            share = own[index]
            found.append(Share(share.part, share.first + share.step * first, share.step * step))
        return found

    def count_missing(self) -> int | None:
        """Return how many documents of this process are not scored yet; None if the corpus has JSON lines."""
        missing = 0
        for share in self.own_shares(*self.process):
            rows = self._count_rows(share)
            if rows is None:
                return None
            missing += rows - len(self._done_rows(share))
        return missing

    def _count_rows(self, share: Share) -> int | None:
        part = self.corpus.parts[share.part]
        if part.rows is None:
            return None
        first = part.first + (share.first - part.first) % share.step
        return len(range(first, part.first + part.rows, share.step))

    def _done_rows(self, share: Share) -> NDArray[np.int64]:
        part = self.corpus.parts[share.part]
        rows = self.done.get(part.file, np.empty(0, np.int64))
        end = np.iinfo(np.int64).max if part.rows is None else part.first + part.rows
        rows = rows[slice(*np.searchsorted(rows, (part.first, end)))]
        return rows[rows % share.step == share.first]

    def _read_share(self, share: Share) -> Iterator[Document]:
        """Read and tokenize the documents without scores; the rest of a damaged part is a reference without a row."""
        part = self.corpus.parts[share.part]
        done = frozenset(self._done_rows(share).tolist())
        if len(done) == self._count_rows(share):
            return  # the part is not opened

        def wanted(row: int) -> bool:
            return row % share.step == share.first and row not in done

        try:
            for ref, text in self.corpus.read(part, wanted):
                yield self.tokenize(ref, text)
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            yield DocumentRef(part.file, part.file, UNREADABLE, {}, error=reason), None

    def _is_full(self, pool: Sequence[Document]) -> bool:
        lengths = [len(row["input_ids"]) for _, row in pool if row is not None]
        if len(lengths) >= POOL_DOCUMENTS or len(pool) - len(lengths) >= _MAX_FAILED:
            return True
        return sum(lengths) >= max(POOL_BATCHES * (self.batch_tokens or 0), 1)


def tokenize_document(
    ref: DocumentRef,
    text: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    add_special_tokens: bool,
    max_tokens: int | None,
    overlong: Literal["cut", "skip"],
) -> Document:
    """Tokenize a document; one with more than ``max_tokens`` tokens is cut or skipped."""
    if ref.error is not None:
        return ref, None
    if is_empty(text):
        return ref._replace(error=f"{LEFT_OUT}the text is empty or only white space"), None
    kept = max_tokens if overlong == "cut" else None
    try:
        row = document_row(text, tokenizer, name=ref.key, add_special_tokens=add_special_tokens, max_tokens=kept)
    except ValueError as error:
        return ref._replace(error=str(error)), None
    tokens = len(row["input_ids"])
    if max_tokens is not None and tokens > max_tokens:
        return ref._replace(error=f"{LEFT_OUT}{tokens} tokens exceed `max_tokens` = {max_tokens}"), None
    truncated = len(row["text"]) < len(text)
    return ref._replace(truncated=truncated, text_hash=text_sha256(text), first_words=shorten_text(text)), row


def _make_batches(pool: Sequence[Document], batch_tokens: int) -> Iterator[PackedBatch]:
    """Batch documents of similar length; the first batch also has the failed documents.

    Failures travel with a batch, because the callback that records them runs in another process than the worker that
    finds them.
    """
    failed = [ref for ref, row in pool if row is None]
    for group in _group_by_length([(ref, row) for ref, row in pool if row is not None], batch_tokens):
        batch = collate_rows([row for _, row in group])
        batch["document_refs"], batch["failed"] = [ref for ref, _ in group], failed
        yield batch
        failed = []
    if failed:
        batch = idle_batch()
        batch["failed"] = failed
        yield batch


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


def _pass_through(batch: Any) -> Any:
    return batch


class CorpusLoader:
    """Loader of the batches of a process.

    With a strategy in ``lockstep``, all processes make the same number of steps: they agree before each step whether
    any has documents left, and those without get an `idle_batch`. ``options`` are those of `worker_options`.
    """

    def __init__(self, stream: CorpusStream, *, lockstep: Strategy | None = None, **options: Any) -> None:
        self.stream = stream
        self.lockstep = lockstep
        self._options = options

    def __iter__(self) -> Iterator[PackedBatch]:
        batches = iter(DataLoader(self.stream, batch_size=None, collate_fn=_pass_through, **self._options))
        while True:
            batch = next(batches, None)
            done = batch is None
            if done if self.lockstep is None else self.lockstep.reduce_boolean_decision(done, all=True):
                return
            yield idle_batch() if batch is None else batch
