"""Whatever numbers a pure function is given: words that name them, or what a slow reference computes in float64."""

import itertools
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from datamodules.packing.curriculum import LengthCurriculum
from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import (
    key_token_mask,
    long_cross_entropy,
    long_perplexity,
    merge_spans,
    short_context_windows,
    soft_influence,
    span_token_mask,
    token_log_likelihood,
    transfer_influence,
)
from lightning_modules.functional.linear_head import LinearHead
from lightning_modules.functional.windows import ShortContext
from lightning_modules.metrics import LongPerplexity
from lightning_modules.objectives import LongCE, StoredInfluence
from tests.support import reference

NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, True, False, math.nan, math.inf, -math.inf, 1e308, 5e-324, 10**30, -(10**30), 2.5]),
    st.integers(-3, 20),
    st.floats(-10, 10),
)
"""What somebody might give in the place of a number."""

LOG_LIKELIHOODS = st.one_of(st.floats(-200, 0, width=32), st.sampled_from([0.0, -0.0, -1e30, -math.inf, math.nan]))
FLOATS = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def is_count(value, minimum=1, maximum=math.inf):
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def same_numbers(ours, slow, rtol=1e-6):
    ours = torch.as_tensor(ours, dtype=torch.float64)
    torch.testing.assert_close(ours, torch.as_tensor(slow, dtype=torch.float64), rtol=rtol, atol=1e-12, equal_nan=True)


