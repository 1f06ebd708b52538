"""Estimate FLOPs, time, memory and cost of an experiment on given GPUs."""

from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from lightning_modules.commands.plan.activations import ActivationBytes
from lightning_modules.commands.plan.flops import Flops, ce_step_flops, forward_flops, scoring_flops, short_pass_flops
from lightning_modules.commands.plan.hardware import GPU, GPUS, Range, Rates
from lightning_modules.commands.plan.memory import (
    CONTEXT_GIB,
    FRAGMENTATION,
    GIB,
    QUANTIZED_BYTES,
    Memory,
    Training,
    lasting_memory,
    scoring_memory,
    training_memory,
)
from lightning_modules.commands.plan.settings import Experiment, stored_dtype
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.commands.plan.transfers import BANDWIDTH, HOST_MEMORY, WAITING, transfer_seconds

# Table 7 of Fang et al. (2025): extra wall-clock time of LongCE over CE; Llama-2-7B, sequences of 32k tokens.
PAPER_OVERHEAD = {(4096, 1024): 0.79, (1024, 1024): 0.43, (4096, 4096): 0.36, (4096, 512): 1.50}
PAPER_TOKENS = 32_768

LORA = {"r": 8, "target_modules": "all-linear"}
FSDP = "configs/strategies/fsdp.yaml: FSDP2"
OFFLOAD = "trainer.strategy: FullyShardedStrategy with offload: true"


