"""Tasks while a model is trained: what is logged, when, and that training does not notice."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import LongContextTasks, long_context_tasks
from datamodules import PG19DataModule
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.tasks.evaluation.questions import put_questions
from lightning_modules.tasks.evaluation.summary import summarize
from tests.conftest import make_text
from tests.support.toy_tasks import GUESS, SEVERAL

pytestmark = pytest.mark.filterwarnings("ignore:The model has dropout")  # which shows that random states are kept

TASKS = {"tasks": [GUESS, SEVERAL], "lengths": [48, 64], "samples": 2}


@pytest.fixture(scope="module")
def setup(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    for split in ("train", "validation", "test"):
        (folder / split).mkdir()
        for number in range(2):
            (folder / split / f"{number}.txt").write_text(make_text(150, seed=len(split) + number))
    return SimpleNamespace(model=str(model_dir), books=str(folder), cache=str(tmp_path_factory.mktemp("cache")))


def fit(setup, root, *callbacks, logger=False, **settings):
    """Losses and final weights of four steps with dropout."""
    torch.manual_seed(0)
    module = LongContextLM(setup.model, context_length=16, stride=16, model_config={"attention_dropout": 0.1})
    data = PG19DataModule(setup.model, path=setup.books, sequence_length=64, cache_dir=setup.cache)
    losses, compute = [], module._statistics.compute

    def kept(strategy, norm):
        values = compute(strategy, norm)
        losses.append(values["loss"].item())
        return values

    module._statistics.compute = kept
    trainer = Trainer(
        accelerator="cpu",
        log_every_n_steps=1,
        logger=logger,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        num_sanity_val_steps=1,
        **{"enable_checkpointing": False, "max_steps": 4, "val_check_interval": 2, **settings},
    )
    trainer.fit(module, data)
    weights = torch.cat([part.detach().flatten() for part in module.parameters()])
    return SimpleNamespace(losses=losses, weights=weights, trainer=trainer, module=module, data=data)


def rounds(monkeypatch):
    """At which step how many questions were put."""
    seen, put = [], long_context_tasks.put_questions

    def watched(backbone, prompter, questions, mode, **options):
        results = put(backbone, prompter, questions, mode, **options)
        seen.append((len(questions), mode))
        torch.rand(3)  # a careless task
        return results

    monkeypatch.setattr(long_context_tasks, "put_questions", watched)
    return seen


@pytest.mark.slow
def test_training_is_the_same_bit_for_bit(setup, tmp_path, monkeypatch):
    seen = rounds(monkeypatch)
    plain = fit(setup, tmp_path)
    assert len(plain.losses) == 4
    for tasks in (
        LongContextTasks(**TASKS, mode="generate", every_n_steps=1, at_start=True),
        LongContextTasks(**TASKS, mode="teacher_forced"),
    ):
        watched = fit(setup, tmp_path, tasks)
        assert watched.losses == plain.losses
        assert torch.equal(watched.weights, plain.weights)
        assert watched.module.backbone.training
    assert seen.count((8, "generate")) == 5
    assert seen.count((8, "teacher_forced")) == 2


@pytest.mark.slow
def test_what_is_logged(setup, tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    saver = ModelCheckpoint(tmp_path / "best", monitor="tasks/average/64", mode="max")
    tasks = LongContextTasks(**TASKS, depths=3)
    run = fit(setup, tmp_path, tasks, saver, logger=logger, enable_checkpointing=True)
    assert saver.best_model_path
    logged = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0})
    events.Reload()
    scalars = {"guess/48", "guess/64", "several/48", "several/64", "average/48", "average/64"}
    scalars |= {"weighted_inc", "weighted_dec", "answer_perplexity", "other_perplexity", "seconds", "time_share"}
    assert {f"tasks/{name}" for name in scalars} <= set(events.Tags()["scalars"])
    for name in scalars:
        found = events.Scalars(f"tasks/{name}")
        assert [event.step for event in found] == [1, 3]
        assert found[-1].value == pytest.approx(logged[f"tasks/{name}"])
    assert {f"tasks/{name}" for name in ("lengths", "heat_map", "depths")} <= set(events.Tags()["images"])
    assert len(events.Images("tasks/heat_map")) == 2
    text = events.Tensors("tasks/answers/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text.startswith("| task | length | depth | score (%) | right | likeliest tokens |")
    assert 0 < logged["tasks/time_share"] < 1
    # The numbers are those of the model as it is now.
    results = put_questions(run.module.backbone, tasks._prompter, tasks._questions, "teacher_forced")
    for name, value in summarize(results).logged().items():
        assert logged[f"tasks/{name}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_every_so_many_steps_instead_of_at_validation(setup, tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    fit(setup, tmp_path, LongContextTasks(**TASKS, every_n_steps=3, at_start=True), logger=logger)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [event.step for event in events.Scalars("tasks/average/64")] == [0, 3]


def test_validation_by_itself(setup, tmp_path):
    module = LongContextLM(setup.model, context_length=16, stride=16)
    data = PG19DataModule(setup.model, path=setup.books, sequence_length=64, cache_dir=setup.cache)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=[LongContextTasks(**TASKS, every_n_steps=5)], default_root_dir=tmp_path, **options)
    (logged,) = trainer.validate(module, data, verbose=False)
    assert "tasks/average/48" in logged
    assert "tasks/time_share" not in logged


def test_the_time_of_a_round_is_no_training_time(setup, tmp_path, monkeypatch):
    seen = rounds(monkeypatch)
    run = fit(setup, tmp_path, LongContextTasks(**TASKS, every_n_steps=1), limit_val_batches=0)
    assert len(seen) == 4
    assert run.module.costs._started is None  # since the round behind the last step


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": [8]}, "8 tokens is too short for 'guess'"),
        ({"chat_template": True}, "has no chat template"),
    ],
)
def test_what_cannot_be_put_is_refused_before_training(setup, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        fit(setup, tmp_path, LongContextTasks(**{**TASKS, **settings}))


def test_a_length_beyond_the_models_positions_is_told_before_training(setup, tmp_path):
    with pytest.warns(UserWarning, match="A document of 5000 tokens is longer than the 4096 positions"):
        fit(setup, tmp_path, LongContextTasks([GUESS], [5000], samples=1), max_steps=1, val_check_interval=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"tasks": []}, "`tasks` must be a non-empty list"), ({"depths": 1}, "2 or more"), ({"lengths": []}, "`lengths`")],
)
def test_bad_settings_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        LongContextTasks(**{**TASKS, **settings})
