"""An evaluator that is sharded among processes, as one of them sees it; with real ones: `test_fsdp`."""

import pytest
import torch

from lightning_modules.models import lockstep as lockstep_module
from lightning_modules.models.loading.load import load_backbone, load_scorer
from lightning_modules.scoring import scored_model as scored_model_module
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.training import fsdp
from tests.conftest import make_text

SETTINGS = {"context_length": 32, "stride": 16}


class Group:
    """The other processes: whether one of them has work, each time this one asks."""

    def __init__(self):
        self.others, self.own, self.passes, self.backbone = [], [], [], None

    def any_rank(self, value, device):
        self.own.append(value)
        return value or self.others.pop(0)

    def load(self, config, mesh, *, device):
        assert (mesh, str(device)) == ("mesh", "cpu")
        self.backbone = load_backbone(config)
        forward = self.backbone.forward

        def recorded(batch, **arguments):
            if self.backbone.in_lockstep:  # and not in the check of a model that was just loaded
                assert not torch.is_inference_mode_enabled(), "there weights cannot be gathered"
                self.passes.append(batch["input_ids"].numel())
            return forward(batch, **arguments)

        self.backbone.forward = recorded
        self.backbone.is_sharded = True
        return self.backbone


@pytest.fixture
def group(monkeypatch):
    group = Group()
    monkeypatch.setattr(fsdp, "world_mesh", lambda device: "mesh")
    monkeypatch.setattr(fsdp, "load_sharded_backbone", group.load)
    for module in (scored_model_module, lockstep_module):
        monkeypatch.setattr(module, "any_rank", group.any_rank)
    return group


def test_a_process_without_a_text_makes_the_passes_of_one_that_has_one(group, model_dir):
    judge = open_evaluator(EvaluatorConfig(str(model_dir), sharded=True, **SETTINGS))
    with torch.inference_mode():  # as in a validation
        group.others = [False]
        scores = judge.scores(make_text(60))  # the others have no text
        assert len(scores.long) in group.passes
        group.passes.clear()
        group.others = [True, True, True, False]  # another process has one, which takes it two passes
        judge.join()
        assert group.passes == [1, 1]
        group.others = [True, True, False]
        assert judge.scores(make_text(60)) is scores  # and again, while this one knows the answer
        assert group.passes == [1, 1, 1]
        group.others = [False]
        judge.join()  # nobody has any
    assert group.own[-1:] == [False]
    assert not any(parameter.is_inference() for parameter in group.backbone.parameters())
    assert not any(parameter.requires_grad for parameter in group.backbone.parameters())


def test_an_evaluator_that_each_process_has_for_itself_asks_nobody(group, model_dir, monkeypatch):
    monkeypatch.setattr(scored_model_module, "any_rank", lambda *_: pytest.fail("nobody is asked"))
    loaded = []
    load = lambda config, device: loaded.append(device) or load_scorer(config, device)  # noqa: E731
    monkeypatch.setattr(scored_model_module, "load_scorer", load)
    judge = open_evaluator(EvaluatorConfig(str(model_dir), **SETTINGS))
    judge.join()
    assert not loaded
    judge.scores(make_text(60))
    judge.join()
    assert [str(device) for device in loaded] == ["cpu"]
    assert group.passes == []


def test_a_sharded_evaluator_in_a_single_process(model_dir):
    whole, single = (
        open_evaluator(EvaluatorConfig(str(model_dir), sharded=sharded, **SETTINGS)) for sharded in (False, True)
    )
    scores = single.scores(make_text(60))
    single.join()
    single.cache_dir = single.cache_dir / "other"
    assert torch.equal(whole.scores(make_text(60)).long, scores.long)