class Planner:
    """Planner of one experiment on one kind of GPU; the price per GPU hour is in any currency."""

    def __init__(self, experiment: Experiment, gpu: GPU, rates: Rates, price_per_gpu_hour: float | None = None) -> None:
        self.experiment, self.gpu, self.rates, self.price = experiment, gpu, rates, price_per_gpu_hour
        self.training = training = experiment.training
        self._models: dict[str, tuple[ModelShape, ActivationBytes]] = {}
        self.shape, self.activations = self._trained_model(training, experiment.lora)
        self.cross_entropy = ce_step_flops(self.shape, training.tokens, training.checkpointing)
        # Sequences per step and GPU; a fraction if GPUs split sequences.
        self.rows_per_gpu = experiment.accumulated * training.rows / training.sequence_parallel_size

    def plan(self) -> dict[str, Any]:
        """Return all estimates as plain numbers: TFLOP are 1e12 operations, memory is in GiB, ranges are pairs."""
        training = self.training
        # The configured (K, d), then those of the paper that fit into the sequence.
        pairs = dict.fromkeys([(training.context_length, training.stride), *PAPER_OVERHEAD])
        names = ("objective", "window_share", "max_steps", "precision", "optimizer", "lora")
        settings = {name: getattr(self.experiment, name) for name in names} | asdict(training)
        run = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in settings.items()}
        return {
            "model": _describe_model(self.experiment.name, self.shape),
            "gpu": {**self.gpu._asdict(), "count": training.gpus},
            "run": {**run, "rows_per_step": round(training.gpus * self.rows_per_gpu)},
            "notes": list(self.experiment.notes),
            "training": [self._plan_step(*pair) for pair in pairs if sum(pair) < training.tokens],
            "cost": self._plan_cost(),
            "memory": self._plan_memory(),
            "scoring": self._plan_scoring(),
            "rates": self.rates._asdict(),
            "assumed": {
                "bandwidth": BANDWIDTH,
                "host_memory": HOST_MEMORY,
                "context_gib": CONTEXT_GIB,
                "fragmentation": FRAGMENTATION,
            },
        }

    # -------------------------------------------------------------------------------------------------------- training

    def _plan_step(self, context_length: int, stride: int) -> dict[str, Any]:
        """Compare LongCE with these windows to cross entropy."""
        training = replace(self.training, context_length=context_length, stride=stride, short_pass=True)
        flops, _, seconds = self._estimate_step(training)
        ce, pair = self.cross_entropy.total, (context_length, stride)
        return {
            "context_length": context_length,
            "stride": stride,
            "configured": pair == (self.training.context_length, self.training.stride),
            "ce_tflop": ce / 1e12,
            "short_pass_tflop": (flops.total - ce) / 1e12,
            "overhead": flops.total / ce - 1,
            "longce_step_seconds": seconds,
            "paper_overhead": PAPER_OVERHEAD.get(pair) if training.tokens == PAPER_TOKENS else None,
        }

    def _estimate_step(self, training: Training) -> tuple[Flops, dict[str, float], Range]:
        """Return the FLOPs of a sequence, and the transfers and the time of an optimizer step.

        Computation hides the transfers that it does not wait for, or hides none.
        """
        flops = self.cross_entropy
        if training.short_pass:
            short = short_pass_flops(self.shape, training.tokens, training.context_length, training.stride)
            flops += short * self.experiment.window_share
        transfers = transfer_seconds(
            self.shape, self.activations, training, self.gpu, batches=self.experiment.accumulated
        )
        compute = self.rates.seconds(flops, self.gpu).times(self.rows_per_gpu)
        waiting, total = sum(transfers.get(name, 0.0) for name in WAITING), sum(transfers.values())
        return flops, transfers, Range(max(compute.low, total - waiting) + waiting, compute.high + total)

    def _plan_cost(self) -> dict[str, Any]:
        """Return the cost of cross entropy, and of the configured objective if it is another one."""
        runs = {"cross entropy": replace(self.training, short_pass=False)}
        if self.experiment.objective != "CrossEntropy":
            runs[self.experiment.objective] = self.training
        return {name: self._describe_cost(training) for name, training in runs.items()}

    def _describe_cost(self, training: Training) -> dict[str, Any]:
        _, transfers, step = self._estimate_step(training)
        gpus, steps = training.gpus, self.experiment.max_steps
        tokens = round(gpus * self.rows_per_gpu * training.tokens)
        hours = None if steps is None else step.times(steps / 3600)
        price = None if self.price is None else self.price * gpus
        return {
            "step_seconds": step,
            "tokens_per_second": Range(tokens / step.high, tokens / step.low),
            "transfer_seconds": transfers,
            "hours": hours,
            "gpu_hours": hours and hours.times(gpus),
            "price": hours and price and hours.times(price),
            "price_per_step": price and step.times(price / 3600),
        }

    # ---------------------------------------------------------------------------------------------------------- memory

    def _plan_memory(self) -> dict[str, Any]:
        training, lora = self.training, self.experiment.lora
        result = self._describe_memory(training_memory(self.shape, self.activations, training))
        if not result["fits"]:
            # Suggest the smallest single change of each kind that makes the run fit.
            fitting: dict[str, dict[str, Any]] = {}
            for kind, text, change, adapters, gpu in possible_changes(training, lora, self.gpu):
                changed = replace(training, **change)
                needed = training_memory(*self._trained_model(changed, adapters or lora), changed).needed / GIB
                if needed <= (gpu or self.gpu).memory:
                    fitting.setdefault(kind, {"change": text, "needed": needed})
            result["suggestions"] = list(fitting.values())
        return result

    def _describe_memory(self, memory: Memory) -> dict[str, Any]:
        def in_gib(parts: dict[str, float]) -> dict[str, float]:
            return {name: size / GIB for name, size in parts.items()}

        return {
            "fits": memory.needed <= self.gpu.memory * GIB,
            "needed": memory.needed / GIB,
            "available": self.gpu.memory,
            "peak": memory.peak / GIB,
            "largest_phase": memory.largest_phase,
            "lasting": in_gib(memory.lasting),
            "phases": {phase: in_gib(parts) for phase, parts in memory.phases.items()},
            "main_memory": memory.host / GIB,
        }

    def _trained_model(self, training: Training, lora: dict[str, Any] | None) -> tuple[ModelShape, ActivationBytes]:
        numerics = (training.dtype, training.autocast, training.bfloat16_residual)
        return self._measure_model(self.experiment.config, *numerics, lora)

    def _measure_model(self, config: PreTrainedConfig, *options: Any) -> tuple[ModelShape, ActivationBytes]:
        """Return the sizes of a model and of its activations; cached, because this takes a second."""
        key = repr((id(config), options))
        if key not in self._models:
            activations = ActivationBytes(config, *options)
            self._models[key] = ModelShape.of(config, activations.lora), activations
        return self._models[key]

    # --------------------------------------------------------------------------------------------------------- scoring

    def _plan_scoring(self) -> dict[str, Any]:
        """Estimate LongPPL of one document that is as long as a training sequence."""
        evaluator, tokens, config = self.experiment.evaluator, self.training.tokens, self.experiment.config
        settings, dtype = evaluator or self.training, stored_dtype(config)
        pair = (settings.context_length, settings.stride)
        model, activations = self._measure_model(config, dtype)
        shared = scoring_flops(model, model, tokens, *pair, shared_pass=True)
        passes = [
            {**self._describe_pass("perplexity", model, forward_flops(model, tokens, tokens - 1)), "overhead": None},
            self._describe_pass("evaluator == model", model, shared),
        ]
        memory = {"model": scoring_memory(model, activations, tokens, dtype)}
        result: dict[str, Any] = {"document_tokens": tokens, "passes": passes}
        result |= {"context_length": pair[0], "stride": pair[1]}
        if evaluator is not None:
            shape, activations = self._measure_model(evaluator.config, evaluator.dtype)
            passes.append(self._describe_pass("with evaluator", model, scoring_flops(shape, model, tokens, *pair)))
            # The evaluator alone, and during a fit, next to the memory that training keeps.
            beside = lasting_memory(self.shape, self.training)
            beside["evaluator"] = float(shape.parameters * evaluator.dtype.itemsize)
            for name, lasting in (("evaluator", None), ("evaluator within a fit", beside)):
                sizes = (shape, activations, tokens, evaluator.dtype)
                memory[name] = scoring_memory(*sizes, windows=pair, lasting=lasting)
            result["evaluator"] = _describe_model(evaluator.name, shape)
        return {**result, "memory": {name: self._describe_memory(each) for name, each in memory.items()}}

    def _describe_pass(self, name: str, model: ModelShape, flops: Flops) -> dict[str, Any]:
        """Describe a way to score a document, compared to one pass of the model over all its tokens."""
        plain = forward_flops(model, self.training.tokens, self.training.tokens)
        work = {"tflop": flops.total / 1e12, "seconds": self.rates.seconds(flops, self.gpu)}
        return {"pass": name, **work, "overhead": flops.total / plain.total - 1}


