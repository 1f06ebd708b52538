"""Rendering of chat templates, which are programs by the author of a model."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

RENDERING_SECONDS = 10.0
"""Time limit of a rendering: real templates take milliseconds."""


def check_chat_template(tokenizer: PreTrainedTokenizerBase, system_instruction: str | None = None) -> None:
    """Render a short chat; raise a ``ValueError`` if the chat template is missing or cannot be used."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer '{tokenizer.name_or_path}' has no chat template, as is usual for a base model: set"
            " `chat_template` to false, or evaluate the model's chat version."
        )
    render_chat(tokenizer, user_turn("Hello", system_instruction), add_generation_prompt=True)


def user_turn(text: str, system_instruction: str | None = None) -> list[dict[str, str]]:
    """Return the messages of a chat that begins with a user's turn, after the system's instruction if there is one."""
    system = [{"role": "system", "content": system_instruction}] if system_instruction else []
    return [*system, {"role": "user", "content": text}]


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """Render a chat of turns with ``role`` and ``content`` as text, with options of `apply_chat_template`.

    Raises:
        ValueError: If the template leaves its sandbox, fails or takes longer than `RENDERING_SECONDS`.
    """
    try:
        return rendered_chat(tokenizer, messages, **options)
    except ValueError as error:
        raise ValueError(
            f"{error} Set `chat_template` to false, correct the template, or remove `system_instruction` if it supports"
            " none."
        ) from error


def rendered_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """Render a chat as `render_chat` does; the ``ValueError`` has the reason, but no remedy."""
    try:
        # transformers renders in a sandbox, which limits access, but not time.
        with _time_limit(RENDERING_SECONDS):
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except TimeoutError:
        reason = f"takes longer than {RENDERING_SECONDS:g} s, as if it looped forever"
    except SecurityError as error:
        reason = f"does what its sandbox forbids ({error}): do not trust this model"
    except (TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        reason = f"fails ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})"
    raise ValueError(f"The chat template of '{tokenizer.name_or_path}' {reason}.")


class TokenizedChat(NamedTuple):
    """Token ids of a chat, and which of them an assistant has written."""

    ids: list[int]
    by_assistant: list[int]  # 1 or 0 for each token; all 0 if the chat template has no marks
    offsets: list[tuple[int, int]]  # characters of each token in the rendered chat


def check_chat_training(tokenizer: PreTrainedTokenizerBase, *, needs_marks: bool) -> None:
    """Render a short chat; raise a ``ValueError`` if the chat template is missing or cannot be used.

    With ``needs_marks``, it must mark the assistant's turns, which have the loss.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer '{tokenizer.name_or_path}' has no chat template: set `data.chat_template` to a file with"
            " one, or use the tokenizer of the model's chat version."
        )
    if needs_marks and not has_assistant_marks(tokenizer):
        raise ValueError(
            f"The chat template of the tokenizer '{tokenizer.name_or_path}' does not mark what an assistant writes by"
            " {% generation %} and {% endgeneration %}: set `data.chat_template` to a file with a template that has"
            " these marks around each assistant's turn, or `data.loss_on_prompt` to true for the loss of all tokens."
        )
    rendered_chat(tokenizer, [*user_turn("Hello"), {"role": "assistant", "content": "Hi"}])


def has_assistant_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template marks the assistant's turns."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


def tokenize_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[dict[str, Any]]], *, offsets: bool = False
) -> list[TokenizedChat]:
    """Render chats and tokenize them, by transformers; ``offsets`` are empty unless asked for.

    A token is the assistant's if it has a character that the template marks. (The masks of `apply_chat_template` are
    wrong where the last marked character has no token, as a tokenizer that normalizes text may drop an accent.)
    """
    rendered, marks = render_jinja_template(
        conversations=[list(chat) for chat in chats],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=has_assistant_marks(tokenizer),
        **tokenizer.special_tokens_map,
    )
    # `verbose` would warn of chats that are longer than the model's context, before they are packed.
    encoded = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokenized = []
    for number, ids in enumerate(encoded["input_ids"]):
        spans = encoded["offset_mapping"][number]
        marked = np.zeros(len(rendered[number]) + 1, dtype=np.int64)
        for start, stop in marks[number] if marks else ():
            marked[start + 1 : stop + 1] = 1
        before = marked.cumsum()  # marked characters before each place
        by_assistant = [int(before[stop] > before[start]) for start, stop in spans]
        tokenized.append(TokenizedChat(ids, by_assistant, spans if offsets else []))
    return tokenized


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise a ``TimeoutError`` in this thread's Python code if the block takes longer.

    A trace function checks the clock at each line. Unlike an alarm signal, it works in every thread. Templates are
    compiled to Python, so it stops all loops; only a single operation on huge values can take longer.
    """
    deadline = time.monotonic() + seconds
    before = sys.gettrace()

    def check_clock(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if time.monotonic() > deadline:
            raise TimeoutError
        return check_clock

    sys.settrace(check_clock)
    try:
        yield
    finally:
        sys.settrace(before)
