"""Estimate FLOPs, time and memory of an experiment on given GPUs."""

import logging
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import Checkpointing
from lightning_modules.objectives import find_step_dependent
from longce.plan.fitting import choose_checkpointing, find_fitting
from longce.plan.flops import (
    Flops,
    ce_step_flops,
    necessary_flops,
    short_pass_flops,
    sliding_pass_flops,
)
from longce.plan.hardware import GPU, Range, Rates, find_rates, recognize_gpu
from longce.plan.memory import GIB, Memory, Training
from longce.plan.settings import CHECKPOINTING, Experiment, read_experiment
from longce.plan.sizes import ModelSizes

_log = logging.getLogger(__name__)


class Planner:
    """Planner of one experiment on one kind of GPU."""

    def __init__(self, experiment: Experiment, gpu: GPU, rates: Rates) -> None:
        self.sizes = ModelSizes(experiment.config)
        if experiment.chooses_checkpointing:
            experiment = replace(experiment, training=choose_checkpointing(experiment, gpu, self.sizes))
        self.experiment = experiment
        self.gpu = gpu
        self.rates = rates
        self.training = training = experiment.training
        self.shape = self.sizes.shape(experiment.lora)
        # Sequences per step and GPU; a fraction if GPUs split sequences.
        self.rows_per_gpu = experiment.accumulated * training.rows / training.sequence_parallel_size
        self.tokens_per_step = round(training.gpus * self.rows_per_gpu * training.tokens)

    def plan(self) -> dict[str, Any]:
        """Return all estimates: TFLOP are 1e12 operations, memory is in GiB, ranges are pairs."""
        experiment = self.experiment
        shape = self.shape
        training = self.training
        settings = {
            "objective": experiment.objective,
            "max_steps": experiment.max_steps,
            "precision": experiment.precision,
            "optimizer": experiment.optimizer,
            "lora": experiment.lora,
            "rows_per_step": self.tokens_per_step // training.tokens,
        }
        memory = _describe_memory(self.sizes.training_memory(training, experiment.lora), self.gpu)
        fitting = None
        if not memory["fits"]:
            found = find_fitting(experiment, self.gpu, self.sizes)
            if found is not None:
                fitting = asdict(found)
        return {
            "model": {
                "name": experiment.name,
                "model_type": shape.name,
                "parameters": shape.parameters,
                "trained_parameters": shape.trained,
                "layers": shape.layers,
                "vocabulary": shape.vocabulary,
            },
            "gpu": {**self.gpu._asdict(), "count": training.gpus},
            "run": settings | _flatten(training),
            "notes": list(experiment.notes),
            "training": [self._plan_training(run) for run in self._list_runs()],
            "memory": memory,
            "fitting": fitting,
            "rates": self.rates._asdict(),
        }

    def _list_runs(self) -> list[Training]:
        """Return cross entropy, and LongCE as configured if its short contexts are shorter than the sequence."""
        longce = replace(self.training, short_pass=True)
        runs = [replace(longce, short_pass=False)]
        short_context = longce.short_context
        length = short_context.window_length
        if short_context.method == "sliding_window":
            length = short_context.context_length
        if length < longce.tokens:
            runs.append(longce)
        return runs

    def _plan_training(self, run: Training) -> dict[str, Any]:
        """Estimate an optimizer step, and all steps if their number is known."""
        flops = self._count_flops(run)
        cross_entropy = self._count_flops(replace(run, short_pass=False))
        step = self._estimate_seconds(flops)
        average = step
        early_step = None
        hours = None
        curriculum = self.experiment.curriculum
        if curriculum is not None:
            # A sequence is cut into shorter ones, which have the same tokens together.
            early = self._count_flops(replace(run, tokens=curriculum.tokens)) * (run.tokens / curriculum.tokens)
            early_step = self._estimate_seconds(early)
            fraction = curriculum.fraction
            low = fraction * early_step.low + (1 - fraction) * step.low
            high = fraction * early_step.high + (1 - fraction) * step.high
            average = Range(low, high)
        if self.experiment.max_steps is not None:
            hours = average.times(self.experiment.max_steps / 3600)
        context_length = None
        stride = None
        overhead = None
        if run.short_pass:
            context_length = run.short_context.context_length
            overhead = flops.total / cross_entropy.total - 1
            if run.short_context.method != "sliding_window":
                stride = run.short_context.stride
        return {
            "context_length": context_length,
            "stride": stride,
            "configured": run == self.training,
            "tflop": flops.total / 1e12,
            "overhead": overhead,
            "step_seconds": step,
            "step_seconds_before_switch": early_step,
            "tokens_per_second": Range(self.tokens_per_step / step.high, self.tokens_per_step / step.low),
            "hours": hours,
            "gpu_hours": hours and hours.times(run.gpus),
        }

    def _count_flops(self, run: Training) -> Flops:
        """Count the operations of one sequence."""
        flops = ce_step_flops(self.shape, run.tokens, run.checkpointing, run.checkpointed_layers)
        if not run.short_pass:
            return flops
        if run.short_context.method == "sliding_window":
            return flops + sliding_pass_flops(self.shape, run.tokens, run.short_context.context_length)
        return flops + short_pass_flops(self.shape, run.tokens, run.short_context)

    def _estimate_seconds(self, flops: Flops) -> Range:
        """Return the time of an optimizer step with these operations for each sequence."""
        return self.rates.seconds(flops, self.gpu).times(self.rows_per_gpu)

    def peak_seconds_per_token(self) -> float:
        """Return the time per token at the peak rate, without recomputation, for model FLOPs utilization."""
        cross_entropy = self._count_flops(replace(self.training, short_pass=False))
        repeated = cross_entropy.total - necessary_flops(self.shape, self.training.tokens).total
        flops = self._count_flops(self.training).total - repeated
        return flops / self.training.tokens / (self.training.gpus * self.gpu.tflops * 1e12)


