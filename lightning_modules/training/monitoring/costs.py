"""Tokens, time and memory of training, per optimizer step and of the whole run."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

GIB = 2.0**30


class StepCosts(Callback):
    """Costs of optimizer steps, without evaluations."""

    def __init__(self) -> None:
        self.peak_seconds_per_token: float | None = None  # by `longce plan`, for model FLOPs utilization
        self.totals = {"tokens": 0.0, "gpu_hours": 0.0}  # of the run, kept by checkpoints
        self._seconds = self._waited = 0.0
        self._started: float | None = None
        self._idle_since: float | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop_clock()
        self._seconds = self._waited = 0.0

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock, unless it is running, and count the time since the last batch as waiting for data."""
        now = time.perf_counter()
        if self._idle_since is not None:
            self._waited += now - self._idle_since
        if self._started is None:
            self._started = now
            if torch.cuda.is_initialized():  # the peak of an evaluation does not count
                torch.cuda.reset_peak_memory_stats()

    def end_step(self, tokens: float, processes: int) -> dict[str, Tensor]:
        """Return the costs of a step with this many input tokens as scalars on CPU, and start the next step."""
        now = time.perf_counter()
        # 1. Costs of this step, and of the run.
        if self._started is not None:
            self._seconds += now - self._started
        seconds = max(self._seconds, 1e-9)
        self.totals["tokens"] += tokens
        self.totals["gpu_hours"] += seconds * processes / 3600
        costs = {**self.totals, "tokens_per_second": tokens / seconds, "data_wait": self._waited / seconds}
        if torch.cuda.is_initialized():
            costs["peak_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
            torch.cuda.reset_peak_memory_stats()
        if self.peak_seconds_per_token is not None:
            costs["mfu"] = self.peak_seconds_per_token * tokens / seconds
        # 2. The optimizer, which follows, belongs to the next step.
        self._seconds = self._waited = 0.0
        self._started = now
        self._idle_since = None
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in costs.items()}

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        """Start to wait for the next batch."""
        self._idle_since = time.perf_counter()

    def stop_clock(self) -> None:
        """Stop counting time until the next batch, for an evaluation."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
        self._started = self._idle_since = None

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop_clock()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the totals after the last step, unless they were logged with it."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every:
            for logger in trainer.loggers:
                totals = {f"train/{name}": value for name, value in self.totals.items()}
                logger.log_metrics(totals, step=trainer.global_step - 1)
