"""Tasks while a model is trained: what is logged, when, and that training does not notice."""

import os
import random
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import LongContextTasks, StepCheckpoint, long_context_tasks
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.tasks.evaluation.answers import ANSWERS_FILE, read_answers
from lightning_modules.tasks.evaluation.questions import put_questions
from lightning_modules.tasks.evaluation.summary import summarize
from lightning_modules.training.preemption import EvaluationStop, Preemption
from longce.evaluate import evaluate
from tests.conftest import make_text
from tests.support.runs import Losses, make_data, make_trainer
from tests.support.texts import write_books
from tests.support.tiny_training import loader, row
from tests.support.toy_tasks import GUESS, SEVERAL

pytestmark = pytest.mark.filterwarnings("ignore:The model has dropout")  # which shows that random states are kept

TASKS = {"tasks": [GUESS, SEVERAL], "lengths": [48, 64], "samples": 2}


@pytest.fixture(scope="module")
def setup(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    texts = [make_text(150, seed=number) for number in range(2)]
    write_books(folder, train=texts, validation=texts, test=texts)
    return SimpleNamespace(model=str(model_dir), books=str(folder), cache=str(tmp_path_factory.mktemp("cache")))


def make_run(setup):
    torch.manual_seed(0)
    module = LongContextLM(setup.model, context_length=16, stride=16, model_config={"attention_dropout": 0.1})
    return module, make_data(setup)


def fit(setup, root, *callbacks, **settings):
    """Losses and final weights of four steps with dropout."""
    module, data = make_run(setup)
    losses = Losses(module)
    settings = {"max_steps": 4, "val_check_interval": 2, "log_every_n_steps": 1} | settings
    trainer = make_trainer(root, 1, "auto", callbacks=list(callbacks), **settings)
    trainer.fit(module, data)
    weights = torch.cat([part.detach().flatten() for part in module.parameters()])
    return SimpleNamespace(losses=losses.values, weights=weights, trainer=trainer, module=module)


def record_rounds(monkeypatch):
    """The numbers of questions that were asked together, and the mode."""
    seen, put = [], long_context_tasks.put_questions

    def watched(backbone, prompter, questions, mode, **options):
        results = put(backbone, prompter, questions, mode, **options)
        seen.append((len(questions), mode))
        torch.rand(3)  # a careless task
        return results

    monkeypatch.setattr(long_context_tasks, "put_questions", watched)
    return seen


@pytest.mark.slow
def test_training_does_not_change(setup, task_dir, tmp_path, monkeypatch):
    """The harness resets every random generator, and switches the model to eval mode."""
    seen = record_rounds(monkeypatch)
    random.seed(5)
    plain, state = fit(setup, tmp_path), random.getstate()
    assert len(plain.losses) == 4
    options = {**TASKS, "tasks": [*TASKS["tasks"], "letter"], "include_path": str(task_dir), "limit": 2}
    for tasks in (
        LongContextTasks(**options, mode="generate", every_n_steps=1, at_start=True),
        LongContextTasks(**options, mode="teacher_forced"),
    ):
        random.seed(5)
        watched = fit(setup, tmp_path, tasks)
        assert random.getstate() == state
        assert watched.losses == plain.losses
        assert torch.equal(watched.weights, plain.weights)
        assert watched.module.backbone.training
    assert "harness/letter/acc" in watched.trainer.callback_metrics
    assert seen.count((8, "generate")) == 5
    assert seen.count((8, "teacher_forced")) == 2


@pytest.mark.slow
def test_logged_values_and_figures(setup, tmp_path):
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
    assert {f"tasks/{name}" for name in ("lengths", "depths")} <= set(events.Tags()["images"])
    assert len(events.Images("tasks/depths")) == 2
    text = events.Tensors("tasks/answers/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text.startswith("| task | length | depth | score (%) | right | likeliest tokens |")
    assert 0 < logged["tasks/time_share"] < 1
    # The numbers are those of the model as it is now.
    results = put_questions(run.module.backbone, tasks._prompter, tasks._questions, "teacher_forced")
    for name, value in summarize(results).logged().items():
        assert logged[f"tasks/{name}"] == pytest.approx(value, rel=1e-5)


def test_the_answers_of_a_validation_are_those_of_evaluate(setup, tmp_path):
    """One question, one answer: in the folder of the run, from the command, and in what is logged."""
    module, data = make_run(setup)
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    options = {**TASKS, "depths": 3, "seed": 3}
    tasks = LongContextTasks(**options)
    (logged,) = make_trainer(tmp_path, 1, "auto", callbacks=[tasks], logger=logger).validate(module, data)
    (file,) = tmp_path.rglob("answers/*.parquet")
    assert file.name == "val-step-0.parquet"
    by_callback = read_answers(file)
    evaluate(setup.model, str(tmp_path / "out"), **options, mode="teacher_forced", dtype="float32")
    by_command = read_answers(tmp_path / "out" / ANSWERS_FILE)
    assert len(by_command) == 2 * (6 + 2)
    for one, other in zip(by_callback, by_command, strict=True):
        about = {"model": other.model, "stage": "", "seconds": other.seconds}
        numbers = {name: pytest.approx(getattr(other, name), rel=1e-5) for name in ("answer_nll", "other_nll")}
        assert replace(one, **about) == replace(other, **numbers)
        assert one.setting.seed == 3
        assert one.model.special_tokens == other.model.special_tokens
        assert one.model.numerics == other.model.numerics._replace(precision="32-true")
    for name, value in summarize(by_command).logged().items():
        assert logged[f"tasks/{name}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:You.re resuming")
def test_tasks_that_a_signal_cuts_run_first_when_the_training_resumes(setup, tmp_path, monkeypatch):
    steps, put, stops = [], long_context_tasks.put_questions, [4]
    options = {"enable_checkpointing": True, "limit_val_batches": 0}

    def run(checkpoint=None):
        preemption = Preemption()
        save = StepCheckpoint(tmp_path, "{step}", monitor="step", mode="max", save_on_exception=True)
        tasks = LongContextTasks(**TASKS, every_n_steps=2)
        module, data = make_run(setup)
        callbacks = [EvaluationStop(preemption.signal), tasks, preemption, save]
        trainer = make_trainer(tmp_path, 1, "auto", callbacks=callbacks, max_steps=6, **options)

        def watched(*arguments, **settings):
            if trainer.global_step in stops:
                stops.clear()
                os.kill(os.getpid(), signal.SIGTERM)
            steps.append(trainer.global_step)
            return put(*arguments, **settings)

        monkeypatch.setattr(long_context_tasks, "put_questions", watched)
        trainer.fit(module, data, ckpt_path=checkpoint)

    with pytest.raises(SIGTERMException):
        run()
    assert steps == [2]
    run(tmp_path / "step=4.ckpt")
    assert steps == [2, 4, 6]


def test_validation_alone_runs_the_tasks(setup, tmp_path):
    trainer = make_trainer(tmp_path, 1, "auto", callbacks=[LongContextTasks(**TASKS, every_n_steps=5)])
    (logged,) = trainer.validate(*make_run(setup), verbose=False)
    assert "tasks/average/48" in logged
    assert "tasks/time_share" not in logged


def test_a_model_of_a_revision_has_the_tokenizer_of_it(setup, tmp_path, monkeypatch):
    seen = []

    def note(name, **options):
        seen.append((name, options))
        return load_tokenizer(name)

    monkeypatch.setattr(long_context_tasks, "load_tokenizer", note)
    module = LongContextLM(setup.model, context_length=16, stride=16, revision="v1")
    trainer = make_trainer(tmp_path, 1, "auto", callbacks=[LongContextTasks(**TASKS)])
    trainer.validate(module, loader(row(0)), verbose=False)
    assert seen == [(setup.model, {"revision": "v1"})]


def test_the_time_of_tasks_is_not_training_time(setup, tmp_path, monkeypatch):
    seen = record_rounds(monkeypatch)
    run = fit(setup, tmp_path, LongContextTasks(**TASKS, every_n_steps=1), limit_val_batches=0)
    assert len(seen) == 4
    assert run.module.costs._started is None  # since the round behind the last step


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [("lengths", [8], "8 tokens"), ("chat_template", True, "chat"), ("mode", "key_tokens", "'key_tokens' measures")],
)
def test_unusable_options_are_refused_before_training(setup, tmp_path, option, value, named):
    with pytest.raises(ValueError, match=named):
        fit(setup, tmp_path, LongContextTasks(**{**TASKS, option: value}))
