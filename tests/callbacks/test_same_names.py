"""Callbacks of other names, and modules of other kinds, than those that a callback can work with."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from callbacks import ExternalEvaluator, HuggingFaceExport, KeyTokenInspector, LongContextTasks
from callbacks.requirements import require_long_context_lm
from lightning_modules.long_context_lm import LongContextLM
from tests.support.toy_tasks import GUESS, SEVERAL


class NeverBuilt(LongContextLM):
    def configure_model(self):
        pytest.fail("the model was built before the callbacks were checked")


class OwnEvaluator(ExternalEvaluator):
    """A subclass logs the same names."""


def check(model_dir, tmp_path, *callbacks):
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=list(callbacks), default_root_dir=tmp_path)
    trainer.validate(NeverBuilt(str(model_dir), context_length=48), torch.utils.data.DataLoader([0]))


def test_two_of_a_kind_are_refused_before_the_model_is_built(model_dir, evaluator_dir, tmp_path):
    (tmp_path / "spans").mkdir()
    evaluators = [ExternalEvaluator(str(evaluator_dir)), OwnEvaluator(key_spans=str(tmp_path / "spans"))]
    tasks = [LongContextTasks([GUESS], [48]), LongContextTasks([SEVERAL], [48], every_n_steps=2)]
    for pair in (evaluators, tasks, [KeyTokenInspector(1), KeyTokenInspector(["a"])]):
        with pytest.raises(ValueError, match=f"`{type(pair[0]).__name__}`"):
            check(model_dir, tmp_path, *pair)
    for evaluator in evaluators:
        evaluator.name = "same"
    with pytest.raises(ValueError, match="`name`"):
        check(model_dir, tmp_path, *evaluators)
    with pytest.raises(pytest.fail.Exception, match="the model was built"):
        check(model_dir, tmp_path, evaluators[0], tasks[0], KeyTokenInspector())


@pytest.mark.parametrize("callback", [HuggingFaceExport, KeyTokenInspector])
def test_another_module_is_refused_by_name(callback):
    with pytest.raises(ValueError, match=f"`{callback.__name__}`"):
        require_long_context_lm(BoringModel(), callback.__new__(callback))
