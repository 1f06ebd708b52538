"""The optimizer and the learning rate: the paper's (Appendix A.2 of Fang et al., 2025), and how to change them."""

import copy
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.cli import ReduceLROnPlateau as MonitoringReduceLROnPlateau
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, ReduceLROnPlateau
from typing_extensions import override

from lightning_modules.functional.checks import check_count
from lightning_modules.training.checkpoints.spans import Span

# Class and arguments, so that they can be written to a saved config.
OPTIMIZER: dict[str, Any] = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.0},
}
LR_SCHEDULER: dict[str, Any] = {
    "class_path": "torch.optim.lr_scheduler.LinearLR",
    "init_args": {"start_factor": 0.05, "total_iters": 19},
}

ScheduleName = Literal[
    "constant",
    "cosine",
    "cosine_warmup_with_min_lr",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "inverse_sqrt",
    "linear",
    "polynomial",
    "warmup_stable_decay",
]
"""Schedules of transformers' ``get_scheduler``, without those that need a metric or that `constant` includes."""

_UNSUPPORTED: dict[type, str] = {
    LearningRateFinder: "train short runs with several `--model.optimizer.lr`",
    BatchSizeFinder: "set `data.batch_size` by the memory that `longce plan` estimates",
}
"""Alternatives to callbacks that change an attribute which the module or the data module does not have."""


def default_optimizer(parameters: Iterable[Tensor]) -> Optimizer:
    """Return the paper's AdamW."""
    return torch.optim.AdamW(parameters, **OPTIMIZER["init_args"])


def default_lr_scheduler(optimizer: Optimizer) -> LinearLR:
    """Return the paper's schedule: a warm-up over 20 steps, then a constant learning rate."""
    return LinearLR(optimizer, **LR_SCHEDULER["init_args"])


class WarmupSchedule(LambdaLR):
    """Learning rate schedule of transformers' ``get_scheduler``, in optimizer steps.

    Args:
        optimizer: Optimizer whose learning rates are the largest of the schedule.
        name: ``constant``, ``linear``, ``cosine``, ``warmup_stable_decay`` or another name of transformers.
        warmup_steps: Steps of the linear warm-up; the first of them has a learning rate of 0.
        total_steps: Step at which the decay ends, by default the ``trainer.max_steps`` of a `LongContextLM`.
        arguments: Further arguments of the schedule, such as ``{num_decay_steps: 50}``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: ScheduleName,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        check_count("`lr_scheduler.warmup_steps`", warmup_steps, minimum=0)
        check_count("`lr_scheduler.total_steps`", 1 if total_steps is None else total_steps)
        self.schedule = name
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.arguments = arguments or {}
        self._largest = float(optimizer.defaults["lr"])
        super().__init__(optimizer, self._factor(sys.maxsize if total_steps is None else total_steps))

    def end_at(self, max_steps: int) -> None:
        """Set the default of ``total_steps``; it is -1 if the trainer has no limit."""
        total = max_steps if self.total_steps is None else self.total_steps
        if self.schedule not in ("constant", "inverse_sqrt"):
            if total < 0:
                raise ValueError(
                    f"The schedule '{self.schedule}' must know its last step: set `trainer.max_steps`, or `total_steps`"
                    " of the schedule."
                )
            if total < (needed := self.warmup_steps + self.arguments.get("num_decay_steps", 0)):
                raise ValueError(
                    f"The schedule '{self.schedule}' has {needed} steps of warm-up and decay, more than its total of"
                    f" {total}: lower `warmup_steps` or `num_decay_steps`, or train for more steps."
                )
        self.lr_lambdas = [self._factor(total)] * len(self.lr_lambdas)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the step of a checkpoint, whose learning rate may be that of another last step."""
        super().load_state_dict(state_dict)
        _set_rates(self, _lambda_rates(self))

    def _factor(self, total_steps: int) -> Callable[[int], float]:
        """Return the function from a step to the factor of the learning rate."""
        name = "constant_with_warmup" if self.schedule == "constant" else self.schedule
        # Some arguments, such as `min_lr`, are learning rates: transformers divides them by that of the optimizer.
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=self._largest)
        from transformers import get_scheduler  # imports peft

        try:
            schedule = get_scheduler(name, optimizer, self.warmup_steps, total_steps, self.arguments)
        except TypeError as error:  # for arguments that are unknown or missing
            message = f"`lr_scheduler.arguments` {self.arguments} do not fit '{name}': {error}."
            raise ValueError(message) from error
        return schedule.lr_lambdas[0]


class OptimizerState(NamedTuple):
    """Settings of an optimizer and its schedule, as their constructors made them."""

    groups: list[dict[str, Any]]  # of the optimizer, without parameters
    schedule: dict[str, Any]


_PROGRESS = {
    *("last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step", "lr_lambdas"),
    *("best", "num_bad_epochs", "cooldown_counter"),
}
"""Attributes of schedules that count steps, and are not settings."""


