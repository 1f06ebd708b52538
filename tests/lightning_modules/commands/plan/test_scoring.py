"""The time to score a corpus: that of its documents one by one on a known card, and otherwise why it is unknown."""

from types import SimpleNamespace

import torch

from lightning_modules.commands.plan.flops import scoring_flops
from lightning_modules.commands.plan.hardware import GPUS, Rates
from lightning_modules.commands.plan.scoring import describe_scoring_time
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.load import load_config


def trainer(device, count=2):
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), world_size=count)


def test_time_is_the_sum_over_documents(model_dir, monkeypatch):
    model = LongContextLM(str(model_dir), context_length=16, stride=8)
    shape = ModelShape.of(load_config(model.loading))
    gpu, lengths = GPUS["H200"], [100, 10, 400]
    each = [Rates().seconds(scoring_flops(shape, shape, n, 16, 8, shared_pass=True), gpu).low for n in lengths]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    factor = 7200 / sum(each)  # as many tokens as take two hours of one card
    told = describe_scoring_time(model, trainer("cuda"), lengths, sum(lengths) * factor)
    assert told.startswith("1 to 1.6 h on 2 x H200, 2 to 3.2 GPU-hours; ")
    told = describe_scoring_time(model, trainer("cuda"), lengths, sum(lengths) * factor, price=2.5)
    assert "2 to 3.2 GPU-hours, price 5 to 8; " in told


def test_an_unknown_rate_is_named(model_dir, monkeypatch):
    model = LongContextLM(str(model_dir), context_length=16, stride=8)
    assert "no rates of the CPU" in describe_scoring_time(model, trainer("cpu"), [9], 9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Card")
    assert "no rates of Some Card" in describe_scoring_time(model, trainer("cuda"), [9], 9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert "no document was sampled" in describe_scoring_time(model, trainer("cuda"), [], 0)
