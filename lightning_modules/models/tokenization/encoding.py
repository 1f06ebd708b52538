"""Calls of the tokenizer's own code, which is in Rust, with errors that name the text."""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast


def encode_text(
    text: str, tokenizer: PreTrainedTokenizerFast, *, name: str = "text", add_special_tokens: bool = False
) -> Encoding:
    """Tokenize a text; ``name`` is what an error calls it.

    The backend is used, because the tokenizer itself would warn about its maximum sequence length.

    Raises:
        ValueError: If the tokenizer fails on this text.
    """
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
