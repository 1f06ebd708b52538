"""Read and tokenize the documents of a shard that have no scores."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from datamodules.sources.corpus import CorpusFiles, DocumentRef, Share
from lightning_modules.scoring.long_context_scorer import EncodedDocument

_POOL_DOCUMENTS = 256
_POOL_BATCHES = 32
"""Number of documents, and of batches of tokens, to read before documents of similar length are batched."""

Document = tuple[DocumentRef, EncodedDocument]
Rows = dict[str, NDArray[np.int64]]
"""Ascending numbers of rows, by file."""

Item = TypeVar("Item")


def read_missing(
    corpus: CorpusFiles,
    shares: Sequence[Share],
    done: Rows,
    encode: Callable[[Any], EncodedDocument],
    unreadable: list[str],
) -> Iterator[Document]:
    """Yield the documents without scores, tokenized; add files that cannot be read to the end to ``unreadable``."""
    for share in shares:
        scored = frozenset(_scored_rows(share, done).tolist())
        if len(scored) == share.count():
            continue  # the file is not opened
        wanted = partial(_is_missing, share, scored)
        try:
            for ref, content in corpus.read(share.part, wanted):
                if ref.error is not None:
                    yield ref, EncodedDocument(None, ref.error)
                else:
                    yield ref, encode(content)
        except (ValueError, OSError) as error:
            unreadable.append(f"{share.part.file}: {' '.join(str(error).split())}")


def _is_missing(share: Share, scored: frozenset[int], row: int) -> bool:
    return row in share and row not in scored


def _scored_rows(share: Share, done: Rows) -> NDArray[np.int64]:
    part = share.part
    rows = done.get(part.file, np.empty(0, np.int64))
    end = np.iinfo(np.int64).max
    if part.rows is not None:
        end = part.first + part.rows
    rows = rows[slice(*np.searchsorted(rows, (part.first, end)))]
    return rows[rows % share.step == share.first]


def count_missing(shares: Sequence[Share], done: Rows) -> int | None:
    """Return how many documents have no scores; None if the corpus has JSON lines, which are not counted."""
    missing = 0
    for share in shares:
        rows = share.count()
        if rows is None:
            return None
        missing += rows - len(_scored_rows(share, done))
    return missing


def pools(documents: Iterator[Document], batch_tokens: int | None, shard_rows: int) -> Iterator[list[Document]]:
    """Yield documents one by one, or in pools from which batches of similar length are drawn."""
    max_tokens = 1
    max_documents = 1
    if batch_tokens is not None:
        max_tokens = _POOL_BATCHES * batch_tokens
        # With a pool of 256 documents of 100 to 2,000 tokens, lengths within a batch of 32,768 tokens differ so much
        # that padding adds 23% to the documents' tokens; with a pool of 1,000 documents, 7%.
        max_documents = max(_POOL_DOCUMENTS, shard_rows)
    pool: list[Document] = []
    tokens = 0
    for ref, document in documents:
        pool.append((ref, document))
        tokens += document.tokens
        if tokens >= max_tokens or len(pool) >= max_documents:
            yield pool
            pool = []
            tokens = 0
    if pool:
        yield pool


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield from an iterator that a thread advances, one item ahead."""
    pool = ThreadPoolExecutor(1)
    try:
        following = pool.submit(next, items, None)
        while True:
            item = following.result()
            if item is None:
                return
            following = pool.submit(next, items, None)
            yield item
    finally:
        pool.shutdown(wait=False)  # one who stops does not wait for the next document
