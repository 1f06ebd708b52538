import copy
import os
import signal
import warnings

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from callbacks import StepCheckpoint
from lightning_modules.training.checkpoints.due_evaluation import DueEvaluation, ResumingTrainer
from lightning_modules.training.checkpoints.resume import find_checkpoint
from lightning_modules.training.preemption import EvaluationStop, Preemption
from tests.support.distributed import run_distributed
from tests.support.trainers import QUIET, OneWeight


class Line(OneWeight):
    """Its weight is the result of each evaluation; it signals its own process once."""

    def __init__(self, curve, hook=None, number=0, rank=None):
        super().__init__()
        self.curve, self.left, self.rank = curve, {hook: number}, rank

    def call(self, hook):
        self.left[hook] = self.left.get(hook, -1) - 1
        if self.left[hook] == -1 and hook in self.left and self.rank in (None, self.global_rank):
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch, batch_idx):
        self.call("training_step")
        return (self.weight - 5) ** 2  # a plain loader starts over when it resumes

    def validation_step(self, batch, batch_idx):
        self.call("validation_step")

    def on_validation_epoch_end(self):
        self.call("on_validation_epoch_end")

    def on_validation_end(self):
        if not self.trainer.sanity_checking and self.global_rank == 0:
            with self.curve.open("a") as file:
                file.write(f"{self.global_step} {self.weight.item():.9f}\n")
        self.call("on_validation_end")


def fit(folder, *signal_at, processes=1, **settings):
    folder.mkdir(exist_ok=True)
    preemption = Preemption()
    keep = {"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 2, "save_on_exception": True}
    save = StepCheckpoint(folder / "checkpoints", "{step}", **keep)
    own = [EvaluationStop(preemption.signal), DueEvaluation(preemption.signal), preemption, save]
    options = {"max_steps": 6, "val_check_interval": 2, "num_sanity_val_steps": 1, **settings}
    strategy = {"strategy": "ddp", "devices": processes} if processes > 1 else {}
    trainer = ResumingTrainer(callbacks=own, **{**QUIET, "enable_checkpointing": True}, **options, **strategy)
    checkpoint = find_checkpoint("last", trainer, None)
    loader = DataLoader(range(24))
    trainer.fit(Line(folder / "curve", *signal_at), loader, DataLoader(range(3)), ckpt_path=checkpoint)


STOPS = [
    ("training_step", 3),  # before the evaluation that follows this step
    ("validation_step", 1),  # in the first evaluation
    ("validation_step", 5),
    ("validation_step", 9),  # in the last one, after which nothing is left to train
    ("on_validation_epoch_end", 1),
    ("on_validation_end", 1),
    ("on_validation_end", 2),
]


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)])
def whole(request, tmp_path_factory):
    """Settings and evaluations of a run that nobody stops."""
    accumulate = request.param
    settings = {"max_steps": 6 // accumulate + 1, "accumulate_grad_batches": accumulate}
    folder = tmp_path_factory.mktemp("whole")
    with warnings.catch_warnings(action="ignore"):
        fit(folder, **settings)
    return settings, (folder / "curve").read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("hook", "number"), STOPS)
def test_a_stopped_run_has_the_evaluations_of_another_once_each(whole, tmp_path, hook, number):
    settings, evaluations = whole
    try:
        fit(tmp_path, hook, number, **settings)
    except SIGTERMException:
        fit(tmp_path, **settings)
    fit(tmp_path, **settings)  # a finished run repeats nothing
    assert (tmp_path / "curve").read_text() == evaluations


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", [None, EarlyStopping("weight", patience=9), ModelCheckpoint(monitor="weight")])
def test_results_that_decide_something_are_computed_again(tmp_path, reader):
    class Logged(Line):
        def on_validation_epoch_end(self):
            self.log("weight", self.weight)

    def run(steps, number):
        save = StepCheckpoint(tmp_path / "checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1)
        own = [DueEvaluation(Preemption().signal), save, *([] if reader is None else [copy.deepcopy(reader)])]
        options = {"val_check_interval": 2, "num_sanity_val_steps": 0, "default_root_dir": tmp_path}
        trainer = ResumingTrainer(callbacks=own, max_steps=steps, **{**QUIET, "enable_checkpointing": True}, **options)
        path = None if number is None else tmp_path / "checkpoints" / f"step={number}.ckpt"
        trainer.fit(Logged(tmp_path / "curve"), DataLoader(range(24)), DataLoader(range(3)), ckpt_path=path)

    run(4, None)
    run(6, 4)
    steps = [line.split()[0] for line in (tmp_path / "curve").read_text().splitlines()]
    assert steps == (["2", "4", "6"] if reader is None else ["2", "4", "4", "6"])


def stop_and_resume(rank, world_size, folder):
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world_size), "NODE_RANK": "0"}
    for hook, number in STOPS[:4]:
        number_in_process = number if hook == "training_step" else number * 2 // 3  # each has two of the three batches
        run = folder / f"{hook} {number}"
        with pytest.raises(SIGTERMException):
            fit(run, hook, number_in_process, 1, processes=world_size)
        fit(run, processes=world_size)


@pytest.mark.slow
def test_several_processes_stop_together_if_one_gets_the_signal(tmp_path):
    run_distributed(stop_and_resume, tmp_path)
    for hook, number in STOPS[:4]:
        curve = (tmp_path / f"{hook} {number}" / "curve").read_text()
        assert [line.split()[0] for line in curve.splitlines()] == ["2", "4", "6"], (hook, number)