def read_settings(optimizer: Optimizer, scheduler: Any) -> OptimizerState:
    """Return the settings of an optimizer and its schedule before a checkpoint replaces them."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    schedule = {name: value for name, value in scheduler.state_dict().items() if name not in _PROGRESS}
    return OptimizerState(groups, copy.deepcopy(schedule))


def restore_settings(optimizer: Optimizer, scheduler: Any, settings: OptimizerState) -> None:
    """Give an optimizer and its schedule, whose states are a checkpoint's, these settings at the same step.

    Raises:
        ValueError: If the learning rate of the schedule at a step is not a function of its settings.
    """
    closed = isinstance(scheduler, LambdaLR) or callable(getattr(scheduler, "_get_closed_form_lr", None))
    if not (closed or isinstance(scheduler, ReduceLROnPlateau)):
        raise ValueError(
            f"Settings of the optimizer or of the schedule {type(scheduler).__name__} cannot change when a training"
            " resumes: restore them, or use `lightning_modules.training.optimizers.WarmupSchedule`."
        )
    for group, new in zip(optimizer.param_groups, settings.groups, strict=True):
        before = group.get("initial_lr", group["lr"])
        now = new.get("initial_lr", new["lr"])
        rate = group["lr"] * now / before if before else now  # reductions on a plateau stay
        group.update(new, lr=rate)
    vars(scheduler).update(copy.deepcopy(settings.schedule))
    if isinstance(scheduler, LambdaLR):
        rates = _lambda_rates(scheduler)
    else:
        rates = scheduler._get_closed_form_lr() if closed else [group["lr"] for group in optimizer.param_groups]
    _set_rates(scheduler, rates)


def _lambda_rates(scheduler: Any) -> list[float]:
    """Return the learning rate of each group at the present step of a `LambdaLR`."""
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    return [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]


def _set_rates(scheduler: Any, rates: Sequence[float]) -> None:
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)


@dataclass(frozen=True)
class ParameterGroups:
    """Settings of the optimizer that differ between parameters.

    Args:
        decay_norms_and_biases: Whether the optimizer's weight decay also applies to norms and biases.
        learning_rates: Learning rates by a regular expression for parameter names, such as ``{embed_tokens: 1e-5}``;
            the first that matches is used. Schedules scale them like the optimizer's own.
    """

    decay_norms_and_biases: bool = False
    learning_rates: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, rate in self.learning_rates.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`parameter_groups.learning_rates` '{pattern}': {error}.") from error
            if not 0 <= rate < math.inf:
                raise ValueError(f"`parameter_groups.learning_rates` '{pattern}' must be 0 or more, got {rate}.")

    def split(self, parameters: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
        """Return the groups of named parameters for an optimizer."""
        groups: dict[str, dict[str, Any]] = {}
        unused = set(self.learning_rates)
        for name, parameter in parameters:
            pattern = next((one for one in self.learning_rates if re.search(one, name)), "")
            unused.discard(pattern)
            exempt = parameter.ndim < 2 and not self.decay_norms_and_biases
            label = ", ".join(filter(None, (pattern, "norms and biases" if exempt else ""))) or "weights"
            group = groups.setdefault(label, {"name": label, "params": []})
            group["params"].append(parameter)
            if pattern:
                group["lr"] = self.learning_rates[pattern]
            if exempt:
                group["weight_decay"] = 0.0
        if unused:
            raise ValueError(
                f"`parameter_groups.learning_rates` '{min(unused)}' matches no trained parameter: correct it, or train"
                " the parameter."
            )
        return list(groups.values())


class Optimization(Callback):
    """Makes the optimizer and the schedule of a module, and steps schedules that need a metric.

    Lightning would step those after a number of batches, whether or not there was an evaluation.
    """

    def __init__(
        self,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable,
        groups: ParameterGroups | None,
    ) -> None:
        self._make_optimizer = optimizer
        self._make_lr_scheduler = lr_scheduler
        self._groups = groups
        self.spans: Sequence[Span] = ()
        self._configured: OptimizerState | None = None

    def check(self, trainer: Trainer) -> None:
        """Raise a ``ValueError`` for settings that cannot work, before the model is loaded."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            remedy = _UNSUPPORTED.get(type(callback))
            if remedy is not None:
                raise ValueError(
                    f"`{type(callback).__name__}` does not support `LongContextLM`: remove it, and {remedy}."
                )
        self._configure([torch.zeros(1, 1)], trainer.max_steps)

    def configure(self, module: LightningModule) -> OptimizerLRScheduler:
        """Return what ``configure_optimizers`` of the module must return."""
        trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        groups = self._groups.split(trainable) if self._groups else [parameter for _, parameter in trainable]
        configured: Any = self._configure(groups, module.trainer.max_steps)
        self._configured = read_settings(configured["optimizer"], configured["lr_scheduler"]["scheduler"])
        return configured

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let changed settings take effect: the checkpoint has restored the old ones."""
        changed = self.spans[-1].changed if self.spans else {}
        names = ("model.optimizer.", "model.parameter_groups", "model.lr_scheduler.")
        if self._configured is not None and any(name.startswith(names) for name in changed):
            restore_settings(trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler, self._configured)

    def _configure(self, parameters: Any, max_steps: int) -> OptimizerLRScheduler:
        optimizer = self._make_optimizer(parameters)
        scheduler = self._make_lr_scheduler(optimizer)
        config: Any = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, WarmupSchedule):
            scheduler.end_at(max_steps)
        if isinstance(scheduler, ReduceLROnPlateau):
            if not isinstance(scheduler, MonitoringReduceLROnPlateau):
                raise ValueError(
                    "`lr_scheduler` ReduceLROnPlateau must name its metric: use"
                    " `lightning.pytorch.cli.ReduceLROnPlateau` with `monitor: val/longppl`."
                )
            config |= {"monitor": scheduler.monitor, "frequency": sys.maxsize}  # `on_validation_end` steps it
        return {"optimizer": optimizer, "lr_scheduler": config}

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and not trainer.sanity_checking and config.frequency == sys.maxsize:
                if config.monitor not in trainer.callback_metrics:
                    raise ValueError(
                        f"`lr_scheduler` monitors '{config.monitor}', which the evaluation has not logged: set"
                        f" `monitor` to one of {sorted(trainer.callback_metrics)}."
                    )
                config.scheduler.step(trainer.callback_metrics[config.monitor])  # type: ignore[arg-type]
