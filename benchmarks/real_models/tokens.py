"""Properties of the tokens of a text: kind and word, when the word was last used, and what a counter would repeat."""

import re
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_modules.functional.windows import ShortContext, short_context_windows
from lightning_modules.scoring.key_tokens import evaluator_key_tokens
from lightning_modules.scoring.token_scores import TokenScores

KINDS = ("names", "numbers", "other words", "punctuation")
"""Kinds of tokens, by the word that they are a part of."""

NGRAMS = (2, 3, 4, 5)
"""Lengths of the repeated n-grams that are counted, with the token itself."""

_WORD = re.compile(r"\w+(?:[.,'\u2019-]\w+)*")
_POSSESSIVE = re.compile("['\\u2019]s$")
_SENTENCE_END = re.compile(r"(?:^|[.!?:]['\"\u201d)]*\s+|\n\s*)[^\w]*$")


def describe_tokens(text: str, scores: TokenScores, *, alpha: float = 2.0, beta: float = -2.0) -> pd.DataFrame:
    """Describe the scored tokens of a document that have a short context, one per row.

    Returns:
        The columns ``token`` (index), ``start`` and ``end`` (characters), ``key``, ``lsd`` in nats, ``kind``, ``word``
        (empty for punctuation), ``starts_word``, ``distance`` (tokens since the word was last used; NaN at its first
        use), ``visible`` (tokens of its short context), ``bytes``, and ``repeat_2`` to ``repeat_5``: whether the token
        ends an n-gram that occurs earlier in the text, but not in the short context.
    """
    words = _find_words(text)
    offsets = scores.offsets.tolist()
    places = [_find_word(text, span, words) for span in offsets]
    distances = _measure_distances(places, words)
    visible = _count_visible(len(offsets), scores.short_context)
    repeats = {f"repeat_{n}": find_far_repeats(scores.token_ids.tolist(), visible, n) for n in NGRAMS}
    key = evaluator_key_tokens(scores, alpha=alpha, beta=beta).numpy()
    table = pd.DataFrame(
        {
            "token": np.arange(len(offsets)),
            "start": [start for start, _ in offsets],
            "end": [end for _, end in offsets],
            "key": key,
            "lsd": (scores.long - scores.short).double().numpy(),
            "kind": ["punctuation" if place is None else words[place].kind for place in places],
            "word": ["" if place is None else words[place].name for place in places],
            "starts_word": [place is not None and places[index - 1] != place for index, place in enumerate(places)],
            "distance": [np.nan if place is None else distances.get(place, np.nan) for place in places],
            "visible": visible,
            "bytes": [len(text[start:end].encode()) for start, end in offsets],
            **repeats,
        }
    )
    # The first window of a document sees what the long context sees, so its tokens cannot be key.
    return table[table["visible"] < table["token"]].reset_index(drop=True)


class _Word:
    """A word of a text."""

    def __init__(self, match: re.Match[str], *, starts_sentence: bool) -> None:
        self.start, self.end = match.span()
        self.name = _POSSESSIVE.sub("", match[0])
        if any(letter.isdigit() for letter in self.name):
            self.kind = "numbers"
        elif self.name[0].isupper() and not starts_sentence:
            self.kind = "names"  # and other capitalized words within a sentence
        else:
            self.kind = "other words"


def _find_words(text: str) -> list[_Word]:
    """Return the words of a text in order."""
    found = []
    for match in _WORD.finditer(text):
        before = text[max(0, match.start() - 20) : match.start()]
        found.append(_Word(match, starts_sentence=bool(_SENTENCE_END.search(before))))
    return found


def _find_word(text: str, span: Sequence[int], words: list[_Word]) -> int | None:
    """Return which word has the first letter or digit of a character span; None for punctuation and white space."""
    first = next((place for place in range(*span) if text[place].isalnum()), None)
    if first is None:
        return None
    place = bisect_right(words, first, key=lambda word: word.start) - 1
    return place if place >= 0 and first < words[place].end else None


def _measure_distances(places: Sequence[int | None], words: list[_Word]) -> dict[int, int]:
    """Return for each word that was used before how many tokens ago; all its tokens count from its first one."""
    last_use: dict[str, int] = {}
    distances: dict[int, int] = {}
    seen: set[int] = set()
    for index, place in enumerate(places):
        if place is None or place in seen:
            continue
        seen.add(place)
        name = words[place].name
        if name in last_use:
            distances[place] = index - last_use[name]
        last_use[name] = index
    return distances


def _count_visible(tokens: int, short_context: ShortContext) -> NDArray[np.int64]:
    """Return for each token how many preceding tokens its short context has; all of them in the first window."""
    visible = np.arange(tokens)
    for window in short_context_windows([0, tokens], short_context):
        visible[window.scored : window.stop] = np.arange(window.scored, window.stop) - window.start
    return visible


def find_far_repeats(tokens: Sequence[int], visible: Sequence[int], n: int) -> NDArray[np.bool_]:
    """Return which tokens end an n-gram that occurs earlier, but not entirely within the token's short context.

    Example:
        >>> find_far_repeats([1, 2, 3, 1, 2, 1, 2], [0, 1, 2, 2, 2, 3, 3], 2).tolist()
        [False, False, False, False, True, False, False]
    """
    last_end: dict[tuple[int, ...], int] = {}  # of each n-gram
    found = np.zeros(len(tokens), dtype=bool)
    for end in range(n - 1, len(tokens)):
        gram = tuple(tokens[end - n + 1 : end + 1])
        if gram in last_end:
            start = last_end[gram] - n + 1
            found[end] = start < end - visible[end]
        last_end[gram] = end
    return found
