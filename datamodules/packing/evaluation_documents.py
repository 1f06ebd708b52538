"""Tokenize whole documents for evaluation, with their text and character offsets."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from datamodules.packing.sequences import Row, make_row
from datamodules.sources.content import Content, Document
from datamodules.sources.documents import Source, with_text
from datamodules.sources.hub import open_source
from datamodules.token_store.encoders import check_token_ids
from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.models.tokenization.chat_templates import (
    check_chat_training,
    rendered_chat,
    tokenize_chats,
)
from lightning_modules.models.tokenization.detokenization import (
    TokenCharacters,
    count_start_tokens,
    drop_end_tokens,
)
from lightning_modules.models.tokenization.tokenizer import encode_document, vocabulary_size


@dataclass(frozen=True)
class ValidationSet:
    """A named set of documents to validate on.

    Args:
        files: A file, folder, pattern, URL or hub id, as in `TextDataModule`; of a hub dataset the validation split.
        documents: Number of documents, from the first; null for all.
        length: Maximum tokens of each document; ``whole`` for all, null for the data module's `validation_length`.
        text_field: Field of JSON lines, or column of parquet files, with the text.
        name_field: Field or column that names documents; by default file and line or row.
        where: ``[field, value]``: use only documents whose field has this value.
        messages_field: Field or column with the messages of a chat, instead of `text_field`.
    """

    files: str
    documents: PositiveInt | None = 50
    length: PositiveInt | Literal["whole"] | None = None
    text_field: str = "text"
    name_field: str | None = None
    where: tuple[str, Any] | None = None
    messages_field: str | None = None

    def source(self) -> Source:
        """Open the documents."""
        content = Content((self.text_field,), messages=self.messages_field)
        return open_source(self.files, "validation", content=content, name_field=self.name_field, where=self.where)


def check_set_names(sets: Mapping[str, ValidationSet]) -> None:
    """Raise a ``ValueError`` for a name of a validation set that cannot be a part of a metric's name."""
    wrong = [name for name in sets if not re.fullmatch(r"[\w.-]+", name)]
    if wrong:
        raise ValueError(f"`validation_sets` has the name {wrong[0]!r}: use letters, digits, '_', '-' and '.' only.")


class DocumentDataset(Dataset[Row]):
    """Dataset whose item ``i`` is the first ``length`` tokens of document ``i``, or all of them.

    An index past the last document gives an unscored token, so that every process makes the same number of forward
    passes. Documents are held in memory as text, and each process tokenizes only its own.

    In chats, only the text of the assistant is scored, unless ``loss_on_prompt`` is set. Without a tokenizer, documents
    that are token ids have no ``text``.

    Raises:
        ValueError: If all documents are empty, the chat template cannot be used, or the tokenizer lacks token ids.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        tokenizer: PreTrainedTokenizerFast | None,
        *,
        length: int | None,
        add_special_tokens: bool = False,
        loss_on_prompt: bool = False,
    ) -> None:
        self.documents = list(with_text(documents))
        self.tokenizer = tokenizer
        self.length = length
        self.add_special_tokens = add_special_tokens
        self.loss_on_prompt = loss_on_prompt
        if tokenizer is not None:
            check_documents(self.documents, tokenizer, loss_on_prompt=loss_on_prompt)
        self._rows: dict[int, Row] = {}  # cached, because validation repeats

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Row:
        if index >= len(self):
            if self.tokenizer is None:
                return make_row(np.zeros(1, dtype=np.int64), np.array([1]))
            return empty_row()
        if index not in self._rows:
            self._rows[index] = self._make_row(self.documents[index])
        return self._rows[index]

    def _make_row(self, document: Document) -> Row:
        if document.tokens is not None:
            return token_row(document, self.tokenizer, self.length)
        assert self.tokenizer is not None, "documents of text need a tokenizer"
        if document.messages is not None:
            return chat_row(document, self.tokenizer, self.length, loss_on_prompt=self.loss_on_prompt)
        options = {"add_special_tokens": self.add_special_tokens, "max_tokens": self.length}
        return document_row(document.text, self.tokenizer, name=document.name, **options)


class JoinedDocuments(Dataset[Row]):
    """Documents of several datasets, one dataset after another."""

    def __init__(self, parts: Sequence[DocumentDataset]) -> None:
        self._items: list[tuple[DocumentDataset, int]] = []
        for part in parts:
            self._items += [(part, index) for index in range(len(part))]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Row:
        if index >= len(self):
            return empty_row()
        part, place = self._items[index]
        return part[place]


class NamedDocuments(Dataset[Row]):
    """Documents of several named sets, one after another; each item has the name of its set."""

    def __init__(self, sets: Mapping[str, DocumentDataset]) -> None:
        self._items: list[tuple[str, DocumentDataset, int]] = []
        for name, part in sets.items():
            self._items += [(name, part, index) for index in range(len(part))]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Row:
        if index >= len(self):
            return empty_row()
        name, part, place = self._items[index]
        return {**part[place], "set": name}

    def check_limit(self, trainer: Any, batch_size: int) -> None:
        """Warn if a limit of batches leaves out all documents of a set."""
        limit = trainer.limit_val_batches
        together = batch_size * trainer.world_size
        batches = limit if isinstance(limit, int) else int(limit * -(-len(self) // together))
        seen = {name for name, _, _ in self._items[: batches * together]}
        left_out = dict.fromkeys(name for name, _, _ in self._items if name not in seen)
        if batches and left_out and not trainer.fast_dev_run:
            rank_zero_warn(
                f"`trainer.limit_val_batches` = {limit} leaves out the validation set(s) {', '.join(left_out)}, so"
                " their metrics are NaN: limit the `documents` of each set in `data.validation_sets` instead."
            )


def check_documents(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, *, loss_on_prompt: bool) -> None:
    """Raise a ``ValueError`` if the chat template cannot be used for the chats, or the vocabulary lacks token ids."""
    if any(document.messages is not None for document in documents):
        check_chat_training(tokenizer, needs_marks=not loss_on_prompt)
    if any(document.tokens is not None for document in documents):
        vocabulary = vocabulary_size(tokenizer)
        for document in documents:
            check_token_ids(document, vocabulary)


def document_row(text: str, tokenizer: PreTrainedTokenizerFast, *, name: str, **options: Any) -> Row:
    """Tokenize a whole document as one sequence, with the arguments of `encode_document`."""
    batch = encode_document(text, tokenizer, name=name, **options)
    names = ("input_ids", "labels", "position_ids", "document_boundaries", "text", "offsets", "special_tokens")
    return cast(Row, {key: batch[key][0] for key in names} | {"name": name, "set": ""})  # type: ignore[literal-required]


def chat_row(
    document: Document, tokenizer: PreTrainedTokenizerFast, length: int | None, *, loss_on_prompt: bool
) -> Row:
    """Tokenize a chat as one sequence of its text by the chat template."""
    assert document.messages is not None
    try:
        text = rendered_chat(tokenizer, document.messages)
    except ValueError as error:
        raise ValueError(f"{document.place}: {error} Fix or remove this row.") from error
    row = document_row(text, tokenizer, name=document.name, max_tokens=length)
    if not loss_on_prompt:
        # By characters, because the last tokens of a text that was cut may be others than in the whole one.
        (chat,) = tokenize_chats(tokenizer, [document.messages], offsets=True)
        by_assistant = np.zeros(len(text) + 1, dtype=bool)
        for (start, end), written in zip(chat.offsets, chat.by_assistant, strict=True):
            by_assistant[start:end] |= bool(written)
        row["labels"][torch.from_numpy(~by_assistant[row["offsets"][:, 0].numpy()])] = IGNORE_INDEX
    return row


def token_row(document: Document, tokenizer: PreTrainedTokenizerFast | None, length: int | None) -> Row:
    """Make a sequence from token ids; with a tokenizer, include the text that they decode to.

    Special tokens at the start are not scored and those at the end are omitted, as for a text; without a tokenizer it
    is not known which ids are special.
    """
    assert document.tokens is not None
    tokens = document.tokens
    if tokenizer is not None:
        ordinary = drop_end_tokens(torch.from_numpy(tokens), tokenizer).numpy()
        tokens = ordinary if len(ordinary) else tokens[:1]  # which is not scored
    tokens = tokens[:length]
    row = make_row(tokens, np.array([len(tokens)]))
    if tokenizer is None:
        return row
    row["labels"][: count_start_tokens(row["input_ids"], tokenizer)] = IGNORE_INDEX
    text, offsets = TokenCharacters(tokenizer).decode_document(row["input_ids"])
    return {**row, "text": text, "offsets": offsets, "name": document.name, "set": "", "special_tokens": False}


def empty_row() -> Row:
    """Return a sequence of one unscored token that belongs to no document."""
    row = make_row(np.zeros(1, dtype=np.int64), np.array([1]))
    offsets = torch.zeros(1, 2, dtype=torch.int64)
    return {**row, "text": "", "offsets": offsets, "name": "", "set": "", "special_tokens": False}