def make_planner(model: LongContextLM, options: Any, gpu: GPU) -> Planner:
    """Return the planner of the parsed options of ``longce fit`` or ``longce plan``."""
    experiment = read_experiment(model, options)
    rates = find_rates(gpu, options.get("measured"), autocast=experiment.training.autocast is not None)
    return Planner(experiment, gpu, rates)


def plan_utilization(model: LongContextLM, options: Any, trainer: Trainer) -> float | None:
    """Return `Planner.peak_seconds_per_token` of a run; None on a CPU, and for steps that the plan does not count."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    gpu = recognize_gpu(torch.cuda.get_device_name(device))
    if gpu is None:
        return None
    is_sparse = model.loading.shifted_sparse_attention is not None
    has_schedule = model.objective.uses_short_context and find_step_dependent(model.objective) is not None
    try:
        planner = _plan_run(model, options, trainer, gpu)
        if is_sparse or has_schedule or planner.experiment.curriculum is not None:
            _log.info("Without MFU: not all steps have the operations of the plan.")
            return None
        return planner.peak_seconds_per_token()
    except Exception as error:  # an estimate must not stop a run
        _log.info("Without MFU: %s", error)
        return None


def plan_checkpointing(model: LongContextLM, options: Any, trainer: Trainer) -> tuple[Checkpointing, int | None]:
    """Return the ``gradient_checkpointing`` and ``checkpointed_layers`` that ``auto`` means on the GPUs of a run.

    All layers are recomputed, which needs the least memory, on a CPU and for unsupported settings.
    """
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return True, None
    name = torch.cuda.get_device_name(device)
    known = recognize_gpu(name) or GPU(name, tflops=1.0, memory=0.0)  # the rate does not change the memory
    memory = torch.cuda.get_device_properties(device).total_memory / GIB
    try:
        planned = _plan_run(model, options, trainer, known._replace(memory=memory)).training
    except Exception as error:  # an estimate must not stop a run
        _log.info("`gradient_checkpointing: auto` is true, because this run cannot be planned: %s", error)
        return True, None
    value = next(value for value, kind in CHECKPOINTING.items() if kind == planned.checkpointing)
    layers = None if value is False else planned.checkpointed_layers
    _log.info(
        "`gradient_checkpointing: auto` is %s for %s layers, by `longce plan` for %.0f GiB.",
        str(value).lower(),
        "all" if layers is None else f"the first {layers}",
        memory,
    )
    return value, layers


def _plan_run(model: LongContextLM, options: Any, trainer: Trainer, gpu: GPU) -> Planner:
    options = options.clone()
    options.gpus = trainer.world_size
    return make_planner(model, options, gpu)


def _describe_memory(memory: Memory, gpu: GPU) -> dict[str, Any]:
    """Return the memory of a step in GiB by part."""
    phases = {}
    for phase, parts in memory.phases.items():
        phases[phase] = _in_gib(parts)
    return {
        "fits": memory.needed <= gpu.memory * GIB,
        "available": gpu.memory,
        "needed": memory.needed / GIB,
        "peak": memory.peak / GIB,
        "largest_phase": memory.largest_phase,
        "lasting": _in_gib(memory.lasting),
        "phases": phases,
    }


def _in_gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}


def _flatten(training: Training) -> dict[str, Any]:
    """Return the settings of a training run as a flat dictionary, including those of its short contexts."""
    settings = asdict(training)
    return settings | settings.pop("short_context")
