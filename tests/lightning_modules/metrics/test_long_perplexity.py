import math

import pytest
import torch
from torch import nn

from lightning_modules.functional import long_perplexity
from lightning_modules.metrics import LongPerplexity
from tests.support import reference
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.core


def documents(count=7):
    torch.manual_seed(0)
    lengths = torch.randint(3, 40, (count,)).tolist()
    return [(-4 * torch.rand(1, n), torch.rand(1, n) > 0.5) for n in lengths]


def test_accumulates_like_one_long_document():
    metric = LongPerplexity()
    for log_likelihood, influence in documents():
        metric.update(log_likelihood, influence)
    everything = [torch.cat(parts, dim=1) for parts in zip(*documents(), strict=True)]
    assert float(metric.compute()) == pytest.approx(reference.long_perplexity(*everything), rel=1e-12)
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert math.isnan(metric.compute())


def test_forward_returns_the_value_of_the_batch():
    metric = LongPerplexity()
    for log_likelihood, influence in documents(3):
        torch.testing.assert_close(metric(log_likelihood, influence), long_perplexity(log_likelihood, influence))


def test_counts_single_tokens_beyond_the_reach_of_float32():
    metric = LongPerplexity()
    metric.influence += 2.0**24
    metric.update(torch.tensor([-1.0]), torch.tensor([True]))
    assert float(metric.influence) == 2**24 + 1


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.float(), lambda m: m.to("cpu")]
)
def test_sums_stay_float64_when_the_module_that_holds_the_metric_is_cast(cast):
    module = nn.Module()
    module.metric = LongPerplexity()
    module.metric.update(torch.full((2049,), -1.001), torch.ones(2049))
    before = module.metric.compute()
    cast(module)
    assert module.metric.influence.dtype == torch.float64
    assert float(module.metric._defaults["influence"]) == 0.0
    assert float(module.metric._defaults["largest"]) == -math.inf
    assert float(module.metric.largest) == float(torch.tensor(-1.001))
    module.metric._computed = None
    assert float(module.metric.compute()) == float(before)
    module.metric.reset()
    assert module.metric.log_likelihood.dtype == torch.float64


def test_losses_are_refused_at_compute_also_those_of_an_earlier_batch():
    metric = LongPerplexity()
    metric.update(torch.tensor([1.5]), torch.tensor([True]))
    metric.update(torch.tensor([-1.0]), torch.tensor([True]))
    with pytest.raises(ValueError, match=r"A log-likelihood is 1.5.*not losses"):
        metric.compute()
    metric.reset()
    metric.update(torch.tensor([-1.0, 1.5]), torch.tensor([True, False]))  # not counted, so it may be anything
    assert float(metric.compute()) == pytest.approx(math.e)


def test_update_reads_no_value(monkeypatch):
    for name in ("item", "__bool__", "__float__", "tolist", "cpu"):  # each would make the CPU wait for the GPU
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a value was read"))
    LongPerplexity().update(torch.tensor([-1.0, 1.5]), torch.tensor([True, True]))


def test_every_sum_moves_with_the_module():
    metric = LongPerplexity().to("meta")
    assert {getattr(metric, name).device.type for name in metric._defaults} == {"meta"}
    metric.reset()
    assert {getattr(metric, name).device.type for name in metric._defaults} == {"meta"}


def _uneven_documents(rank, world_size, expected):
    metric = LongPerplexity()
    for log_likelihood, influence in documents()[rank::world_size]:  # 4 documents here, 3 there
        metric.update(log_likelihood, influence)
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-14)
    empty = LongPerplexity()
    if rank == 0:
        empty.update(*documents()[0])
    wrong = LongPerplexity()
    wrong.update(torch.tensor([0.5 if rank == 1 else -0.5]), torch.tensor([True]))
    with pytest.raises(ValueError, match="not losses"):  # in each process, though one alone has a loss
        wrong.compute()
    assert float(empty.compute()) == pytest.approx(reference.long_perplexity(*documents()[0]), rel=1e-12)


def test_two_processes_with_an_uneven_number_of_documents():
    everything = [torch.cat(parts, dim=1) for parts in zip(*documents(), strict=True)]
    run_distributed(_uneven_documents, reference.long_perplexity(*everything))
