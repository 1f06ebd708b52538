"""Random states of training, unaffected by interruptions and evaluations."""

import logging
import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_modules.training.preemption import between_steps
from lightning_modules.utilities.collectives import gathered, rank_and_size

_log = logging.getLogger(__name__)


class RandomStates(Callback):
    """Stores the random states of all processes in checkpoints, so that a resumed run draws the same random numbers.

    Each training batch starts with the states at the end of the previous one, even if an evaluation, the loader of a
    new epoch or the start of a resumed run has drawn random numbers since. Checkpoints contain the states after the
    last complete optimizer step.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] | None = None
        self._step_states: dict[str, Any] | None = None
        self._disturbed = False

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._disturbed and self._states is not None:
            set_random_states(self._states)
        self._disturbed = False

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._states = random_states()
        if between_steps(trainer):
            self._step_states = self._states

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._disturbed = True

    on_train_epoch_start = on_validation_start

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the states of all processes by rank; all of them must call this."""
        return {"states": gathered(self._step_states or random_states())}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict["states"]
        rank, processes = rank_and_size()
        if len(states) != processes:
            text = "The checkpoint is from %s processes, and this run has %s: random states (dropout) are not restored."
            _log.warning(text, len(states), processes)
            return
        self._states = self._step_states = states[rank]
        self._disturbed = True


def random_states() -> dict[str, Any]:
    """Return the states of torch (CPU and CUDA), numpy and Python, in types that ``weights_only`` can load."""
    name, key, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [name, torch.from_numpy(np.asarray(key).astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the result of `random_states`; devices that no longer exist are ignored."""
    torch.set_rng_state(states["torch"].cpu())
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state.cpu(), device)
    name, key, *rest = states["numpy"]
    np.random.set_state((name, key.cpu().numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
