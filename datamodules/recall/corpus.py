"""The made-up language as a corpus of experiments: training rows, documents with what is known of them, questions."""

from collections.abc import Iterator
from itertools import chain

from transformers import PreTrainedTokenizerFast

from datamodules.recall.documents import RecallRecord, recall_questions, recall_records
from datamodules.recall.language import recall_tokenizer
from datamodules.recall.module import RecallDataModule

EVALUATION_SEED = 1_000_003  # training documents have smaller ones
NATURAL_SLOT = 16


def depth_parts(count: int, tokens: int, depths: int, last: float) -> Iterator[tuple[int, tuple[float, float], int]]:
    """How many questions of documents of so many tokens, between which depths up to the last, and by what seed."""
    for part in range(depths):
        share = count * (part + 1) // depths - count * part // depths
        yield share, (last * part / depths, last * (part + 1) / depths), EVALUATION_SEED + 10 * tokens + part


class RecallCorpus:
    """What ``longce reproduce miniature`` asks of a corpus, for the made-up language of `recall_documents`.

    Everything that is evaluated is natural text (an event every 16 words) of the first dialect.
    """

    remark = (
        "A made-up language models one property of text, that a few of its tokens depend on the far past: what is"
        " reproduced here works as machinery, and how much it helps on natural language is not shown."
    )

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token per word, ``<bos>`` first."""
        return recall_tokenizer()

    def training_data(
        self,
        rows: int,
        *,
        sequence_length: int,
        document_rows: int,
        slot: int,
        second_dialect: float,
        batch_size: int,
        seed: int,
        cache_dir: str,
    ) -> RecallDataModule:
        """Rows to train on.

        Args:
            rows: How many.
            sequence_length: Tokens in each.
            document_rows: Rows that a document fills: all but the first begin in its middle.
            slot: Words from one event to the next, on average.
            second_dialect: Share of the documents in the second dialect.
            batch_size: Rows per step.
            seed: Of the documents and of their order.
            cache_dir: Folder for tokenised text.
        """
        return RecallDataModule(
            train_documents=-(-rows // document_rows),
            document_length=document_rows * sequence_length - 1,  # <bos> fills the last row up
            slot=slot,
            sequence_length=sequence_length,
            second_dialect=second_dialect,
            batch_size=batch_size,
            seed=seed,
            cache_dir=cache_dir,
        )

    def documents(self, count: int, tokens: int) -> Iterator[RecallRecord]:
        """Documents of so many tokens to measure on."""
        return recall_records(count, length=tokens - 1, slot=NATURAL_SLOT, seed=EVALUATION_SEED + tokens)

    def questions(self, count: int, tokens: int, *, depths: int, behind: int) -> list[list[RecallRecord]]:
        """Documents that end in an answer that was given once, by where it was given.

        Args:
            count: How many in all.
            tokens: Tokens of each document.
            depths: Parts of equal length into which the places are divided, from the front to the back.
            behind: Tokens that stand at least between the place and the answer.

        Returns:
            For each depth about ``count / depths`` documents.
        """
        last = max(1 - (behind + 4) / tokens, 0.0)  # a fact of 3 words and the first token are no part of the way
        return [
            list(recall_questions(share, length=tokens - 1, depth=depth, slot=NATURAL_SLOT, seed=seed))
            for share, depth, seed in depth_parts(count, tokens, depths, last)
        ]

    def fingerprint(self) -> str:
        """A text that changes when documents or questions do."""
        samples = chain(self.documents(1, 64), self.questions(1, 64, depths=1, behind=0)[0])
        return " ".join(record.text for record in samples)
