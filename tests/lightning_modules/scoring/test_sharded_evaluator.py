"""An evaluator that is sharded among processes, as one of them sees it; with real ones: `test_sharding`."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_modules.models import backbone as backbone_module
from lightning_modules.models.loading import load_backbone
from lightning_modules.scoring import evaluator as evaluator_module
from lightning_modules.scoring.evaluator import Evaluator
from tests.conftest import make_text

SETTINGS = {"context_length": 32, "stride": 16}


class Group:
    """The other processes: whether one of them wants a text to be scored, each time this one asks."""

    def __init__(self):
        self.others, self.own, self.passes, self.backbone = [], [], [], None

    def all_reduce(self, tensor, op):
        assert op == dist.ReduceOp.MAX
        self.own.append(int(tensor))
        tensor.fill_(max(int(tensor), self.others.pop(0)))

    def load(self, mesh, *, device, pretrained_model_name_or_path, **settings):
        assert (mesh, str(device)) == ("mesh", "cpu")
        self.backbone = load_backbone(pretrained_model_name_or_path, **settings)
        self.backbone.in_step = True
        score = self.backbone.long_and_short

        def recorded(batch, **arguments):
            assert not torch.is_inference_mode_enabled(), "there weights cannot be gathered"
            self.passes.append((batch["input_ids"].shape[1], arguments))
            return score(batch, **arguments)

        self.backbone.long_and_short = recorded
        return self.backbone


@pytest.fixture
def group(monkeypatch):
    group = Group()
    processes = SimpleNamespace(is_initialized=lambda: True, all_reduce=group.all_reduce, ReduceOp=dist.ReduceOp)
    monkeypatch.setattr(evaluator_module, "dist", processes)
    monkeypatch.setattr(evaluator_module, "world_mesh", lambda device: "mesh")
    monkeypatch.setattr(evaluator_module, "load_sharded_backbone", group.load)
    monkeypatch.setattr(backbone_module.dist, "all_reduce", lambda *_: None)  # all have as many windows
    return group


@pytest.mark.parametrize("beta", [None, -4.0])
def test_who_has_no_text_makes_the_passes_of_who_has_one(group, model_dir, beta):
    judge = Evaluator(str(model_dir), sharded=True, **SETTINGS)
    group.others = [0, 1, 1, 0]
    with torch.inference_mode():  # as in a validation
        scores = judge.scores(make_text(60), beta=beta)  # the others have no text
        judge.accompany(beta=beta)  # now another process has one
        assert judge.scores(make_text(60), beta=beta) is scores  # and again, while this one knows the answer
        judge.accompany(beta=beta)  # nobody has any
    assert group.own == [1, 0, 0, 0]
    sizes, arguments = zip(*group.passes, strict=True)
    assert sizes == (len(scores.long), 1, 1), "of one token, which is not scored"
    assert arguments == ({**SETTINGS, "beta": beta},) * 3, "as many windows, and as short ones"
    assert not any(parameter.is_inference() for parameter in group.backbone.parameters())
    assert not any(parameter.requires_grad for parameter in group.backbone.parameters())


def test_an_evaluator_that_each_process_has_for_itself_asks_nobody(group, model_dir, monkeypatch):
    monkeypatch.setattr(group, "all_reduce", lambda *_: pytest.fail("nobody is asked"))
    loaded = []
    load = lambda *a, **k: loaded.append(k["device"]) or load_backbone(*a, **k)  # noqa: E731
    monkeypatch.setattr(evaluator_module, "load_backbone", load)
    judge = Evaluator(str(model_dir), **SETTINGS)
    judge.accompany()
    assert not loaded
    judge.scores(make_text(60))
    judge.accompany()
    assert [str(device) for device in loaded] == ["cpu"]
    assert group.passes == []


def test_a_sharded_evaluator_in_a_single_process(model_dir):
    whole, single = (Evaluator(str(model_dir), sharded=sharded, **SETTINGS) for sharded in (False, True))
    scores = single.scores(make_text(60))
    single.accompany()
    single.cache_dir = single.cache_dir / "other"
    assert torch.equal(whole.scores(make_text(60)).long, scores.long)
