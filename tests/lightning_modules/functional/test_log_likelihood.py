import pytest
import torch

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import token_log_likelihood
from tests.support import reference

pytestmark = pytest.mark.core


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 1000, None])
def test_matches_one_token_at_a_time_in_float64(problem, chunk_size):
    hidden, head, labels = problem
    actual = token_log_likelihood(hidden, head, labels, chunk_size=chunk_size)
    expected = reference.token_log_likelihood(hidden, head, labels)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(actual)
    gradients = [
        torch.autograd.grad((ll * upstream).sum(), (hidden, head.weight, head.bias)) for ll in (actual, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_half_precision_logits_give_float32(problem):
    hidden, head, labels = problem
    expected = reference.token_log_likelihood(hidden, head, labels)
    actual = token_log_likelihood(hidden.bfloat16(), head.bfloat16(), labels)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=0.1, rtol=0.02)  # bfloat16 logits


def test_unscored_tokens_are_zero_and_cost_no_logits(problem):
    hidden, head, labels = problem
    rows = []
    token_log_likelihood(hidden, lambda h: rows.append(len(h)) or head(h), labels, chunk_size=4)
    assert max(rows) == 4
    assert sum(rows) == int(labels.ne(IGNORE_INDEX).sum())
    assert (token_log_likelihood(hidden, head, labels)[labels == IGNORE_INDEX] == 0).all()


def test_nothing_scored_gives_zeros_that_gradients_pass(problem):
    hidden, head, labels = problem
    log_likelihood = token_log_likelihood(hidden, head, torch.full_like(labels, IGNORE_INDEX))
    assert (log_likelihood == 0).all()
    log_likelihood.sum().backward()
    assert (head.weight.grad == 0).all()


def test_scored_tokens_of_the_caller_are_used_and_must_have_the_shape_of_the_labels(problem):
    hidden, head, labels = problem
    scored = labels.ne(IGNORE_INDEX).numpy()
    assert torch.equal(token_log_likelihood(hidden, head, labels, scored=scored), token_log_likelihood(*problem))
    with pytest.raises(ValueError, match=r"and \[2, \d+\]\. Call `with_scored`"):
        token_log_likelihood(hidden, head, labels, scored=scored[:, :-1])
    changed = labels.clone()
    changed[:, 2] = IGNORE_INDEX
    with pytest.raises(RuntimeError, match="`scored` does not agree with `labels`: call `with_scored`"):
        token_log_likelihood(hidden, head, changed, scored=scored)


def test_logits_whose_exponentials_overflow(problem):
    hidden, head, labels = problem
    with torch.no_grad():
        head.weight *= 5000
        actual = token_log_likelihood(hidden, head, labels, chunk_size=16)
    expected = reference.token_log_likelihood(hidden, head, labels).detach()
    torch.testing.assert_close(actual, expected)
