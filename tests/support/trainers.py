"""Trainers for tests: one that is quiet, and what data modules see of one; and a module that notes its batches."""

from types import SimpleNamespace

import torch
from lightning.pytorch import LightningModule, Trainer

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
}


def quiet_trainer(root, *callbacks, **settings):
    """A trainer on the CPU that prints, logs and saves nothing but what is asked for."""
    return Trainer(callbacks=list(callbacks), **{**QUIET, "default_root_dir": root, **settings})


def seen_trainer(stage="fit", rank=0, world_size=1, **settings):
    """As much of a trainer as data modules look at."""
    settings = {"max_steps": -1, "accumulate_grad_batches": 1, **settings}
    return SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        distributed_sampler_kwargs={"num_replicas": world_size, "rank": rank},
        state=SimpleNamespace(fn=stage),
        **settings,
    )


class OneWeight(LightningModule):
    """One weight, trained by gradient descent."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder(LightningModule):
    """Notes of each batch what ``look`` finds in it, and learns nothing."""

    def __init__(self, look):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.look, self.seen = look, []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.look(batch))
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)
