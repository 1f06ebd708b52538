"""Content of a record's document: text, a prompt and text, the messages of a chat, or token ids."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
"""One turn of a chat, with `role` and `content`."""

MAX_TOKEN_ID = 2**31 - 1


class Document(NamedTuple):
    """A document and the name by which messages and result files cite it."""

    name: str
    text: str  # of a chat the JSON of its messages; empty if there are token ids
    prompt_end: int = 0  # length of the prompt at the front, in characters; the rest is the response
    messages: list[Message] | None = None  # of a chat
    tokens: NDArray[np.int64] | None = None  # ids of a document that was tokenized before
    place: str = ""  # file and row of a chat or of token ids, for errors that are found later

    @property
    def size(self) -> int:
        """Number of characters, or of token ids."""
        if self.tokens is not None:
            return len(self.tokens)
        return len(self.text)

    def is_empty(self) -> bool:
        """Return whether the document has neither token ids nor text other than white space."""
        if self.tokens is not None:
            return len(self.tokens) == 0
        return is_empty(self.text)

    def content(self) -> bytes:
        """Return a hash that identifies the document regardless of its name."""
        if self.tokens is not None:
            return self.tokens.astype("<i8").tobytes()
        return self.text.encode()


@dataclass(frozen=True)
class Content:
    """Names of the fields of a record that contain its document.

    The text is in the first of the fields ``text`` that a record has, and follows the prompt in ``prompt``. With
    ``messages`` or ``tokens``, the document is a chat, or token ids, instead.
    """

    text: tuple[str, ...] = ("text",)
    prompt: str | None = None
    messages: str | None = None
    tokens: str | None = None

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Fields of which a record must have one."""
        instead = self.messages or self.tokens
        if instead is None:
            return self.text
        return (instead,)

    @property
    def columns(self) -> tuple[str, ...]:
        """All fields that are read."""
        if self.prompt is None:
            return self.alternatives
        return (*self.alternatives, self.prompt)

    def read(self, record: Mapping[str, Any], name: str, place: str) -> Document:
        """Return the document of a record; raise a ``ValueError`` that names the place of a record without one."""
        present = [field for field in self.alternatives if field in record]
        if not present:
            kind = "text" if self.alternatives == self.text else "field"
            raise ValueError(
                f"{place}: no {kind} {' or '.join(map(repr, self.alternatives))}; found {sorted(record)}. Rename the"
                " field with the document."
            )
        value = record[present[0]]
        if self.messages is not None:
            messages = checked_messages(value, f"{place}, {self.messages!r}")
            text = json.dumps(messages, ensure_ascii=False, sort_keys=True, default=str)
            return Document(name, checked_text(text, place), messages=messages, place=place)
        if self.tokens is not None:
            return Document(name, "", tokens=checked_tokens(value, f"{place}, {self.tokens!r}"), place=place)
        text = checked_text(value, place)
        prompt = ""
        if self.prompt is not None:
            if self.prompt not in record:
                raise ValueError(f"{place}: no prompt field {self.prompt!r}; found {sorted(record)}.")
            prompt = checked_text(record[self.prompt], f"{place}, {self.prompt!r}")
        if is_empty(text):
            prompt = ""
        return Document(name, prompt + text, len(prompt))


def checked_text(text: object, place: str) -> str:
    """Return the text of the document at ``place``; raise a ``ValueError`` if it cannot be encoded as UTF-8."""
    if not isinstance(text, str):
        raise ValueError(f"{place}: the text must be a string, got {type(text).__name__}. Fix or remove this document.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can encode a lone surrogate, which no tokenizer accepts
        raise ValueError(f"{place}: character {error.start} is a lone surrogate. Remove or replace it.") from error
    return text


def checked_messages(value: object, place: str) -> list[Message]:
    """Return the messages of a chat without fields that are null, which columns of a table have for other rows.

    Raises:
        ValueError: If they are not a list of messages, each with a role and a text, or a role and tool calls.
    """
    wanted = 'a chat must be a list of messages such as {"role": "user", "content": "Hello"}'
    if not isinstance(value, list) or not value:
        found = "an empty list" if isinstance(value, list) else type(value).__name__
        raise ValueError(f"{place}: {wanted}, got {found}. Fix or remove this row.")
    messages = []
    for number, given in enumerate(value):
        if not isinstance(given, Mapping):
            raise ValueError(f"{place}: {wanted}; message {number} is {type(given).__name__}. Fix or remove this row.")
        message = {key: field for key, field in given.items() if field is not None}
        texts = ["role", "content"]
        if "tool_calls" in message and "content" not in message:
            texts = ["role"]
        for key in texts:
            if not isinstance(message.get(key), str):
                found = type(message[key]).__name__ if key in message else "nothing"
                raise ValueError(
                    f"{place}: message {number} needs a text in '{key}', got {found}. Fix or remove this row."
                )
            checked_text(message[key], f"{place}, message {number}, '{key}'")
        messages.append(message)
    return messages


def checked_tokens(value: object, place: str) -> NDArray[np.int64]:
    """Return token ids; raise a ``ValueError`` unless they are a list of integers from 0 to `MAX_TOKEN_ID`."""
    try:
        tokens = np.asarray(value if len(value) else np.empty(0, np.int64))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        tokens = np.empty((0, 0), object)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{place}: token ids must be a list of integers, got {value!r:.80}. Fix or remove this row.")
    if len(tokens) and (tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID):
        wrong = int(tokens[(tokens < 0) | (tokens > MAX_TOKEN_ID)][0])
        raise ValueError(f"{place}: token id {wrong} is not from 0 to {MAX_TOKEN_ID:,}. Fix or remove this row.")
    return tokens.astype(np.int64)


def is_empty(text: str) -> bool:
    """Return whether a text is empty or only white space."""
    return not text or text.isspace()
