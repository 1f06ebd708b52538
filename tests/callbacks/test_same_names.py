"""Values that two callbacks log under one name would be averaged."""

import pytest
import torch
from lightning.pytorch import Trainer

from callbacks import ExternalEvaluator, KeyTokenInspector, LongContextTasks
from lightning_modules.long_context_lm import LongContextLM
from tests.support.toy_tasks import GUESS, SEVERAL


class NeverBuilt(LongContextLM):
    def configure_model(self):
        pytest.fail("the model was built before the callbacks were checked")


class OwnEvaluator(ExternalEvaluator):
    """A subclass logs the same names."""


def check(model_dir, tmp_path, *callbacks, stage="validate"):
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=list(callbacks), default_root_dir=tmp_path)
    loader = torch.utils.data.DataLoader([0])
    getattr(trainer, stage)(NeverBuilt(str(model_dir), context_length=48), loader)


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_two_evaluators(model_dir, evaluator_dir, tmp_path, stage):
    (tmp_path / "spans").mkdir()
    first = ExternalEvaluator(str(evaluator_dir), context_length=48, stride=16)
    second = OwnEvaluator(key_spans=str(tmp_path / "spans"))
    with pytest.raises(ValueError, match="`ExternalEvaluator`"):
        check(model_dir, tmp_path, first, second, stage=stage)
    first.name = second.name = "same"
    with pytest.raises(ValueError, match="'same', 'same'"):
        check(model_dir, tmp_path, first, second, stage=stage)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (
            lambda: LongContextTasks([GUESS], [48]),
            lambda: LongContextTasks([SEVERAL], [48], every_n_steps=2),
            "`LongContextTasks`.*Guess and .*Several.*tasks/seconds",
        ),
        (
            lambda: LongContextTasks(["hellaswag"]),
            lambda: LongContextTasks(["piqa", "arc_easy"], every_n_steps=2),
            "`LongContextTasks`.*hellaswag and piqa, arc_easy.*tasks/seconds",
        ),
        (
            lambda: KeyTokenInspector(documents=1),
            lambda: KeyTokenInspector(documents=["a"]),
            "`KeyTokenInspector`.*1 and .*'a'.*val/power_law",
        ),
    ],
)
def test_two_of_the_other_callbacks(model_dir, tmp_path, first, second, named):
    with pytest.raises(ValueError, match=named):
        check(model_dir, tmp_path, first(), second())


def test_one_of_each_is_let_through(model_dir, evaluator_dir, tmp_path):
    callbacks = [ExternalEvaluator(str(evaluator_dir)), KeyTokenInspector(), LongContextTasks([GUESS], [48])]
    with pytest.raises(pytest.fail.Exception, match="the model was built"):
        check(model_dir, tmp_path, *callbacks)
