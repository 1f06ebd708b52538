"""Estimate FLOPs, time and memory of an experiment on given GPUs."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_modules.commands.plan.activations import ActivationBytes
from lightning_modules.commands.plan.flops import (
    Flops,
    ce_step_flops,
    forward_flops,
    necessary_flops,
    scoring_flops,
    short_pass_flops,
    sliding_pass_flops,
)
from lightning_modules.commands.plan.hardware import GPU, Range, Rates, find_rates, recognize_gpu
from lightning_modules.commands.plan.memory import GIB, Memory, Training, scoring_memory, training_memory
from lightning_modules.commands.plan.settings import Experiment, read_experiment
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.commands.plan.transfers import WAITING, transfer_seconds
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.dtypes import stored_dtype
from lightning_modules.training.monitoring.costs import PlannedStep

# Table 7 of Fang et al. (2025): extra wall-clock time of LongCE over CE; Llama-2-7B, sequences of 32k tokens.
PAPER_OVERHEAD = {(4096, 1024): 0.79, (1024, 1024): 0.43, (4096, 4096): 0.36, (4096, 512): 1.50}
PAPER_TOKENS = 32_768

_log = logging.getLogger(__name__)


class Planner:
    """Planner of one experiment on one kind of GPU; the price of a GPU hour is in any currency."""

    def __init__(self, experiment: Experiment, gpu: GPU, rates: Rates, price: float | None = None) -> None:
        self.experiment, self.gpu, self.rates, self.price = experiment, gpu, rates, price
        self.training = training = experiment.training
        numerics = (training.dtype, training.autocast, training.bfloat16_residual)
        self.shape = ModelShape.of(experiment.config, experiment.lora)
        self.activations = ActivationBytes(experiment.config, *numerics, experiment.lora)
        self.memory = training_memory(self.shape, self.activations, training)
        self.cross_entropy = ce_step_flops(self.shape, training.tokens, training.checkpointing)
        # Sequences per step and GPU; a fraction if GPUs split sequences.
        self.rows_per_gpu = experiment.accumulated * training.rows / training.sequence_parallel_size

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of an optimizer step, over all GPUs."""
        return round(self.training.gpus * self.rows_per_gpu * self.training.tokens)

    def plan(self) -> dict[str, Any]:
        """Return all estimates: TFLOP are 1e12 operations, memory is in GiB, ranges are pairs."""
        training, names = self.training, ("objective", "window_share", "max_steps", "precision", "optimizer", "lora")
        settings = {name: getattr(self.experiment, name) for name in names} | asdict(training)
        return {
            "model": _describe_model(self.experiment.name, self.shape),
            "gpu": {**self.gpu._asdict(), "count": training.gpus},
            "run": {**settings, "rows_per_step": self.tokens_per_step // training.tokens},
            "notes": list(self.experiment.notes),
            "training": [self._plan_training(run) for run in self._list_runs()],
            "memory": self._describe_memory(self.memory),
            "scoring": self._plan_scoring(),
            "rates": self.rates._asdict(),
        }

    def plan_step(self) -> PlannedStep:
        """Return the estimates that a run compares itself with."""
        flops, _, seconds = self._estimate_step(self.training)
        repeated = self.cross_entropy.total - necessary_flops(self.shape, self.training.tokens).total
        return PlannedStep(
            tokens=self.tokens_per_step,
            flops=self.tokens_per_step / self.training.tokens * (flops.total - repeated),
            peak_flops=self.training.gpus * self.gpu.tflops * 1e12,
            seconds=seconds,
            memory=self.memory.peak / GIB,
        )

    def _list_runs(self) -> Iterator[Training]:
        """Yield cross entropy, then LongCE as configured, in a sliding window, and as in the paper, if it fits."""
        training = self.training
        yield replace(training, short_pass=False)
        configured = (training.context_length, training.stride)
        for context_length, stride in dict.fromkeys([configured, (training.context_length, None), *PAPER_OVERHEAD]):
            if context_length + (stride or 0) < training.tokens:
                run = replace(training, short_pass=True, sliding=stride is None, context_length=context_length)
                yield replace(run, stride=stride or training.stride)

    def _plan_training(self, run: Training) -> dict[str, Any]:
        """Estimate an optimizer step, and all steps if their number is known."""
        flops, transfers, step = self._estimate_step(run)
        hours = self.experiment.max_steps and step.times(self.experiment.max_steps / 3600)
        as_in_paper = run.short_pass and not run.sliding and run.tokens == PAPER_TOKENS
        return {
            "context_length": run.context_length if run.short_pass else None,
            "stride": run.stride if run.short_pass and not run.sliding else None,
            "configured": run == self.training,
            "tflop": flops.total / 1e12,
            "overhead": flops.total / self.cross_entropy.total - 1 if run.short_pass else None,
            "paper_overhead": PAPER_OVERHEAD.get((run.context_length, run.stride)) if as_in_paper else None,
            "step_seconds": step,
            "tokens_per_second": Range(self.tokens_per_step / step.high, self.tokens_per_step / step.low),
            "transfer_seconds": transfers,
            "hours": hours,
            "gpu_hours": hours and hours.times(run.gpus),
            "price": hours and self.price and hours.times(run.gpus * self.price),
        }

    def _estimate_step(self, training: Training) -> tuple[Flops, dict[str, float], Range]:
        """Return the FLOPs of a sequence, and the transfers and the time of an optimizer step.

        Computation hides the transfers that it does not wait for, or hides none.
        """
        flops, batches = self.cross_entropy, self.experiment.accumulated
        if training.short_pass and training.sliding:
            flops += sliding_pass_flops(self.shape, training.tokens, training.context_length)
        elif training.short_pass:
            short = short_pass_flops(self.shape, training.tokens, training.context_length, training.stride)
            flops += short * self.experiment.window_share
        transfers = transfer_seconds(self.shape, self.activations, training, self.gpu, batches=batches)
        compute = self.rates.seconds(flops, self.gpu).times(self.rows_per_gpu)
        waiting, total = sum(transfers.get(name, 0.0) for name in WAITING), sum(transfers.values())
        return flops, transfers, Range(max(compute.low, total - waiting) + waiting, compute.high + total)

    def _describe_memory(self, memory: Memory) -> dict[str, Any]:
        return {
            "fits": memory.needed <= self.gpu.memory * GIB,
            "needed": memory.needed / GIB,
            "available": self.gpu.memory,
            "peak": memory.peak / GIB,
            "largest_phase": memory.largest_phase,
            "lasting": _in_gib(memory.lasting),
            "phases": {phase: _in_gib(parts) for phase, parts in memory.phases.items()},
            "main_memory": memory.host / GIB,
        }

    def _plan_scoring(self) -> dict[str, Any]:
        """Estimate LongPPL of one document that is as long as a training sequence."""
        evaluator, tokens, config = self.experiment.evaluator, self.training.tokens, self.experiment.config
        settings, dtype = evaluator or self.training, stored_dtype(config)
        pair = (settings.context_length, settings.stride)
        # Adapters are merged for scoring, so they add nothing.
        model = self.shape if self.experiment.lora is None else ModelShape.of(config)
        passes = {
            "perplexity": forward_flops(model, tokens, tokens - 1),
            "evaluator == model": scoring_flops(model, model, tokens, *pair, shared_pass=True),
        }
        memory = {"model": scoring_memory(model, ActivationBytes(config, dtype), tokens, dtype)}
        if evaluator is not None:
            shape, activations = ModelShape.of(evaluator.config), ActivationBytes(evaluator.config, evaluator.dtype)
            passes["with evaluator"] = scoring_flops(shape, model, tokens, *pair)
            # The evaluator alone, and during a fit, next to the memory that training keeps.
            beside = self.memory.lasting | {"evaluator": float(shape.parameters * evaluator.dtype.itemsize)}
            for name, lasting in (("evaluator", None), ("evaluator within a fit", beside)):
                sizes = (shape, activations, tokens, evaluator.dtype)
                memory[name] = scoring_memory(*sizes, windows=pair, lasting=lasting)
        return {
            "document_tokens": tokens,
            "context_length": pair[0],
            "stride": pair[1],
            "evaluator": evaluator and _describe_model(evaluator.name, shape),
            "passes": [
                {"pass": name, "tflop": flops.total / 1e12, "seconds": self.rates.seconds(flops, self.gpu)}
                for name, flops in passes.items()
            ],
            "memory": {name: self._describe_memory(each) for name, each in memory.items()},
        }


def make_planner(model: LongContextLM, options: Any, gpu: GPU) -> Planner:
    """Return the planner of the parsed options of ``longce fit`` or ``longce plan``."""
    experiment = read_experiment(model, options)
    rates = find_rates(gpu, options.get("measured"), autocast=experiment.training.autocast is not None)
    return Planner(experiment, gpu, rates, options.get("price_per_gpu_hour"))


def plan_run(model: LongContextLM, options: Any, trainer: Trainer) -> PlannedStep | None:
    """Plan a run by the parsed options of ``longce fit``; return None on a CPU, and for what is not supported."""
    device = trainer.strategy.root_device
    gpu = recognize_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    options = options.clone()
    options.gpus, options.gpus_per_node = trainer.world_size, trainer.num_devices
    try:
        return make_planner(model, options, gpu).plan_step()
    except Exception as error:  # an estimate must not stop a run
        _log.info("Without MFU and planned time: %s", error)
        return None


def _in_gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}


def _describe_model(name: str, shape: ModelShape) -> dict[str, Any]:
    sizes = {"parameters": shape.parameters, "trained_parameters": shape.trained, "layers": shape.layers}
    return {"name": name, "model_type": shape.name, **sizes, "vocabulary": shape.vocabulary}
