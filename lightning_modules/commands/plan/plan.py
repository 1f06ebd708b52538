"""Estimate FLOPs, time and memory of an experiment on given GPUs."""

import logging
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from transformers import PreTrainedConfig

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
        self._models: dict[str, tuple[ModelShape, ActivationBytes]] = {}
        numerics = (training.dtype, training.autocast, training.bfloat16_residual)
        self.shape, self.activations = self._measure_model(experiment.config, *numerics, experiment.lora)
        self.memory = training_memory(self.shape, self.activations, training)
        self.cross_entropy = ce_step_flops(self.shape, training.tokens, training.checkpointing)
        # Sequences per step and GPU; a fraction if GPUs split sequences.
        self.rows_per_gpu = experiment.accumulated * training.rows / training.sequence_parallel_size

    def plan(self) -> dict[str, Any]:
        """Return all estimates as plain numbers: TFLOP are 1e12 operations, memory is in GiB, ranges are pairs."""
        training, names = self.training, ("objective", "window_share", "max_steps", "precision", "optimizer", "lora")
        settings = {name: getattr(self.experiment, name) for name in names} | asdict(training)
        run = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in settings.items()}
        # The configured (K, d), a sliding window of K, and then those of the paper that fit into the sequence.
        configured = (training.context_length, training.stride)
        pairs = dict.fromkeys([configured, (training.context_length, None), *PAPER_OVERHEAD])
        runs = {"cross entropy": replace(training, short_pass=False)}
        if self.experiment.objective != "CrossEntropy":
            runs[self.experiment.objective] = training
        return {
            "model": _describe_model(self.experiment.name, self.shape),
            "gpu": {**self.gpu._asdict(), "count": training.gpus},
            "run": {**run, "rows_per_step": round(training.gpus * self.rows_per_gpu)},
            "notes": list(self.experiment.notes),
            "training": [self._compare_step(*pair) for pair in pairs if sum(filter(None, pair)) < training.tokens],
            "cost": {name: self._plan_cost(settings) for name, settings in runs.items()},
            "memory": self._describe_memory(self.memory),
            "scoring": self._plan_scoring(),
            "rates": self.rates._asdict(),
        }

    def plan_step(self) -> PlannedStep:
        """Return the estimates that a run compares itself with."""
        training, rows = self.training, self.training.gpus * self.rows_per_gpu
        flops, _, seconds = self._estimate_step(training)
        repeated = self.cross_entropy.total - necessary_flops(self.shape, training.tokens).total
        return PlannedStep(
            tokens=round(rows * training.tokens),
            flops=rows * (flops.total - repeated),
            peak_flops=training.gpus * self.gpu.tflops * 1e12,
            seconds=seconds,
            memory=self.memory.peak / GIB,
        )

    def _compare_step(self, context_length: int, stride: int | None) -> dict[str, Any]:
        """Compare LongCE with these windows, or with a sliding one if ``stride`` is None, to cross entropy."""
        settings, sliding = self.training, stride is None
        pair = (context_length, settings.stride if stride is None else stride)
        training = replace(settings, context_length=pair[0], stride=pair[1], short_pass=True, sliding=sliding)
        flops, _, seconds = self._estimate_step(training)
        ce = self.cross_entropy.total
        return {
            "context_length": context_length,
            "stride": stride,
            "configured": (*pair, sliding) == (settings.context_length, settings.stride, settings.sliding),
            "ce_tflop": ce / 1e12,
            "short_pass_tflop": (flops.total - ce) / 1e12,
            "overhead": flops.total / ce - 1,
            "longce_step_seconds": seconds,
            "paper_overhead": None if sliding or training.tokens != PAPER_TOKENS else PAPER_OVERHEAD.get(pair),
        }

    def _plan_cost(self, training: Training) -> dict[str, Any]:
        _, transfers, step = self._estimate_step(training)
        steps, tokens = self.experiment.max_steps, round(training.gpus * self.rows_per_gpu * training.tokens)
        hours = None if steps is None else step.times(steps / 3600)
        return {
            "step_seconds": step,
            "tokens_per_second": Range(tokens / step.high, tokens / step.low),
            "transfer_seconds": transfers,
            "hours": hours,
            "gpu_hours": hours and hours.times(training.gpus),
            "price": hours and self.price and hours.times(training.gpus * self.price),
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

    def _measure_model(self, config: PreTrainedConfig, *options: Any) -> tuple[ModelShape, ActivationBytes]:
        """Return the sizes of a model and of its activations; cached, because this takes a second."""
        key = repr((id(config), options))
        if key not in self._models:
            activations = ActivationBytes(config, *options)
            self._models[key] = ModelShape.of(config, activations.lora), activations
        return self._models[key]

    def _plan_scoring(self) -> dict[str, Any]:
        """Estimate LongPPL of one document that is as long as a training sequence."""
        evaluator, tokens, config = self.experiment.evaluator, self.training.tokens, self.experiment.config
        settings, dtype = evaluator or self.training, stored_dtype(config)
        pair = (settings.context_length, settings.stride)
        model, activations = self._measure_model(config, dtype)
        flops = {
            "perplexity": forward_flops(model, tokens, tokens - 1),
            "evaluator == model": scoring_flops(model, model, tokens, *pair, shared_pass=True),
        }
        memory = {"model": scoring_memory(model, activations, tokens, dtype)}
        result: dict[str, Any] = {"document_tokens": tokens, "context_length": pair[0], "stride": pair[1]}
        if evaluator is not None:
            shape, activations = self._measure_model(evaluator.config, evaluator.dtype)
            flops["with evaluator"] = scoring_flops(shape, model, tokens, *pair)
            # The evaluator alone, and during a fit, next to the memory that training keeps.
            beside = self.memory.lasting | {"evaluator": float(shape.parameters * evaluator.dtype.itemsize)}
            for name, lasting in (("evaluator", None), ("evaluator within a fit", beside)):
                sizes = (shape, activations, tokens, evaluator.dtype)
                memory[name] = scoring_memory(*sizes, windows=pair, lasting=lasting)
            result["evaluator"] = _describe_model(evaluator.name, shape)
        one_pass = forward_flops(model, tokens, tokens).total
        result["passes"] = [
            {
                "pass": name,
                "tflop": work.total / 1e12,
                "seconds": self.rates.seconds(work, self.gpu),
                "overhead": None if name == "perplexity" else work.total / one_pass - 1,
            }
            for name, work in flops.items()
        ]
        return {**result, "memory": {name: self._describe_memory(each) for name, each in memory.items()}}


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
    except ValueError as error:
        _log.info("Without MFU and planned time: %s", error)
        return None


def _in_gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}


def _describe_model(name: str, shape: ModelShape) -> dict[str, Any]:
    sizes = {"parameters": shape.parameters, "trained_parameters": shape.trained, "layers": shape.layers}
    return {"name": name, "model_type": shape.name, **sizes, "vocabulary": shape.vocabulary}
