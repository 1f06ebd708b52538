"""Find words that a text repeats, easy for a reader who only remembers phrases (Appendix B.7 of the paper)."""

import re

import torch
from torch import Tensor

from lightning_modules.functional import merge_spans


def repeated_ngram_spans(text: str, length: int = 3) -> Tensor:
    """Return the character spans of word n-grams that occurred earlier in the text.

    "Re-occurred N-grams (word-level, N > 2)" of Fang et al. (2025), Appendix B.7: every longer n-gram that
    occurs again consists of 3-grams that do. Words are separated by white space; the white space before a word is part
    of its span, as it is of most tokens. Two occurrences may overlap.

    Args:
        text: The document.
        length: Words of an n-gram.

    Returns:
        ``[M, 2]`` int64 spans, disjoint and ascending.

    Example:
        >>> repeated_ngram_spans("so it is and so it is").tolist()
        [[12, 21]]
    """
    words = [(match.start(), match.end(), match[0].strip()) for match in re.finditer(r"\s*\S+", text)]
    seen: set[tuple[str, ...]] = set()
    spans = []
    for first in range(len(words) - length + 1):
        ngram = tuple(word for _, _, word in words[first : first + length])
        if ngram in seen:
            spans.append([words[first][0], words[first + length - 1][1]])
        seen.add(ngram)
    return merge_spans(torch.tensor(spans, dtype=torch.int64).reshape(-1, 2))
