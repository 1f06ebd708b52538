"""The callback's numbers by one process and by two, whether each holds all weights (DDP) or a part of them (FSDP2)."""

import os
from unittest import mock

import pytest
import torch

from callbacks import LongContextTasks
from lightning_modules.tasks.evaluation.summary import summarize
from tests.support.distributed import run_distributed
from tests.support.runs import Losses, make_data, make_module, make_trainer
from tests.support.toy_tasks import GUESS, SEVERAL


class Kept(LongContextTasks):
    """With what was found, round by round."""

    def __init__(self, **settings):
        super().__init__([GUESS, SEVERAL], [48, 80], samples=3, **settings)
        self.rounds = []

    def _run_longce_tasks(self, trainer, pl_module):
        def kept(results):
            self.rounds.append(results)
            return summarize(results)

        with mock.patch("callbacks.long_context_tasks.summarize", kept):
            return super()._run_longce_tasks(trainer, pl_module)


def train(setup, root, processes, strategy):
    torch.manual_seed(0)
    module, data = make_module(setup), make_data(setup)
    callbacks = [Kept(mode="teacher_forced"), Kept(mode="generate", every_n_steps=2)]
    steps = {"max_steps": 3, "accumulate_grad_batches": 4 // processes, "val_check_interval": 12 // processes}
    trainer = make_trainer(root, processes, strategy, callbacks=callbacks, **steps)
    losses = Losses(module)
    with mock.patch("callbacks.long_context_tasks.check_names"):  # both in one run: what they log is averaged alike
        trainer.fit(module, data)
    keys = [[str(one.key) for one in part] for callback in callbacks for part in callback.rounds]
    texts = [[one.prediction for one in part] for callback in callbacks for part in callback.rounds]
    fields = ("score", "answer_nll", "other_nll", "answer_tokens")
    found = [
        [{name: getattr(one, name) or 0.0 for name in fields} for one in part]
        for callback in callbacks
        for part in callback.rounds
    ]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("tasks/")}
    times = {name: logged.pop(name) for name in ("tasks/seconds", "tasks/time_share")}
    assert 0 < times["tasks/time_share"] < 1
    return {"losses": losses.values, "keys": keys, "texts": texts, "found": found, "logged": logged}


def _run(rank, processes, setup, root):
    os.environ["LOCAL_RANK"] = str(rank)
    found = {strategy: train(setup, root, processes, strategy) for strategy in ("ddp", "fsdp")}
    torch.save(found, root / f"rank {rank}.pt")


@pytest.mark.slow
def test_two_processes_find_what_one_does(setup, tmp_path):
    run_distributed(_run, setup, tmp_path)
    expected = train(setup, tmp_path / "one", 1, "auto")
    assert [len(part) for part in expected["found"]] == [12, 12]
    assert "tasks/average/80" in expected["logged"]
    for rank in range(2):
        for found in torch.load(tmp_path / f"rank {rank}.pt").values():
            assert found["keys"] == expected["keys"]
            assert found["texts"] == expected["texts"]
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            assert found["logged"] == pytest.approx(expected["logged"], rel=1e-5)
            for part, wanted in zip(found["found"], expected["found"], strict=True):
                for one, other in zip(part, wanted, strict=True):
                    assert one == pytest.approx(other, rel=1e-6)
