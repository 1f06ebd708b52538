import random
from types import SimpleNamespace

import numpy as np
import torch

from lightning_modules.training.random_states import RandomStates, random_states


def after(batches):
    """A trainer of steps of two batches that has had so many."""
    progress = SimpleNamespace(current=SimpleNamespace(ready=batches))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    return SimpleNamespace(accumulate_grad_batches=2, is_last_batch=False, fit_loop=loop)


def draws():
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.random(), random.gauss(0, 1)]


def through_a_file(path, content):
    torch.save(content, path)
    return torch.load(path, weights_only=True)


def test_checkpoints_hold_the_states_of_the_last_whole_step(tmp_path, caplog):
    np.random.randn()  # leaves the second of a pair
    random.gauss(0, 1)
    callback = RandomStates()
    callback.on_train_batch_end(after(2))
    expected = draws()
    callback.on_train_batch_end(after(3))
    state = through_a_file(tmp_path / "a", callback.state_dict())
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)
    assert draws() != expected
    resumed = RandomStates()
    resumed.load_state_dict(state)
    resumed.on_train_batch_start(None)
    assert draws() == expected
    RandomStates().load_state_dict({"states": [random_states()] * 3})
    assert "3 processes" in caplog.text


def test_an_evaluation_changes_no_draw_of_training(tmp_path):
    def batches(disturb):
        torch.manual_seed(1)
        callback, drawn = RandomStates(), []
        for batch in range(4):
            if batch == 2:
                disturb(callback)
            callback.on_train_batch_start(None, None, None, batch)
            drawn.append(torch.rand(2).tolist())
            callback.on_train_batch_end(after(batch + 1))
        return drawn

    def evaluation(callback):
        torch.rand(5)
        callback.on_validation_start(None, None)

    assert batches(evaluation) == batches(lambda callback: None)
    assert batches(lambda callback: torch.rand(5)) != batches(lambda callback: None)
