"""Calls of the tokenizer's own code, which is in Rust, with errors that name the text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast


class EncodedText(NamedTuple):
    """Tokens of a text, each with its character span.

    The first ``added`` tokens are special tokens that the tokenizer puts before a text: context that is never scored.
    Those that it puts after a text are omitted, because they are not part of it, and no tokens follow them.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    added: int


def encode_text(
    text: str, tokenizer: PreTrainedTokenizerFast, *, name: str = "text", add_special_tokens: bool = False
) -> EncodedText:
    """Tokenize a text to be scored or continued; every such text becomes tokens here, and an error calls it ``name``.

    Raises:
        ValueError: If the tokenizer fails on this text.
    """
    encoding = _encode(text, tokenizer, name, add_special_tokens)
    special = encoding.special_tokens_mask  # 1 for added tokens only: a special token that the text spells out has 0
    if not all(special):
        added = special.index(0)
    else:  # an empty text, which does not show which of them precede it
        added = [*_encode("a", tokenizer, name, True).special_tokens_mask[: len(special)], 0].index(0)
    end = len(special)
    while end > added and special[end - 1]:
        end -= 1
    return EncodedText(encoding.ids[:end], encoding.offsets[:end], added)


def _encode(text: str, tokenizer: PreTrainedTokenizerFast, name: str, add_special_tokens: bool) -> Encoding:
    # The backend itself: the tokenizer would warn of its maximum sequence length.
    try:
        with panics_caught():
            return tokenizer.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except MemoryError:
        raise
    except Exception as error:  # `tokenizers` raises a bare Exception
        raise ValueError(
            f"The tokenizer '{tokenizer.name_or_path}' fails on '{name}' of {len(text):,} characters"
            f" ({' '.join(str(error).split()).rstrip('.')}): remove it, or split it where one character is repeated."
        ) from error


@contextmanager
def panics_caught() -> Iterator[None]:
    """Raise a ``ValueError`` where the code of `tokenizers` panics, as for millions of spaces in a row.

    A panic is not an ``Exception``, so that it would end a whole run like Ctrl-C does.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its class cannot be imported
            raise
        raise ValueError(f"panic in its code: {' '.join(str(error).split())}") from error