def _describe_model(name: str, shape: ModelShape) -> dict[str, Any]:
    return {
        "name": name,
        "model_type": shape.name,
        "parameters": shape.parameters,
        "trained_parameters": shape.trained,
        "layers": shape.layers,
        "vocabulary": shape.vocabulary,
    }


def possible_changes(training: Training, lora: dict[str, Any] | None, gpu: GPU) -> list[tuple[Any, ...]]:
    """Return the changes to try as kind, text, changed attributes of `Training`, LoRA and GPU.

    Those that do not affect the result come first, a larger GPU last. Of each kind, the first that fits is enough.
    """
    frozen, view = lora is not None, "trainer.strategy: DDPStrategy with gradient_as_bucket_view: true"
    full, quantizable = training.checkpointing == "full", frozen and not (training.quantized or training.sharded)
    half = "model.dtype: bfloat16 (of the frozen weights)"
    quantization = "model.quantization: {load_in_4bit: true} (of the frozen weights)"
    sharded = {"sharded": True, "gradient_copy": False}
    shards = training.gpus if training.sharded else 1
    tokens = (training.tokens // 2, training.tokens // 4)
    shortest = training.context_length + training.stride if training.short_pass else 0
    candidates: list[tuple[Any, ...]] = [
        (training.step_copy, "optimizer", "model.optimizer.init_args.foreach: false", {"step_copy": False}),
        (training.gradient_copy, "buckets", view, {"gradient_copy": False}),
        (training.rows > 1, "rows", "data.batch_size: 1, with more accumulate_grad_batches", {"rows": 1}),
        (not full, "checkpointing", "model.gradient_checkpointing: true", {"checkpointing": "full"}),
        *(
            (n > shards, "sharding", f"{FSDP} over {n} GPUs", {**sharded, "gpus": n})
            for n in (training.gpus, 2 * training.gpus, 4 * training.gpus)
        ),
        # Trained weights stay in float32: in bfloat16 the small steps of fine-tuning round to nothing.
        (training.sharded and not training.offload, "offload", OFFLOAD, {"offload": True}),
        (not frozen, "lora", "model.lora: {r: 8, target_modules: all-linear}", {}, LORA),
        (frozen and training.dtype.itemsize > 2, "dtype", half, {"dtype": torch.bfloat16}),
        (quantizable, "quantization", quantization, {"quantized": QUANTIZED_BYTES[4]}),
        *((shortest < count, "tokens", f"data.sequence_length: {count}", {"tokens": count}) for count in tokens),
        *(
            (card.memory > gpu.memory, "gpu", f"a GPU with {card.memory:g} GiB: {card.name}", {}, None, card)
            for card in sorted(GPUS.values(), key=lambda card: card.memory)
        ),
    ]
    return [(*change, None, None)[:5] for possible, *change in candidates if possible]
