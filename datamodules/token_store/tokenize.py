"""Tokenize texts on all cores, while other batches are read and written."""

import json
import os
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast

from datamodules.sources.content import Document
from lightning_modules.models.tokenization.encoding import encode_text, panics_caught
from lightning_modules.models.tokenization.tokenizer import tokenizer_hash, vocabulary_size

# Limits of a batch: a token needs about 260 bytes of memory until it is written, a character about 65.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 500_000 * min(max(os.cpu_count() or 1, 4), 32)

AHEAD = 2
"""Batches that are tokenized at the same time. They share the tokenizer's threads, so no thread is idle while the
longest text of a batch is finished or Python builds arrays of its tokens."""


@dataclass(frozen=True)
class TokenizedBatch:
    """Concatenated tokens of several documents."""

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]  # tokens of each document
    prompt_spans: NDArray[np.int64]  # [s, 2] start and stop of each run of prompt tokens in ``tokens``
    text_bytes: int  # in UTF-8


class DocumentEncoder(Protocol):
    """Maker of the tokens of documents."""

    recipe: dict[str, Any]  # everything that decides the tokens of a document

    def __call__(self, documents: list[Document]) -> TokenizedBatch:
        """Return the tokens of one or more documents."""


def recipe_checksum(encoder: DocumentEncoder) -> int:
    """Return a CRC-32 of everything that decides the tokens of a document."""
    return zlib.crc32(json.dumps(encoder.recipe, sort_keys=True).encode())


class Encoder:
    """Tokenizer of batches of documents, which appends the tokenizer's end-of-text token to each document.

    Prompt and response are tokenized as one text. A token with characters of both belongs to the response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, add_special_tokens: bool) -> None:
        # Use the backend: it does not warn about a "maximum sequence length", which is irrelevant before packing.
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._add_special_tokens = add_special_tokens
        self._end_of_text: int | None = tokenizer.eos_token_id
        self._vocabulary_size = vocabulary_size(tokenizer)
        self.recipe = {
            "tokenizer": tokenizer_hash(tokenizer),
            "add_special_tokens": add_special_tokens,
            "end_of_text": self._end_of_text,
            "vocabulary_size": self._vocabulary_size,
        }

    def __call__(self, documents: list[Document]) -> TokenizedBatch:
        """Tokenize one or more documents."""
        texts = [document.text for document in documents]
        prompt_ends = [each.prompt_end for each in documents]
        # Character offsets take time, and only prompts need them.
        encode = self._backend.encode_batch if any(prompt_ends) else self._backend.encode_batch_fast
        try:
            with panics_caught():
                encodings = encode(texts, add_special_tokens=self._add_special_tokens)
        except Exception:
            self._name_document(documents)
            raise
        ids = [np.array(self._with_end_of_text(encoding.ids), dtype=np.int64) for encoding in encodings]
        tokens = np.concatenate(ids)
        if tokens.size and tokens.max() >= self._vocabulary_size:
            raise ValueError(
                f"The tokenizer returned token {tokens.max()}, but its vocabulary has {self._vocabulary_size} tokens."
                " Its tokenizer.json is inconsistent: download it again."
            )
        lengths = np.array([len(each) for each in ids])
        prompt_lengths = [_count_prompt_tokens(*each) for each in zip(encodings, prompt_ends, strict=True)]
        starts = np.cumsum(lengths) - lengths
        spans = np.stack([starts, starts + prompt_lengths], axis=1)
        return TokenizedBatch(
            tokens=tokens,
            lengths=lengths,
            prompt_spans=spans[spans[:, 0] < spans[:, 1]],
            text_bytes=sum(len(text.encode()) for text in texts),
        )

    def _name_document(self, documents: list[Document]) -> None:
        """Raise a ``ValueError`` for the first document on which the tokenizer fails."""
        for document in documents:
            encode_text(document.text, self._tokenizer, name=document.name)

    def _with_end_of_text(self, ids: list[int]) -> list[int]:
        """Append the end-of-text token, unless the tokenizer's special tokens already did."""
        if self._end_of_text is None or ids[-1:] == [self._end_of_text]:
            return ids
        return [*ids, self._end_of_text]


def _count_prompt_tokens(encoding: Encoding, prompt_end: int) -> int:
    """Count the tokens before the first token that reaches beyond the prompt."""
    if prompt_end == 0:
        return 0
    return next((n for n, (_, end) in enumerate(encoding.offsets) if end > prompt_end), len(encoding.ids))


def tokenized(documents: Iterable[Document], encoder: DocumentEncoder) -> Generator[TokenizedBatch]:
    """Yield tokenized batches of the documents in order; at most `AHEAD` + 2 batches are in memory at a time."""
    pending: deque[Future[TokenizedBatch]] = deque()
    with ThreadPoolExecutor(AHEAD) as pool:
        try:
            for batch in _group_documents(documents):
                pending.append(pool.submit(encoder, batch))
                if len(pending) > AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _group_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches large enough for all threads of the tokenizer and small enough for memory."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += document.size
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch
