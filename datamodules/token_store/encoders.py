"""Tokens of documents that are not texts: of chats, by a chat template, and of ids that were made before."""

import json

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from datamodules.sources.content import MAX_TOKEN_ID, Document
from datamodules.token_store.tokenize import TokenizedBatch
from lightning_modules.models.tokenization.chat_templates import (
    check_chat_training,
    has_assistant_marks,
    rendered_chat,
    tokenize_chats,
)
from lightning_modules.models.tokenization.encoding import panics_caught
from lightning_modules.models.tokenization.tokenizer import tokenizer_hash, vocabulary_size


class ChatEncoder:
    """Encoder of chats by the tokenizer's chat template, which also ends them: no end-of-text token is appended.

    Tokens that no assistant has written belong to a prompt. With a template that does not mark them, there are no
    prompts, and with ``needs_marks`` it is refused.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, needs_marks: bool) -> None:
        check_chat_training(tokenizer, needs_marks=needs_marks)
        self._tokenizer = tokenizer
        self._marks = has_assistant_marks(tokenizer)
        self.recipe = {
            "tokenizer": tokenizer_hash(tokenizer),
            "chat_template": tokenizer.get_chat_template(),
            "special_tokens": json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
            "vocabulary_size": vocabulary_size(tokenizer),
        }

    def __call__(self, documents: list[Document]) -> TokenizedBatch:
        """Render and tokenize one or more chats."""
        chats = [document.messages or [] for document in documents]
        try:
            with panics_caught():
                tokenized = tokenize_chats(self._tokenizer, chats)
        except Exception:
            self._name_document(documents)
            raise
        tokens: list[NDArray[np.int64]] = []
        spans: list[NDArray[np.int64]] = []
        start = 0
        for chat in tokenized:
            tokens.append(np.array(chat.ids, dtype=np.int64))
            if self._marks:
                spans.append(start + prompt_spans(np.array(chat.by_assistant, dtype=bool)))
            start += len(chat.ids)
        return TokenizedBatch(
            tokens=np.concatenate(tokens),
            lengths=np.array([len(each) for each in tokens]),
            prompt_spans=np.concatenate(spans) if spans else np.empty((0, 2), dtype=np.int64),
            text_bytes=sum(len(document.text.encode()) for document in documents),
        )

    def _name_document(self, documents: list[Document]) -> None:
        """Raise a ``ValueError`` for the first chat on which the template or the tokenizer fails."""
        for document in documents:
            try:
                rendered_chat(self._tokenizer, document.messages or [])
                with panics_caught():
                    tokenize_chats(self._tokenizer, [document.messages or []])
            except Exception as error:  # `tokenizers` raises a bare Exception
                raise ValueError(f"{document.place}: {error} Fix or remove this row.") from error


def prompt_spans(by_assistant: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return ``[s, 2]`` start and stop of each run of tokens that no assistant has written.

    Example:
        >>> prompt_spans(np.array([False, False, True, False, True])).tolist()
        [[0, 2], [3, 4]]
    """
    edges = np.flatnonzero(np.diff(~by_assistant, prepend=False, append=False))
    return edges.reshape(-1, 2)


class TokenIds:
    """Encoder of documents whose rows are token ids, which stay as they are.

    Ids beyond the vocabulary of the tokenizer, if it is known, are refused. The store does not depend on it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None) -> None:
        self._vocabulary_size = MAX_TOKEN_ID + 1 if tokenizer is None else vocabulary_size(tokenizer)
        self.recipe = {"tokenizer": None, "vocabulary_size": MAX_TOKEN_ID + 1}

    def __call__(self, documents: list[Document]) -> TokenizedBatch:
        """Concatenate the ids of one or more documents."""
        for document in documents:
            check_token_ids(document, self._vocabulary_size)
        tokens = np.concatenate([document.tokens for document in documents if document.tokens is not None])
        return TokenizedBatch(
            tokens=tokens,
            lengths=np.array([document.size for document in documents]),
            prompt_spans=np.empty((0, 2), dtype=np.int64),
            text_bytes=tokens.nbytes,
        )


def check_token_ids(document: Document, vocabulary: int) -> None:
    """Raise a ``ValueError`` that names the place of a document if it has token ids beyond the vocabulary."""
    largest = -1 if document.tokens is None else int(document.tokens.max(initial=-1))
    if largest >= vocabulary:
        raise ValueError(
            f"{document.place}: token id {largest} is beyond the vocabulary of {vocabulary:,} tokens of"
            " `data.tokenizer`: set it to the tokenizer that the ids were made with."
        )
