import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_modules.scoring.corpus.columns import COLUMNS, document_scores, ladder_columns, ladder_scores
from lightning_modules.scoring.corpus.table import ScoreTable
from lightning_modules.scoring.token_scores import TokenScores

OFFSETS = [[2 * (t // 3) + (t % 3 == 2), 2 * (t // 3) + 1 + (t % 3 == 2) * (t % 2)] for t in range(60)]
"""Of each three tokens two share a character, and the third one has a character or none by turns."""


def make_scores(tokens, seed=0, context_length=6, stride=3, ladder=()):
    generator = torch.Generator().manual_seed(seed)
    long = -torch.empty(tokens).exponential_(0.5, generator=generator)
    short = long - 2 * torch.randn(tokens, generator=generator)
    short[: context_length + stride] = long[: context_length + stride]
    long[0] = short[0] = 0
    window = ladder[1] if ladder else 0
    return TokenScores(
        text_sha256="",
        evaluator="",
        context_length=context_length,
        stride=stride,
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        offsets=torch.tensor(OFFSETS[:tokens]),
        long=long,
        short=short,
        context_scores={
            c: long[-window:] - torch.randn(window, generator=generator) for c in (ladder[0] if ladder else ())
        },
    )


def percentile(values, share):
    """Between the two neighbours in order, in proportion."""
    values = sorted(values)
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def reference(scores, alpha, beta, gamma):
    """Token by token, as the docstring has it."""
    long, short = scores.long.tolist(), scores.short.tolist()
    n, start = len(long), scores.short_context.window_length
    compared = range(start, n)
    keys = [t for t in range(n) if long[t] - short[t] > alpha and long[t] > beta]
    inner = [*scores.offsets.tolist()]
    while inner[-1][0] == inner[-1][1]:  # as a special token at the end
        inner.pop()
    sharing = sum(a < b and inner.count([a, b]) > 1 for a, b in inner)
    benefit = {t: long[t] - short[t] for t in compared}
    values = dict.fromkeys(COLUMNS)
    values |= {
        "tokens": n,
        "scored_tokens": n - 1,
        "compared_tokens": len(compared),
        "key_tokens": len(keys),
        "perplexity": math.exp(-sum(long[1:]) / (n - 1)) if n > 1 else None,
        "tokens_sharing_characters": sharing / len(inner),
        "tokens_without_characters": sum(a == b for a, b in inner) / len(inner),
    }
    if not compared:
        return values
    each = list(benefit.values())
    weights = [min(math.exp(value), gamma) for value in each]
    values |= {
        "key_token_ratio": len(keys) / len(compared),
        "longppl": math.exp(-sum(long[t] for t in keys) / len(keys)) if keys else None,
        "benefit_mean": statistics.fmean(each),
        "benefit_median": statistics.median(each),
        "benefit_std": statistics.pstdev(each),
        **{f"benefit_p{share}": percentile(each, share / 100) for share in (10, 25, 75, 90, 99)},
        "benefit_positive": sum(value > 0 for value in each) / len(each),
        "benefit_soft": sum(w * v for w, v in zip(weights, each, strict=True)) / sum(weights),
    }
    for third in range(3):
        own = [benefit[t] for t in compared if third * n <= 3 * t < (third + 1) * n]
        values[f"benefit_third_{third + 1}"] = statistics.fmean(own) if own else None
    return values


@given(st.integers(1, 60), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([-0.5, -2.0, -50.0]))
def test_columns_are_those_of_the_slow_reference(tokens, seed, alpha, beta):
    scores = make_scores(tokens, seed)
    found = document_scores(scores, alpha=alpha, beta=beta, gamma=3.0)
    expected = reference(scores, alpha, beta, 3.0)
    assert list(found) == list(COLUMNS)
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            assert isinstance(found[name], COLUMNS[name]), name
            assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


def test_a_document_without_a_short_context_has_a_perplexity_only():
    found = document_scores(make_scores(9))
    known = {name for name, value in found.items() if value is not None}
    shares = {"tokens_sharing_characters", "tokens_without_characters"}
    assert known == {"tokens", "scored_tokens", "compared_tokens", "key_tokens", "perplexity"} | shares
    assert (found["tokens"], found["compared_tokens"]) == (9, 0)
    assert document_scores(make_scores(10))["benefit_mean"] is not None


def test_sums_are_float64():
    scores = make_scores(2**18)
    scores.long[:] = -0.1
    scores.short[9:] = -0.1 - 2.0**-20
    assert document_scores(scores)["benefit_mean"] == pytest.approx(
        (scores.long - scores.short)[9:].double().mean().item(), rel=1e-12
    )


def test_thresholds_without_a_meaning_are_refused():
    for wrong, message in (({"alpha": -1}, "alpha"), ({"beta": 1}, "beta"), ({"gamma": 0.5}, "gamma")):
        with pytest.raises(ValueError, match=message):
            document_scores(make_scores(20), **wrong)


def test_ladder_against_its_definition():
    contexts, window = (4, 8, 16), 5
    scores = make_scores(40, ladder=(contexts, window))
    found = ladder_scores(scores, contexts, alpha=0.3, beta=-3.0)
    assert list(found) == list(ladder_columns(contexts))
    whole = scores.long[-window:]
    by_context = {**scores.context_scores, "whole": whole}
    for shorter, longer in ((4, 8), (4, 16), (8, 16), (4, "whole")):
        benefit = [a - b for a, b in zip(by_context[longer].tolist(), by_context[shorter].tolist(), strict=True)]
        keys = [v > 0.3 and a > -3.0 for v, a in zip(benefit, by_context[longer].tolist(), strict=True)]
        expected = {
            "mean": statistics.fmean(benefit),
            "key_token_ratio": sum(keys) / window,
            "positive": sum(value > 0 for value in benefit) / window,
            "p90": percentile(benefit, 0.9),
        }
        for statistic, value in expected.items():
            name = f"ladder_{shorter}_{longer}_{statistic}"
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert len(found) == 4 * 4


def test_rungs_that_a_document_does_not_have_are_null():
    found = ladder_scores(make_scores(40, ladder=((4, 8), 5)), (4, 8, 64))
    known = {name.rpartition("_")[0] for name, value in found.items() if value is not None and name.endswith("mean")}
    assert known == {"ladder_4_8", "ladder_4_whole"}
    assert not any(value is not None for value in ladder_scores(make_scores(40), (4, 8)).values())
    as_long = make_scores(9, ladder=((4,), 5))  # its whole context is the first length
    assert ladder_scores(as_long, (4, 8))["ladder_4_whole_mean"] is None
    assert ladder_scores(make_scores(9), ()) == {}


def test_special_tokens_before_the_text_have_no_log_likelihood():
    scores = make_scores(20)
    scores.unscored = 2
    scores.long[1] = scores.short[1] = 0
    table = ScoreTable(per_token="float32")
    table.add({}, scores)
    (row,) = table.table().to_pylist()
    assert row["lcl"] == [None, None, *scores.long[2:].tolist()]
