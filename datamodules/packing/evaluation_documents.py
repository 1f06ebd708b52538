"""Tokenize whole documents for evaluation, with their text and character offsets."""

from collections.abc import Iterable
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from datamodules.packing.sequences import Row, make_row
from datamodules.sources.documents import Document, with_text
from lightning_modules.models.tokenization.tokenizer import encode_document


class DocumentDataset(Dataset[Row]):
    """Dataset whose item ``i`` is the first ``length`` tokens of document ``i``, or all of them.

    An index past the last document gives an unscored token, so that every process makes the same number of forward
    passes. Documents are held in memory as text, and each process tokenizes only its own.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        tokenizer: PreTrainedTokenizerFast,
        *,
        length: int | None,
        add_special_tokens: bool = False,
    ) -> None:
        self.documents = list(with_text(documents))
        self.tokenizer = tokenizer
        self.length = length
        self.add_special_tokens = add_special_tokens
        self._rows: dict[int, Row] = {}  # cached, because validation repeats

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Row:
        if index >= len(self):
            return empty_row()
        if index not in self._rows:
            document = self.documents[index]
            self._rows[index] = document_row(
                document.text,
                self.tokenizer,
                name=document.name,
                add_special_tokens=self.add_special_tokens,
                max_tokens=self.length,
            )
        return self._rows[index]


def document_row(
    text: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    name: str,
    add_special_tokens: bool = False,
    max_tokens: int | None = None,
) -> Row:
    """Tokenize a whole document as one sequence, with the arguments of `encode_document`."""
    batch = encode_document(text, tokenizer, name=name, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
    names = ("input_ids", "labels", "position_ids", "document_boundaries", "text", "offsets")
    return cast(Row, {key: batch[key][0] for key in names} | {"name": name})  # type: ignore[literal-required]


def empty_row() -> Row:
    """Return a sequence of one unscored token that belongs to no document."""
    row = make_row(np.zeros(1, dtype=np.int64), np.array([1]))
    return {**row, "text": "", "offsets": torch.zeros(1, 2, dtype=torch.int64), "name": ""}
