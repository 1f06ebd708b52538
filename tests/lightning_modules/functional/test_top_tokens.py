import pytest
import torch
from torch import nn

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import greedy_targets, likeliest_tokens
from lightning_modules.functional.linear_head import LinearHead
from tests.lightning_modules.functional.conftest import VOCABULARY

pytestmark = pytest.mark.core


def full_logits(hidden, head, labels, count):
    """Of the logits of every position, moved by one token."""
    best = head(hidden).double().log_softmax(-1).topk(count)
    ids, log_likelihood = (torch.cat([part[:, :1], part[:, :-1]], dim=1) for part in (best.indices, best.values))
    skipped = (labels == IGNORE_INDEX).unsqueeze(-1)
    return ids.masked_fill(skipped, 0), log_likelihood.masked_fill(skipped, 0.0)


@pytest.mark.parametrize("count", [1, 5, VOCABULARY])
@pytest.mark.parametrize("chunk_size", [1, 3, 1000, None])
def test_matches_full_logits_in_float64(problem, count, chunk_size):
    hidden, head, labels = problem
    expected = full_logits(hidden, head, labels, count)
    linear = LinearHead(head.weight, head.bias, 0.5, 3.0)
    for maker, answer in ((head, expected), (linear, full_logits(hidden, linear, labels, count))):
        token_ids, log_likelihood = likeliest_tokens(hidden, maker, labels, count=count, chunk_size=chunk_size)
        assert torch.equal(token_ids, answer[0])
        torch.testing.assert_close(log_likelihood, answer[1])
        assert not log_likelihood.requires_grad


def test_only_scored_tokens_have_logits_and_half_precision_gives_float32(problem):
    hidden, head, labels = problem
    rows = []
    found = likeliest_tokens(
        hidden.bfloat16(), lambda h: rows.append(len(h)) or head.bfloat16()(h), labels, count=2, chunk_size=4
    )
    assert found.log_likelihood.dtype == torch.float32
    assert max(rows) == 4
    assert sum(rows) == int(labels.ne(IGNORE_INDEX).sum())
    nothing = likeliest_tokens(hidden.bfloat16(), head, torch.full_like(labels, IGNORE_INDEX), count=3)
    assert nothing.token_ids.shape == nothing.log_likelihood.shape == (2, 17, 3)
    assert not nothing.token_ids.any()


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["module", "linear", "capped"])
def test_greedy_targets_matches_one_token_at_a_time_in_float64(chunk_size, kind):
    torch.manual_seed(0)
    module = torch.nn.Linear(5, 11)
    linear = LinearHead(module.weight, module.bias, 1.5, 4.0 if kind == "capped" else None)
    hidden_states, targets = torch.randn(7, 5), torch.randint(11, (7,))
    with torch.no_grad():
        weight, bias = module.weight.double(), module.bias.double()
        logits = hidden_states.double() @ weight.T + bias
        if kind != "module":
            logits = logits * 1.5
        if kind == "capped":
            logits = torch.tanh(logits / 4.0) * 4.0
    targets[::2] = logits.argmax(-1)[::2]
    expected = torch.stack([row.log_softmax(0)[target] for row, target in zip(logits, targets, strict=True)])
    found, likeliest = greedy_targets(
        hidden_states, module if kind == "module" else linear, targets, chunk_size=chunk_size
    )
    torch.testing.assert_close(found, expected.float())
    assert likeliest.tolist() == [int(row.argmax()) == int(t) for row, t in zip(logits, targets, strict=True)]
    assert likeliest[::2].all()
    assert not likeliest.all()


def test_nothing_to_score_gives_empty_results_in_the_wide_dtype():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        head = nn.Linear(2, 3, dtype=dtype)
        found, likeliest = greedy_targets(torch.zeros(0, 2, dtype=dtype), head, torch.zeros(0, dtype=torch.int64))
        assert found.shape == likeliest.shape == (0,)
        assert (found.dtype, likeliest.dtype) == (wide, torch.bool)


@pytest.mark.parametrize(
    ("named", "arguments"), [("count", {"count": 0}), ("count", {"count": True}), ("chunk_size", {"chunk_size": 0})]
)
def test_bad_arguments_are_refused_before_there_are_logits(problem, named, arguments):
    hidden, _, labels = problem
    with pytest.raises(ValueError, match=named):
        likeliest_tokens(hidden, lambda rows: pytest.fail("the head was called"), labels, **arguments)
    with pytest.raises(ValueError, match="count"):
        likeliest_tokens(*problem, count=VOCABULARY + 1)


@pytest.mark.parametrize(
    ("named", "hidden_states", "targets", "chunk_size"),
    [
        ("targets", torch.zeros(2, 2), torch.zeros(1, dtype=torch.int64), None),
        ("targets", torch.zeros(2, 2), torch.zeros(2, dtype=torch.int32), None),
        ("targets", torch.zeros(2, 2, 2), torch.zeros(2, dtype=torch.int64), None),
        ("chunk_size", torch.zeros(1, 2), torch.tensor([0]), -1),
        ("Label 3", torch.zeros(1, 2), torch.tensor([3]), None),
    ],
)
def test_greedy_targets_refuses_bad_input(named, hidden_states, targets, chunk_size):
    with pytest.raises(ValueError, match=named):
        greedy_targets(hidden_states, nn.Linear(2, 3), targets, chunk_size=chunk_size)
