"""Peak memory of one GPU, part by part."""

import math
from dataclasses import dataclass

import torch

from lightning_modules.commands.plan.activations import ActivationBytes
from lightning_modules.commands.plan.flops import Checkpointing
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.functional import short_context_windows
from lightning_modules.models.short_context import WINDOW_TOKENS_PER_PASS

GIB = 2.0**30
QUANTIZED_BYTES = {4: 0.5 + 1 / 64 + 4 / (64 * 256), 8: 1.0}
"""Bytes of a quantised weight: NF4 in blocks of 64 with a byte each, which share a float32 in blocks of 256; and int8,
whose constants are one per row."""
HEAD_ROWS = 2048
"""Rows of logits that exist at the same time on an accelerator."""
CONTEXT_GIB = 1.0
FRAGMENTATION = 0.05
"""Assumed: CUDA context, libraries and communication buffers, and the share of the rest that the allocator wastes."""


@dataclass(frozen=True)
class Training:
    """The settings of a training run that its memory depends on.

    Attributes:
        tokens: Tokens of a sequence.
        rows: Sequences of a micro-batch.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one window.
        short_pass: Whether short contexts are computed.
        dtype: Type of the weights.
        quantized: Bytes of each weight of a linear layer but the head, if those are quantized.
        autocast: Type of the matrix products in mixed precision; None without.
        checkpointing: What the backward pass computes again.
        moments: Numbers that the optimizer keeps for each trained weight, in the type of the weights.
        step_copy: Whether the optimizer's step makes a temporary as large as the weights, as torch's `foreach` does.
        sharded: Whether weights, gradients and optimizer state are divided among the GPUs (FSDP2).
        gradient_copy: Whether the gradients exist twice, in the buckets of DDP.
        gpus: How many there are.
        sequence_parallel_size: How many of them share each sequence.
    """

    tokens: int
    rows: int = 1
    context_length: int = 4096
    stride: int = 1024
    short_pass: bool = True
    dtype: torch.dtype = torch.float32
    quantized: float | None = None
    autocast: torch.dtype | None = torch.bfloat16
    checkpointing: Checkpointing = "none"
    moments: float = 2.0
    step_copy: bool = True
    sharded: bool = False
    gradient_copy: bool = False
    gpus: int = 1
    sequence_parallel_size: int = 1

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in matrix products."""
        return (self.autocast or self.dtype).itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        lasting: Parts that are there all the time.
        phases: For each phase its parts; phases follow one another, so that only the largest counts.
    """

    lasting: dict[str, float]
    phases: dict[str, dict[str, float]]

    @property
    def largest_phase(self) -> str:
        """Name of the phase with the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> float:
        """Bytes of tensors at the peak."""
        return sum(self.lasting.values()) + sum(self.phases[self.largest_phase].values())

    @property
    def needed(self) -> float:
        """Bytes that the card must have, with the CUDA context and fragmentation."""
        return (1 + FRAGMENTATION) * self.peak + CONTEXT_GIB * GIB


def training_memory(shape: ModelShape, activations: ActivationBytes, training: Training) -> Memory:
    """Return the peak of a training step.

    Gradients count as a whole: with accumulation they exist from the second micro-batch on.
    """
    rows = training.rows * training.tokens / training.sequence_parallel_size
    kept = {
        "activations kept for the backward pass": rows * shape.layers * _kept(activations, training.checkpointing),
        "last hidden states, predictors and their gradient": 3.0 * rows * activations.hidden,
    }
    again = activations.layer_backward - (activations.layer if training.checkpointing == "none" else 0.0)
    accumulated = (4.0 + training.dtype.itemsize) * shape.head_weights if shape.head_trained else 0.0
    chunk = HEAD_ROWS * shape.vocabulary * _logit_bytes(training.compute_bytes, backward=True)
    every, one = _autocast_copies(shape, training)
    phases = {
        "head": {**kept, **every, "head: a chunk of logits": chunk, "head: sum of its gradient": accumulated},
        "backward pass": {
            **kept,
            **(every if training.checkpointing == "none" else one),
            "one layer's backward pass": rows * max(again, 0.0),
        },
    }
    if training.step_copy:
        phases["optimizer step"] = {"temporary of the optimizer": _optimizer(shape, training, 1.0)}
    if training.short_pass:
        phases["short windows"] = {**one, **_short_windows(shape, activations, training)}
    return Memory(lasting_memory(shape, training), phases)


def lasting_memory(shape: ModelShape, training: Training) -> dict[str, float]:
    """Return weights, gradients and optimizer state on one GPU, in bytes."""
    size, shards = training.dtype.itemsize, training.gpus if training.sharded else 1
    trained = _trained_bytes(shape, training)
    weights = float(shape.parameters * size + shape.trained * (trained - size))
    if training.quantized is not None:
        weights -= shape.quantizable * (size - training.quantized)
    gradients = float(shape.trained * trained)
    parts = {"weights": weights / shards, "gradients": gradients / shards}
    if training.sharded:
        gathered = 2 * shape.largest_layer + shape.head_weights * (1 if shape.tied else 2)
        parts["gathered weights (two layers, head, embedding)"] = float(gathered * training.compute_bytes)
    if training.gradient_copy:
        parts["gradient buckets of DDP"] = gradients
    parts["optimizer"] = _optimizer(shape, training, training.moments)
    return parts


def scoring_memory(
    shape: ModelShape,
    activations: ActivationBytes,
    tokens: int,
    dtype: torch.dtype,
    *,
    windows: tuple[int, int] | None = None,
    lasting: dict[str, float] | None = None,
) -> Memory:
    """Return the peak of scoring one document without gradients.

    Args:
        shape: The model.
        activations: Activations of this model in this precision.
        tokens: Length of the document.
        dtype: Type of the weights.
        windows: ``(K, d)`` of short contexts, if they are scored.
        lasting: What else is on the GPU, in bytes.
    """
    weights = {"weights": float(shape.parameters * dtype.itemsize)} if lasting is None else lasting
    chunk = min(HEAD_ROWS, tokens) * shape.vocabulary * _logit_bytes(dtype.itemsize, backward=False)
    phases = {
        "long pass": {"one layer of the document": tokens * activations.forward},
        "head": {"last hidden states, twice": 2.0 * tokens * activations.hidden, "head: a chunk of logits": chunk},
    }
    if windows is not None:
        together = window_tokens(tokens, 1, *windows)
        phases["short windows"] = {"one layer of the windows": together * activations.forward}
    return Memory(weights, phases)


def window_tokens(tokens: int, rows: int, context_length: int, stride: int) -> int:
    """Return the tokens of the short windows that share a forward pass on an accelerator."""
    windows = short_context_windows([0, tokens], context_length=context_length, stride=stride)
    together = max(1, WINDOW_TOKENS_PER_PASS // (context_length + stride))
    return min(together, rows * len(windows)) * (context_length + stride)


def _trained_bytes(shape: ModelShape, training: Training) -> int:
    """Return the bytes of a trained weight: beside frozen weights it is float32 in mixed precision."""
    size = training.dtype.itemsize
    return size if training.autocast is None or shape.trained == shape.parameters else max(size, 4)


def _autocast_copies(shape: ModelShape, training: Training) -> tuple[dict[str, float], dict[str, float]]:
    """Return the copies of weights in the type of matrix products: kept by the forward pass, and of one layer.

    Copies are freed after their use, unless the backward pass needs them: without checkpointing it needs all. Divided
    weights are gathered in that type instead.
    """
    if training.autocast is None or training.sharded:
        return {}, {}
    name, size = "copies of the weights for autocast", float(training.autocast.itemsize)
    one = {name: max(shape.largest_layer, shape.head_weights) * size}
    if training.checkpointing != "none":
        return one, one
    copied = shape.parameters - (0 if shape.tied else shape.head_weights)
    if training.quantized is not None:  # these are converted again in the backward pass
        copied -= shape.quantizable
    return {name: max(copied * size, one[name])}, one


def _kept(activations: ActivationBytes, checkpointing: Checkpointing) -> float:
    """Return bytes per layer and token."""
    if checkpointing == "none":
        return activations.layer
    return activations.layer_input + (activations.attention_output if checkpointing == "selective" else 0.0)


def _logit_bytes(compute: int, *, backward: bool) -> float:
    """Return bytes per logit: float32 is used in place, half precision is widened and has a gradient."""
    return float(compute) if compute >= 4 else compute + 4.0 + (compute if backward else 0.0)


def _short_windows(shape: ModelShape, activations: ActivationBytes, training: Training) -> dict[str, float]:
    tokens = window_tokens(training.tokens, training.rows, training.context_length, training.stride)
    chunk = HEAD_ROWS * shape.vocabulary * _logit_bytes(training.compute_bytes, backward=False)
    layer, head = tokens * activations.forward, 2.0 * tokens * activations.hidden + chunk
    return {"short windows, one layer or the head of a pass": max(layer, head)}


def _optimizer(shape: ModelShape, training: Training, numbers: float) -> float:
    divided = training.gpus if training.sharded else 1
    size = _trained_bytes(shape, training)
    return math.ceil(shape.trained / divided) * size * numbers
