"""Data module with documents of the synthetic language."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from datamodules.number_types import Slot
from datamodules.packed_text import PackedTextDataModule
from datamodules.recall.documents import recall_documents
from datamodules.recall.language import recall_tokenizer
from datamodules.sources.documents import Document
from datamodules.sources.splits import Split


@dataclass(frozen=True)
class RecallSource:
    """Source of documents of the synthetic language; arguments as those of `recall_records`."""

    count: int
    length: int
    slot: int
    seed: int
    second_dialect: float = 0.0

    def __iter__(self) -> Iterator[Document]:
        for index, text in enumerate(recall_documents(**asdict(self))):
            yield Document(f"recall-{self.seed}-{index}", text)

    def fingerprint(self) -> str:
        """Describe the settings and the first document, in case the language changes."""
        return f"{self} {next(iter(self)).text}"


class RecallDataModule(PackedTextDataModule):
    """Synthetic text in which some words depend on the far context; see `recall_records`.

    Training, validation and test documents differ, but have the same language. The tokenizer is built in.

    Args:
        train_documents: Number of documents to train on.
        document_length: Words of each document, in training and evaluation; by default a full sequence.
        slot: Mean number of words between events; fewer are easier to learn.
        sequence_length: Tokens per training sequence.
        validation_documents: Number of documents to validate on.
        test_documents: Number of documents to test on.
        seed: Seed of the documents and of the order of the training sequences.
        second_dialect: Fraction of the documents in the second dialect.
        **kwargs: See :class:`PackedTextDataModule`.
    """

    def __init__(
        self,
        *,
        train_documents: PositiveInt = 1000,
        document_length: PositiveInt | None = None,
        slot: Slot = 16,
        sequence_length: PositiveInt = 512,
        validation_documents: PositiveInt = 32,
        test_documents: PositiveInt = 32,
        seed: NonNegativeInt = 0,
        second_dialect: ClosedUnitInterval = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            "recall",
            sequence_length=sequence_length,
            add_special_tokens=True,
            validation_documents=validation_documents,
            test_documents=test_documents,
            seed=seed,
            **kwargs,
        )
        self.training_size = train_documents  # all of them are trained on
        self.document_length = document_length or sequence_length - 1  # <bos> fills the sequence
        self.slot = slot
        self.second_dialect = second_dialect

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the language, without an end-of-text token."""
        tokenizer = recall_tokenizer()
        # All documents have the same length: a model would learn to expect the end at that position.
        tokenizer.eos_token = None
        return tokenizer

    @override
    def source(self, split: Split) -> RecallSource:
        counts = (self.training_size, self.validation_documents or 0, self.test_documents or 0)
        number = ("train", "validation", "test").index(split)
        count = int(counts[number])
        length = int(self.document_length)
        slot = int(self.slot)
        return RecallSource(count, length, slot, int(3 * self.seed + number), self.second_dialect)
