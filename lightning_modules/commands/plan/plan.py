"""FLOPs, time, memory and cost of an experiment on given GPUs, before anybody rents one."""

import math
from dataclasses import asdict, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch

from lightning_modules.commands.plan.activations import ActivationBytes, activation_bytes
from lightning_modules.commands.plan.flops import (
    Checkpointing,
    authors_scoring_flops,
    authors_short_pass_flops,
    ce_step_flops,
    forward_flops,
    longce_step_flops,
    scoring_floor_flops,
    scoring_flops,
    short_pass_flops,
)
from lightning_modules.commands.plan.hardware import GPU, Efficiency, seconds
from lightning_modules.commands.plan.memory import (
    CONTEXT_GIB,
    FRAGMENTATION,
    GIB,
    Memory,
    Training,
    lasting_memory,
    scoring_memory,
    training_memory,
)
from lightning_modules.commands.plan.remedies import Change, possible_changes
from lightning_modules.commands.plan.settings import Experiment, stored_dtype
from lightning_modules.commands.plan.shapes import ModelShape

# Table 7 of Fang et al. (2025): extra wall-clock time of LongCE over CE; Llama-2-7B, rows of 32k tokens.
PAPER_OVERHEAD = {(4096, 1024): 0.79, (1024, 1024): 0.43, (4096, 4096): 0.36, (4096, 512): 1.50}
PAPER_TOKENS = 32_768
# Table 12: extra time of LongPPL with Llama-3.1-8B as evaluator over a pass of Mistral-7B.
PAPER_SCORING_OVERHEAD = 3.04


