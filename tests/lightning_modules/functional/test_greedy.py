import pytest
import torch

from lightning_modules.functional import greedy_targets
from lightning_modules.functional.linear_head import LinearHead


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["module", "linear", "capped"])
def test_matches_one_token_at_a_time_in_float64(chunk_size, kind):
    torch.manual_seed(0)
    module = torch.nn.Linear(5, 11)
    linear = LinearHead(module.weight, module.bias, 1.5, 4.0 if kind == "capped" else None)
    predictors, targets = torch.randn(7, 5), torch.randint(11, (7,))
    with torch.no_grad():
        weight, bias = module.weight.double(), module.bias.double()
        logits = predictors.double() @ weight.T + bias
        if kind != "module":
            logits = logits * 1.5
        if kind == "capped":
            logits = torch.tanh(logits / 4.0) * 4.0
    targets[::2] = logits.argmax(-1)[::2]
    expected = torch.stack([row.log_softmax(0)[target] for row, target in zip(logits, targets, strict=True)])
    found, likeliest = greedy_targets(
        predictors, module if kind == "module" else linear, targets, chunk_size=chunk_size
    )
    torch.testing.assert_close(found, expected.float())
    assert likeliest.tolist() == [int(row.argmax()) == int(t) for row, t in zip(logits, targets, strict=True)]
    assert likeliest[::2].all()
    assert not likeliest.all()


def test_nothing_to_score_and_bad_input():
    head = torch.nn.Linear(2, 3)
    found, likeliest = greedy_targets(torch.zeros(0, 2), head, torch.zeros(0, dtype=torch.int64))
    assert found.shape == likeliest.shape == (0,)
    assert likeliest.dtype == torch.bool
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        own = torch.nn.Linear(2, 3, dtype=dtype)
        found, _ = greedy_targets(torch.zeros(0, 2, dtype=dtype), own, torch.zeros(0, dtype=torch.int64))
        assert found.dtype == wide
    for predictors, targets in (
        (torch.zeros(2, 2), torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(2, 2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 2, 2), torch.zeros(2, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=r"`predictors` must be \[N, D\] and `targets` \[N\] of int64"):
            greedy_targets(predictors, head, targets)
    with pytest.raises(ValueError, match="`chunk_size` must be an integer"):
        greedy_targets(torch.zeros(1, 2), head, torch.tensor([0]), chunk_size=-1)
    with pytest.raises(ValueError, match="Label 3 is none of the 3 tokens"):
        greedy_targets(torch.zeros(1, 2), head, torch.tensor([3]))
