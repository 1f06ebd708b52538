import re

import pytest

from benchmarks.reproduction.ngrams import repeated_ngram_spans
from lightning_modules.functional import merge_spans
from tests.conftest import make_text


def slow(text, length):
    """Marks every character of an n-gram that is found among the words before it."""
    words = text.split()
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    marked = [False] * len(text)
    for i in range(len(words) - length + 1):
        if any(words[j : j + length] == words[i : i + length] for j in range(i)):
            start = ends[i - 1] if i else 0
            marked[start : ends[i + length - 1]] = [True] * (ends[i + length - 1] - start)
    return marked


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_matches_a_search_over_all_earlier_words(length, seed):
    text = " " * (seed % 2) + make_text(150, seed=seed) + "\n" + make_text(20, seed=seed)
    spans = repeated_ngram_spans(text, length)
    marked = [False] * len(text)
    for start, end in spans.tolist():
        marked[start:end] = [True] * (end - start)
    assert marked == slow(text, length)
    assert sum(marked) > 50
    assert spans.equal(merge_spans(spans))