class Planner:
    """Computes the plan of one experiment.

    Args:
        experiment: What is to be run.
        gpu: The card.
        price_per_gpu_hour: In any currency; None if it is not known.
        efficiency: Shares of the peak rate that are assumed to be reached.
    """

    def __init__(
        self,
        experiment: Experiment,
        gpu: GPU,
        price_per_gpu_hour: float | None = None,
        efficiency: Efficiency = Efficiency(),  # noqa: B008, it is frozen
    ) -> None:
        if price_per_gpu_hour is not None and not 0 <= price_per_gpu_hour < float("inf"):
            raise ValueError(f"`price_per_gpu_hour` must be 0 or more, got {price_per_gpu_hour}.")
        self.experiment, self.gpu = experiment, gpu
        self.price, self.efficiency = price_per_gpu_hour, efficiency
        self.training = experiment.training
        self.shape = ModelShape.of(experiment.config, experiment.lora)
        self._shapes = {self._lora_key(experiment.lora): self.shape}
        self._activations: dict[Any, ActivationBytes] = {}

    def plan(self) -> dict[str, Any]:
        """Everything as plain numbers: TFLOP are 1e12 operations, times seconds, memory GiB, overheads shares."""
        return {
            "model": self._model(self.experiment.name, self.shape),
            "gpu": {**asdict(self.gpu), "count": self.training.gpus},
            "run": self._run(),
            "assumed": {**asdict(self.efficiency), "context_gib": CONTEXT_GIB, "fragmentation": FRAGMENTATION},
            "notes": list(self.experiment.notes),
            "training": [self._pair(*pair) for pair in self._pairs()],
            "cost": self._cost(),
            "memory": self._memory(),
            "scoring": self._scoring(),
        }

    def _model(self, name: str, shape: ModelShape) -> dict[str, Any]:
        return {
            "name": name,
            "model_type": shape.name,
            "parameters": shape.parameters,
            "trained_parameters": shape.trained,
            "weights_per_token": shape.layer_weights + shape.head_weights,
            "layers": shape.layers,
            "vocabulary": shape.vocabulary,
        }

    def _run(self) -> dict[str, Any]:
        training, experiment = self.training, self.experiment
        return {
            "objective": experiment.objective,
            "context_length": training.context_length,
            "stride": training.stride,
            "short_pass": training.short_pass,
            "short_window_share": experiment.window_share,
            "stored_influence": experiment.stored_influence,
            "row_tokens": training.tokens,
            "rows_per_step": round(training.gpus * self._rows_per_gpu),
            "sequence_parallel_size": training.sequence_parallel_size,
            "max_steps": experiment.max_steps,
            "precision": experiment.precision,
            "weights": str(training.dtype).removeprefix("torch."),
            "checkpointing": training.checkpointing,
            "optimizer": experiment.optimizer,
            "strategy": training.sharding.name,
            "lora": experiment.lora,
        }

    # -------------------------------------------------------------------------------------------------------- training

    def _pairs(self) -> list[tuple[int, int]]:
        """The configured (K, d) first, then those of the paper, where they fit the row."""
        configured = (self.training.context_length, self.training.stride)
        pairs = dict.fromkeys([configured, *PAPER_OVERHEAD])
        return [pair for pair in pairs if sum(pair) < self.training.tokens]

    def _pair(self, context_length: int, stride: int) -> dict[str, Any]:
        tokens, checkpointing = self.training.tokens, self.training.checkpointing
        ce = ce_step_flops(self.shape, tokens, checkpointing)
        short = short_pass_flops(self.shape, tokens, context_length, stride) * self.experiment.window_share
        authors_ce = ce_step_flops(self.shape, tokens, _authors(checkpointing))
        authors = authors_short_pass_flops(self.shape, tokens, context_length, stride)
        rows = self._rows_per_gpu
        return {
            "context_length": context_length,
            "stride": stride,
            "configured": (context_length, stride) == (self.training.context_length, self.training.stride),
            "ce_tflop": ce.total / 1e12,
            "short_pass_tflop": short.total / 1e12,
            "overhead": short.total / ce.total,
            "authors_short_pass_tflop": authors.total / 1e12,
            "authors_overhead": authors.total / authors_ce.total,
            "step_to_authors": (ce + short).total / (authors_ce + authors).total,
            "ce_step_seconds": rows * self._seconds(ce),
            "longce_step_seconds": rows * self._seconds(ce + short),
            "paper_overhead": PAPER_OVERHEAD.get((context_length, stride)) if tokens == PAPER_TOKENS else None,
        }

    @cached_property
    def _rows_per_gpu(self) -> float:
        """In a step; a part of one where GPUs share rows."""
        return self.experiment.accumulated * self.training.rows / self.training.sequence_parallel_size

    def _seconds(self, flops: Any) -> float:
        return seconds(flops, self.gpu, self.efficiency)

    def _cost(self) -> dict[str, Any]:
        """Of the configured objective, and of cross entropy beside it."""
        training, steps = self.training, self.experiment.max_steps
        flops = ce_step_flops(self.shape, training.tokens, training.checkpointing)
        result = {"cross entropy": self._rows_per_gpu * self._seconds(flops)}
        if training.short_pass:
            sizes = (training.tokens, training.context_length, training.stride, training.checkpointing)
            flops = longce_step_flops(self.shape, *sizes, window_share=self.experiment.window_share)
        result[self.experiment.objective] = self._rows_per_gpu * self._seconds(flops)
        tokens = round(training.gpus * self._rows_per_gpu * training.tokens)
        return {name: self._bill(step, tokens, steps) for name, step in result.items() if name != "CrossEntropy"}

    def _bill(self, step: float, tokens: int, steps: int | None) -> dict[str, Any]:
        hours = None if steps is None else steps * step / 3600
        gpu_hours = None if hours is None else hours * self.training.gpus
        return {
            "step_seconds": step,
            "tokens_per_second": tokens / step,
            "hours": hours,
            "gpu_hours": gpu_hours,
            "price": None if gpu_hours is None or self.price is None else gpu_hours * self.price,
            "price_per_step": None if self.price is None else self.price * step * self.training.gpus / 3600,
        }

    # ---------------------------------------------------------------------------------------------------------- memory

    def _memory(self) -> dict[str, Any]:
        memory = self._training_memory(self.training, self.experiment.lora)
        result = self._described(memory)
        result["remedies"] = [] if result["fits"] else self._remedies()
        return result

    def _described(self, memory: Memory) -> dict[str, Any]:
        return {
            "lasting": {name: size / GIB for name, size in memory.lasting.items()},
            "phases": {
                phase: {name: size / GIB for name, size in parts.items()} for phase, parts in memory.phases.items()
            },
            "largest_phase": memory.largest_phase,
            "peak": memory.peak / GIB,
            "allowance": memory.allowance / GIB,
            "needed": memory.needed / GIB,
            "fits": memory.needed <= self.gpu.memory * GIB,
        }

    def _training_memory(self, training: Training, lora: dict[str, Any] | None) -> Memory:
        key = self._lora_key(lora)
        if key not in self._shapes:
            self._shapes[key] = ModelShape.of(self.experiment.config, lora)
        activations = self._activation_bytes(self.experiment.config, training.dtype, training.autocast, lora)
        return training_memory(self._shapes[key], activations, training)

    def _activation_bytes(
        self, config: Any, dtype: torch.dtype, autocast: torch.dtype | None = None, lora: dict[str, Any] | None = None
    ) -> ActivationBytes:
        key = (id(config), dtype, autocast, self._lora_key(lora))
        if key not in self._activations:
            self._activations[key] = activation_bytes(config, dtype=dtype, autocast=autocast, lora=lora)
        return self._activations[key]

    @staticmethod
    def _lora_key(lora: dict[str, Any] | None) -> str:
        return repr(lora)

    def _remedies(self) -> list[dict[str, Any]]:
        """The smallest single changes of each kind that make it fit, and pairs of changes neither of which does."""
        tried = [
            (change, *self._with(change)) for change in possible_changes(self.training, self.experiment.lora, self.gpu)
        ]
        weak = [change for change, _, fits in tried if not fits and change.kind != "gpu"]
        pairs = [pair for pair in combinations(weak, 2) if pair[0].goes_with(pair[1])]
        together = [((change,), memory, fits) for change, memory, fits in tried]
        fitting: dict[tuple[str, ...], dict[str, Any]] = {}
        for changes, memory, fits in [*together, *((pair, *self._with(*pair)) for pair in pairs)]:
            if fits:
                remedy = {"changes": [change.text for change in changes], "needed": memory.needed / GIB}
                fitting.setdefault(tuple(change.kind for change in changes), remedy)
        return list(fitting.values())

    def _with(self, *changes: Change) -> tuple[Memory, bool]:
        training, lora, gpu = self.training, self.experiment.lora, self.gpu
        for change in changes:
            training, lora, gpu = replace(training, **change.training), change.lora or lora, change.gpu or gpu
        memory = self._training_memory(training, lora)
        return memory, memory.needed <= gpu.memory * GIB

    # --------------------------------------------------------------------------------------------------------- scoring

    def _scoring(self) -> dict[str, Any]:
        """Of one document as long as a row."""
        judge, tokens = self.experiment.judge, self.training.tokens
        context_length, stride = (
            (judge.context_length, judge.stride) if judge else (self.training.context_length, self.training.stride)
        )
        base = ModelShape.of(self.experiment.config)
        result: dict[str, Any] = {
            "document_tokens": tokens,
            "context_length": context_length,
            "stride": stride,
            "paper_overhead": PAPER_SCORING_OVERHEAD,
            "plain_pass": self._work(forward_flops(base, tokens, tokens - 1)),
            "evaluator_is_model": self._judged(base, base, context_length, stride, shared_pass=True),
            "model_memory": self._scoring_memory(self.experiment.config, base),
        }
        if judge is not None:
            evaluator = ModelShape.of(judge.config)
            windows = (context_length, stride)
            result["evaluator"] = self._model(judge.name, evaluator)
            result["with_evaluator"] = self._judged(evaluator, base, context_length, stride, shared_pass=False)
            result["evaluator_memory"] = self._scoring_memory(judge.config, evaluator, windows)
            result["validation"] = self._validation(
                result["with_evaluator"]["seconds"], result["plain_pass"]["seconds"]
            )
            result["validation_memory"] = self._validation_memory(judge.config, evaluator, windows)
        return result

    def _validation(self, first: float, later: float) -> dict[str, Any] | None:
        """Time of a validation: with the evaluator once, and then with its stored scores."""
        documents = self.experiment.validation_documents
        if not documents:
            return None
        rounds = math.ceil(documents / self.training.gpus)
        return {"documents": documents, "first_seconds": rounds * first, "later_seconds": rounds * later}

    def _judged(
        self, evaluator: ModelShape, model: ModelShape, context_length: int, stride: int, *, shared_pass: bool
    ) -> dict[str, Any]:
        tokens = self.training.tokens
        settings = (evaluator, model, tokens, context_length, stride)
        authors, plain = authors_scoring_flops(*settings), forward_flops(model, tokens, tokens)
        ours = scoring_flops(*settings, shared_pass=shared_pass)
        return {
            **self._work(ours),
            "floor_tflop": scoring_floor_flops(*settings, shared_pass=shared_pass).total / 1e12,
            "authors_tflop": authors.total / 1e12,
            "overhead": ours.total / plain.total - 1,
            "authors_overhead": authors.total / plain.total - 1,
        }

    def _work(self, flops: Any) -> dict[str, float]:
        return {"tflop": flops.total / 1e12, "seconds": self._seconds(flops)}

    def _scoring_memory(self, config: Any, shape: ModelShape, windows: tuple[int, int] | None = None) -> dict[str, Any]:
        dtype = self._judge_dtype if windows else stored_dtype(config)
        activations = self._activation_bytes(config, dtype)
        return self._described(scoring_memory(shape, activations, self.training.tokens, dtype, windows=windows))

    @property
    def _judge_dtype(self) -> torch.dtype:
        assert self.experiment.judge is not None
        return self.experiment.judge.dtype

    def _validation_memory(self, config: Any, evaluator: ModelShape, windows: tuple[int, int]) -> dict[str, Any]:
        """While the evaluator scores during a fit: what lasts of the training is there, too."""
        dtype = self._judge_dtype
        lasting = lasting_memory(self.shape, self.training)
        lasting["evaluator"] = float(evaluator.parameters * dtype.itemsize)
        activations = self._activation_bytes(config, dtype)
        memory = scoring_memory(evaluator, activations, self.training.tokens, dtype, windows=windows, lasting=lasting)
        return self._described(memory)


def _authors(checkpointing: Checkpointing) -> Checkpointing:
    """Their code knows full checkpointing only."""
    return "full" if checkpointing == "selective" else checkpointing
