import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modules.tasks.questions.task import most_units


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=200),
    st.integers(0, 500),
    st.one_of(st.none(), st.integers(1, 900)),
)
def test_matches_counting_up(sizes, limit, maximum):
    def tokens(units):
        return 3 + sum(sizes[:units]) + max(0, units - len(sizes))

    if tokens(1) > limit:
        with pytest.raises(ValueError, match=str(tokens(1))):
            most_units(tokens, limit, maximum=maximum)
        return
    n = most_units(tokens, limit, maximum=maximum)
    assert tokens(n) <= limit
    assert n == maximum or (limit < tokens(n + 1) and (maximum is None or n < maximum))


def test_many_units_take_few_trials():
    tried = []
    assert most_units(lambda n: tried.append(n) or 25 * n + n // 7, 131_072) == 5213
    assert len(tried) <= 8


def test_a_tokenizer_that_does_not_distinguish_units_is_refused():
    with pytest.raises(ValueError, match="only 5 tokens"):
        most_units(lambda n: 5, 100)
