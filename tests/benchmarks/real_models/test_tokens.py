"""What the tokens of a text are, against the slow way to find out."""

import random

from benchmarks.real_models.tokens import _count_visible, find_far_repeats
from lightning_modules.functional.windows import ShortContext, short_context_windows


def test_repeated_ngrams_by_looking_at_all_earlier_places():
    draw = random.Random(0)
    tokens = [draw.randrange(4) for _ in range(200)]
    visible = _count_visible(len(tokens), ShortContext(16, 8))
    for n in (2, 3, 5):
        found = find_far_repeats(tokens, visible, n)
        for end in range(len(tokens)):
            gram = tokens[max(0, end - n + 1) : end + 1]
            starts = [s for s in range(end - n + 1) if tokens[s : s + n] == gram] if end >= n - 1 else []
            near = any(start >= end - visible[end] for start in starts)
            assert found[end] == (bool(starts) and not near)


def test_the_short_context_of_each_token():
    visible = _count_visible(40, ShortContext(8, 4))
    assert visible[:12].tolist() == list(range(12))  # the first window sees all that the long context sees
    assert visible[12:].tolist() == [8, 9, 10, 11] * 7
    assert len(short_context_windows([0, 40], ShortContext(8, 4))) == 7
