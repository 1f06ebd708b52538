"""Use the synthetic language in experiments: training sequences, annotated documents and questions."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerFast

from datamodules.recall.documents import RecallRecord, recall_questions, recall_records
from datamodules.recall.language import recall_tokenizer
from datamodules.recall.module import RecallDataModule
from lightning_modules.models.tokenization.tokenizer import tokenizer_hash

EVALUATION_SEED = 1_000_003  # training documents have smaller ones
NATURAL_SLOT = 16


def depth_parts(count: int, tokens: int, depths: int, last: float) -> Iterator[tuple[int, tuple[float, float], int]]:
    """Yield number, depth range and seed of the questions of each depth."""
    for part in range(depths):
        share = count * (part + 1) // depths - count * part // depths
        yield share, (last * part / depths, last * (part + 1) / depths), EVALUATION_SEED + 10 * tokens + part


class RecallCorpus:
    """Corpus of ``longce reproduce miniature`` in the synthetic language of `recall_records`.

    Everything that is evaluated is natural text (an event every 16 words) of the first dialect.
    """

    remark = (
        "A synthetic language models one property of text, that a few of its tokens depend on the far past: what is"
        " reproduced here works as machinery, and how much it helps on natural language is not shown."
    )

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token per word, ``<bos>`` first."""
        return recall_tokenizer()

    def training_data(
        self, rows: int, *, sequence_length: int, document_rows: int, slot: int, second_dialect: float, **options: Any
    ) -> RecallDataModule:
        """Make training sequences.

        Args:
            rows: Number of rows.
            sequence_length: Tokens in each.
            document_rows: Rows that a document fills: all but the first begin in its middle.
            slot: Words from one event to the next, on average.
            second_dialect: Fraction of the documents in the second dialect.
            **options: ``batch_size``, ``seed`` and ``cache_dir`` of the data module.
        """
        return RecallDataModule(
            train_documents=-(-rows // document_rows),
            document_length=document_rows * sequence_length - 1,  # <bos> fills the last row up
            slot=slot,
            sequence_length=sequence_length,
            second_dialect=second_dialect,
            **options,
        )

    def documents(self, count: int, tokens: int) -> Iterator[RecallRecord]:
        """Write documents of ``tokens`` tokens to measure on."""
        return recall_records(count, length=tokens - 1, slot=NATURAL_SLOT, seed=EVALUATION_SEED + tokens)

    def questions(self, count: int, tokens: int, *, depths: int, distance: int) -> list[list[RecallRecord]]:
        """Write documents that end in an answer that was given once, by the depth of that place.

        Of ``count`` documents, about ``count / depths`` are in each of the parts of equal length into which the places
        are divided, from the front to the back; at least ``distance`` tokens separate place and answer.
        """
        last = max(1 - (distance + 4) / tokens, 0.0)  # without the fact's 3 words and the first token
        return [
            list(recall_questions(share, length=tokens - 1, depth=depth, slot=NATURAL_SLOT, seed=seed))
            for share, depth, seed in depth_parts(count, tokens, depths, last)
        ]

    def fingerprint(self) -> str:
        """Return a text that changes when documents, questions or the tokenizer do.

        The size of the vocabulary decides which random weights a seed draws.
        """
        samples = chain(self.documents(1, 64), self.questions(1, 64, depths=1, distance=0)[0])
        return " ".join([*(record.text for record in samples), tokenizer_hash(self.tokenizer())])