def refused(call, *names):
    """That it is refused by words that say of what; the numbers alone would not tell."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the words are checked below
        call()
    assert any(name in str(caught.value) for name in names), str(caught.value)


def pairs():
    return st.lists(st.tuples(LOG_LIKELIHOODS, LOG_LIKELIHOODS), max_size=6)


# ------------------------------------------------------------------------------------------------ the pair of a token


@hypothesis.given(pairs(), NUMBERS, NUMBERS, FLOATS)
def test_key_tokens(pair, alpha, beta, dtype):
    long, short = torch.tensor(pair, dtype=dtype).reshape(-1, 2).unbind(1)
    if not (0 <= alpha < math.inf and beta < 0):
        refused(lambda: key_token_mask(long, short, alpha=alpha, beta=beta), "`alpha`", "`beta`")
        return
    limits = torch.tensor([float(alpha), float(beta)], dtype=torch.float64).tolist()
    for key, a, b in zip(key_token_mask(long, short, alpha=alpha, beta=beta), long, short, strict=True):
        assert bool(key) == (float(a - b) > limits[0] and float(a) > limits[1])


@hypothesis.given(pairs(), NUMBERS, FLOATS)
def test_soft_influence(pair, gamma, dtype):
    long, short = torch.tensor(pair, dtype=dtype).reshape(-1, 2).unbind(1)
    if not 1 <= gamma <= torch.finfo(dtype).max:
        refused(lambda: soft_influence(long, short, gamma=gamma), "`gamma`")
        return
    slow = [_slow_influence(float(a - b), float(gamma)) for a, b in zip(long, short, strict=True)]
    same_numbers(soft_influence(long, short, gamma=gamma), slow, rtol=10 * torch.finfo(dtype).eps)


def _slow_influence(difference, gamma):
    if math.isnan(difference):  # of a NaN, or of two tokens that cannot be
        return math.nan
    return gamma if difference > 700 else min(math.exp(difference), gamma)


@hypothesis.given(NUMBERS)
def test_gamma_of_objectives(gamma):
    for objective in (LongCE, StoredInfluence):
        if 1 <= gamma <= torch.finfo(torch.float32).max:
            assert objective(gamma).largest_weight == gamma
        else:
            refused(lambda objective=objective: objective(gamma), "`gamma`")


# -------------------------------------------------------------------------------------------------- loss and perplexity


WEIGHTS = st.one_of(st.floats(0, 5, width=32), st.sampled_from([0.0, 1.0, math.nan, math.inf]))


@hypothesis.given(st.lists(st.tuples(LOG_LIKELIHOODS, WEIGHTS), max_size=6))
def test_long_perplexity(tokens):
    log_likelihood, influence = torch.tensor(tokens, dtype=torch.float32).reshape(-1, 2).unbind(1)
    try:
        slow = reference.long_perplexity(log_likelihood, influence)
    except OverflowError:
        slow = math.inf
    metric = LongPerplexity()
    metric.update(log_likelihood, influence)
    same_numbers(long_perplexity(log_likelihood, influence), slow)
    same_numbers(metric.compute(), slow)


@hypothesis.given(st.lists(st.tuples(LOG_LIKELIHOODS, WEIGHTS, st.booleans()), max_size=6), st.booleans())
def test_long_cross_entropy_and_its_gradient(tokens, wide):
    dtype = torch.float64 if wide else torch.float32
    log_likelihood = torch.tensor([t[0] for t in tokens], dtype=dtype, requires_grad=True)
    influence = torch.tensor([t[1] for t in tokens], dtype=dtype)
    labels = torch.tensor([7 if t[2] else IGNORE_INDEX for t in tokens], dtype=torch.int64)
    loss = long_cross_entropy(log_likelihood, influence, labels)
    scored = [t for t in tokens if t[2]]
    total = math.fsum(0.0 if math.isnan(a * b) else -a * b for a, b, _ in scored) if scored else 0.0
    total = math.nan if any(math.isnan(a * b) for a, b, _ in scored) else total
    same_numbers(loss, total / max(len(scored), 1), rtol=1e-5)
    loss.backward()
    same_numbers(log_likelihood.grad, [-b / max(len(scored), 1) if c else 0.0 for _, b, c in tokens])


# ---------------------------------------------------------------------------------------------------- log-likelihoods


def problem(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 5, 3, generator=generator, dtype=dtype)
    weight = torch.randn(4, 3, generator=generator, dtype=dtype)
    labels = torch.randint(4, (2, 5), generator=generator)
    labels[:, 0] = IGNORE_INDEX
    return hidden, LinearHead(weight), labels


def both(hidden, head, labels, **options):
    """By all ways there are: with and without gradient, of a linear head and of any."""
    any_head = lambda rows: head(rows)  # noqa: E731
    for each in (head, any_head):
        yield token_log_likelihood(hidden, each, labels, **options)
        with torch.no_grad():
            yield token_log_likelihood(hidden, each, labels, **options)


@hypothesis.given(st.integers(0, 9), st.one_of(st.none(), NUMBERS))
def test_chunk_sizes(seed, chunk_size):
    hidden, head, labels = problem(seed)
    if chunk_size is None or is_count(chunk_size):
        for found in both(hidden, head, labels, chunk_size=chunk_size):
            same_numbers(found, reference.token_log_likelihood(hidden, head, labels))
    else:
        refused(lambda: list(both(hidden, head, labels, chunk_size=chunk_size)), "`chunk_size`")


@hypothesis.given(st.integers(0, 9), st.integers(0, 1), st.integers(0, 4), st.integers(-200, 300))
def test_labels(seed, row, column, label):
    hidden, head, labels = problem(seed)
    labels[row, column] = label
    if label == IGNORE_INDEX or (column > 0 and 0 <= label < 4):
        for found in both(hidden, head, labels):
            same_numbers(found, reference.token_log_likelihood(hidden, head, labels))
    else:
        for way in range(4):
            refused(
                lambda way=way: next(itertools.islice(_one_way(hidden, head, labels, way), 1)),
                f"Label {label} ",
                "The first token has no context",
            )


def _one_way(hidden, head, labels, way):
    each = head if way < 2 else (lambda rows: head(rows))
    with torch.set_grad_enabled(way % 2 == 0):
        yield token_log_likelihood(hidden, each, labels)


@pytest.mark.parametrize("shape", [(0, 4, 2), (2, 0, 2), (2, 1, 2)])
def test_rows_without_a_token_to_score(shape):
    labels = torch.full(shape[:2], IGNORE_INDEX)
    for found in both(torch.zeros(shape, dtype=torch.float64), LinearHead(torch.zeros(4, 2).double()), labels):
        same_numbers(found, torch.zeros(shape[:2]))


# ------------------------------------------------------------------------------------------------------------- windows


def slow_windows(boundaries, context_length, stride):
    """For each token that has a short context the tokens it sees, as Appendix A.1 says it."""
    sees = {}
    for begin, end in itertools.pairwise(boundaries):
        for start in range(begin + stride, end - context_length, stride):
            stop = min(start + context_length + stride, end)
            sees |= dict.fromkeys(range(start + context_length, stop), start)
    return sees


@hypothesis.given(st.lists(st.integers(0, 30), max_size=5), NUMBERS, NUMBERS)
def test_windows(boundaries, context_length, stride):
    boundaries = [0, *boundaries]
    call = lambda: short_context_windows(boundaries, ShortContext(context_length, stride))  # noqa: E731
    if not (is_count(context_length) and is_count(stride) and boundaries == sorted(boundaries)):
        refused(call, "`context_length` (K)", "`stride` (d)", "`document_boundaries`")
        return
    found = {token: start for start, scored, stop in call() for token in range(scored, stop)}
    assert found == slow_windows(boundaries, context_length, stride)


# ----------------------------------------------------------------------------------------------------------- alignment

SPANS = st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12)), max_size=5)


def as_spans(spans):
    return torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)


@hypothesis.given(SPANS)
def test_merged_spans(spans):
    kept = [span for span in spans if span[0] != span[1]]
    if kept != sorted(kept, key=lambda span: span[0]) or any(stop < start for start, stop in kept):
        refused(lambda: merge_spans(as_spans(spans)), "Spans must be in ascending order")
    else:
        assert merge_spans(as_spans(spans)).tolist() == reference.merge_spans(spans)


@hypothesis.given(SPANS, SPANS)
def test_tokens_inside_spans(offsets, spans):
    ascending = spans == sorted(spans, key=lambda span: span[0]) and all(start <= stop for start, stop in spans)
    if ascending and all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans)):
        found = span_token_mask(as_spans(offsets), as_spans(spans)).tolist()
        assert found == reference.span_token_mask(offsets, spans)
    else:
        refused(lambda: span_token_mask(as_spans(offsets), as_spans(spans)), "Spans must be")


@hypothesis.example([(math.nan, 0, 1), (1.0, 1, 2)], [(1, 2)])
@hypothesis.example([(2.0, 0, 2), (5.0, 2, 3), (3.0, 2, 3)], [(0, 3), (1, 5), (4, 4)])
@hypothesis.given(st.lists(st.tuples(WEIGHTS, st.integers(-1, 9), st.integers(-1, 9)), max_size=4), SPANS)
def test_transferred_influence(tokens, targets):
    influence = torch.tensor([token[0] for token in tokens], dtype=torch.float32)
    offsets = [token[1:] for token in tokens]
    call = lambda: transfer_influence(influence, as_spans(offsets), as_spans(targets))  # noqa: E731
    if influence.isfinite().all() and all(0 <= start <= stop for start, stop in offsets + targets):
        same_numbers(call(), reference.transfer_influence(influence.tolist(), offsets, targets))
    else:
        refused(call, "`influence` must be finite", "offsets` must be character spans")


# ---------------------------------------------------------------------------------------- up-sampling, mixture, stages


@hypothesis.given(st.integers(1, 9), st.integers(1, 20))
def test_curricula(short, long):
    if not (long > short and long % short == 0):
        refused(lambda: LengthCurriculum(short, 0.5).check(long), "must divide")
