import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modules.tasks.questions.task import most_units


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=200),
    st.integers(0, 500),
    st.one_of(st.none(), st.integers(1, 900)),
)
def test_is_what_counting_up_finds(sizes, limit, maximum):
    def tokens(units):
        return 3 + sum(sizes[:units]) + max(0, units - len(sizes))

    if tokens(1) > limit:
        with pytest.raises(ValueError, match=rf"has {tokens(1)} tokens, more than {limit}"):
            most_units(tokens, limit, maximum=maximum)
        return
    n = most_units(tokens, limit, maximum=maximum)
    assert tokens(n) <= limit
    assert n == maximum or (limit < tokens(n + 1) and (maximum is None or n < maximum))


def test_takes_few_tries_for_many_pieces():
    tried = []
    assert most_units(lambda n: tried.append(n) or 25 * n + n // 7, 131_072) == 5213
    assert len(tried) <= 8


def test_a_tokenizer_that_makes_one_token_of_everything_is_refused():
    with pytest.raises(ValueError, match="have only 5 tokens: the tokenizer does not distinguish them"):
        most_units(lambda n: 5, 100)
