import pytest
import torch

from callbacks import GammaSweep
from lightning_modules.objectives import CrossEntropy, Interpolated, LongCE, Scheduled
from tests.support.tiny_training import lm, loader, row, trainer


@pytest.fixture
def module():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {"model_type": "llama", "vocab_size": 90, "num_key_value_heads": 1, "initializer_range": 1.0, **sizes}
    return lambda objective: lm(None, model_config=config, objective=objective)


def fit(module, tmp_path, *callbacks):
    torch.manual_seed(0)
    one = trainer(tmp_path, max_steps=2, accumulate_grad_batches=2, callbacks=list(callbacks))
    one.fit(module, loader(*[row(n, boundaries=(0, 23, 40)) for n in range(4)]))
    return {name: value.item() for name, value in one.logged_metrics.items()}


@pytest.mark.parametrize("gamma", [1.5, 4.0])
def test_each_gamma_has_the_numbers_of_a_training_with_it(gamma, module, tmp_path):
    names = ("loss", "weight_mean", "weight_at_cap", "weight_effective_share")
    expected = fit(module(LongCE(gamma)), tmp_path)  # the first step is the same with every objective
    swept = fit(module(LongCE(gamma)), tmp_path, GammaSweep([1, gamma, 2.5]))
    for name in names:
        assert swept[f"train/{name}"] == expected[f"train/{name}"]  # the training does not change
        assert swept[f"gamma/{name}/{gamma:g}"] == pytest.approx(expected[f"train/{name}"])
    assert swept["gamma/weight_mean/1"] < swept["gamma/weight_mean/2.5"]


def test_steps_without_short_contexts_have_no_numbers(module, tmp_path):
    logged = fit(module(Scheduled(LongCE(2.0), start=2)), tmp_path, GammaSweep([2]))
    assert "train/loss" in logged
    assert not [name for name in logged if name.startswith("gamma/")], "weights of 1 are not those of LongCE"
    logged = fit(module(Scheduled(LongCE(2.0), start=1)), tmp_path, GammaSweep([2]))
    assert logged["gamma/weight_mean/2"] == pytest.approx(logged["train/weight_mean"])


def test_it_needs_uncapped_weights_whatever_the_objective_makes_of_them(module, tmp_path):
    swept = fit(module(Interpolated(LongCE(2.0), 0.5)), tmp_path, GammaSweep([2]))
    assert swept["train/weight_mean"] == pytest.approx(0.5 + 0.5 * swept["gamma/weight_mean/2"])
    with pytest.raises(ValueError, match="`GammaSweep`"):
        fit(module(CrossEntropy()), tmp_path, GammaSweep())
