"""Rendering of chat templates, which are programs by the author of a model."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from transformers import PreTrainedTokenizerBase

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
        # transformers renders in a sandbox, which limits access, but not time.
        with _time_limit(RENDERING_SECONDS):
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except TimeoutError:
        reason = f"takes longer than {RENDERING_SECONDS:g} s, as if it looped forever"
    except SecurityError as error:
        reason = f"does what its sandbox forbids ({error}): do not trust this model"
    except (TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        reason = f"fails ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})"
    raise ValueError(
        f"The chat template of '{tokenizer.name_or_path}' {reason}."
        " Set `chat_template` to false, correct the template, or remove `system_instruction` if it supports none."
    )


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
