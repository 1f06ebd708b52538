"""What the tokens of a text are, against the slow way to find out."""

import random

import numpy as np
import torch

from benchmarks.real_models.tokens import _count_visible, describe_tokens, find_far_repeats
from lightning_modules.functional.windows import short_context_windows
from lightning_modules.scoring.token_scores import TokenScores


def test_repeated_ngrams_by_looking_at_all_earlier_places():
    draw = random.Random(0)
    tokens = [draw.randrange(4) for _ in range(200)]
    visible = _count_visible(len(tokens), 16, 8)
    for n in (2, 3, 5):
        found = find_far_repeats(tokens, visible, n)
        for end in range(len(tokens)):
            gram = tokens[max(0, end - n + 1) : end + 1]
            starts = [s for s in range(end - n + 1) if tokens[s : s + n] == gram] if end >= n - 1 else []
            near = any(start >= end - visible[end] for start in starts)
            assert found[end] == (bool(starts) and not near)


def test_the_short_context_of_each_token():
    visible = _count_visible(40, 8, 4)
    assert visible[:12].tolist() == list(range(12))  # the first window sees all that the long context sees
    assert visible[12:].tolist() == [8, 9, 10, 11] * 7
    assert len(short_context_windows([0, 40], context_length=8, stride=4)) == 7


def test_words_at_the_start_of_a_sentence_are_no_names():
    text = "The cat saw Rome. Rome fell.\n\nTwo\nLines, 3rd of May: \u201cBut Ann's cat\u201d"
    spans = [(m, m + 1) for m in range(len(text))]  # one token for each character
    scores = TokenScores(
        "", "", 1, 1, torch.arange(len(text)), torch.tensor(spans), torch.zeros(len(text)), torch.zeros(len(text))
    )
    table = describe_tokens(text, scores)
    kinds = dict(zip(table["word"], table["kind"], strict=True))
    assert {word for word, kind in kinds.items() if kind == "names"} == {"Rome", "May", "Ann"} - {"Rome"}
    first_rome, second_rome = text.index("Rome"), text.rindex("Rome")
    by_start = table.set_index("start")
    assert by_start.loc[first_rome, "kind"] == "names"
    assert by_start.loc[second_rome, "kind"] == "other words"
    assert by_start.loc[second_rome, "distance"] == second_rome - first_rome
    assert np.isnan(by_start.loc[first_rome, "distance"])
    assert kinds["3rd"] == "numbers"
    assert kinds["But"] == "other words"
