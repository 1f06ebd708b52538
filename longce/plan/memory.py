"""Estimate the peak memory of one GPU, with its components."""

import math
from dataclasses import dataclass

import torch

from lightning_modules.functional import short_context_windows
from lightning_modules.models.backbone import TOKENS_PER_PASS
from lightning_modules.models.short_context import ShortContextConfig
from longce.plan.activations import ActivationBytes
from longce.plan.flops import Checkpointing
from longce.plan.shapes import ModelShape

GIB = 2.0**30
QUANTIZED_BYTES = {4: 0.5 + 1 / 64 + 4 / (64 * 256), 8: 1.0}
"""Bytes of a quantized weight: NF4 in blocks of 64 with one byte each, which share a float32 per 256 blocks; and int8,
with one constant per row."""
HEAD_ROWS = 2048
"""Rows of logits that exist at the same time on an accelerator."""
CONTEXT_GIB = 1.0
FRAGMENTATION = 0.05
"""Assumed: CUDA context, libraries and communication buffers, and the fraction of the rest lost to fragmentation."""


@dataclass(frozen=True)
class Training:
    """Settings of a training run that decide its memory."""

    tokens: int  # of a sequence
    rows: int = 1  # sequences of a micro-batch
    short_context: ShortContextConfig = ShortContextConfig()  # noqa: RUF009, it cannot be changed
    short_pass: bool = True  # whether short contexts are computed
    dtype: torch.dtype = torch.float32  # of the weights
    quantized: float | None = None  # bytes per weight of linear layers except the head, if they are quantized
    autocast: torch.dtype | None = torch.bfloat16  # of the matrix products in mixed precision
    bfloat16_residual: bool = True  # whether the residual stream is bfloat16 under bfloat16 autocast
    checkpointing: Checkpointing = "none"
    checkpointed_layers: int | None = None  # number of layers that are recomputed, from the first one; None for all
    moments: float = 2.0  # numbers that the optimizer keeps for each trained weight, in the type of the weights
    accumulates: bool = True  # whether gradients of earlier micro-batches exist
    step_copy: bool = True  # whether its step needs a temporary as large as the weights, as torch's `foreach` does
    sharded: bool = False  # whether weights, gradients and optimizer state are sharded across the GPUs (FSDP2)
    gradient_copy: bool = False  # whether the gradients exist twice, in the buckets of DDP
    gpus: int = 1
    sequence_parallel_size: int = 1  # GPUs that split each sequence
    offload: bool = False  # whether sharded weights, gradients and optimizer state are kept in main memory
    offload_activations: bool = False  # whether the inputs of checkpointed layers are

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens of a micro-batch on one GPU."""
        return self.rows * self.tokens / self.sequence_parallel_size

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in matrix products."""
        return (self.autocast or self.dtype).itemsize

    def recomputed_layers(self, shape: ModelShape) -> int:
        """Return the number of layers that the backward pass recomputes, from the first one."""
        if self.checkpointing == "none":
            return 0
        if self.checkpointed_layers is None:
            return shape.layers
        return self.checkpointed_layers

    @property
    def shards(self) -> int:
        """Number of GPUs that the weights are sharded across."""
        return self.gpus if self.sharded else 1

    def trained_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of a trained weight: float32 in mixed precision if other weights are frozen."""
        size = self.dtype.itemsize
        if self.autocast is None or shape.trained == shape.parameters:
            return size
        return max(size, 4)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU: of lasting components, and of successive phases, of which only the largest counts."""

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
        """Bytes that the GPU needs, with the CUDA context and fragmentation."""
        return (1 + FRAGMENTATION) * self.peak + CONTEXT_GIB * GIB


def training_memory(shape: ModelShape, activations: ActivationBytes, training: Training) -> Memory:
    """Return the memory of a training step.

    The backward pass begins in the last layer, which may keep its activations where the first one is recomputed.
    Without accumulation, a layer's gradients take the place of the activations kept for its backward pass.
    """
    tokens = training.tokens_per_gpu
    lasting = lasting_memory(shape, training)
    recomputed = training.recomputed_layers(shape)
    whole = shape.layers - recomputed  # number of layers that keep all activations
    layer_input = activations.layer_input if recomputed else 0.0
    if training.checkpointing == "selective":
        layer_input += shape.output_width * training.compute_bytes
    layer = activations.layer if whole else 0.0
    offloaded = tokens * max(recomputed - 2, 0) * activations.layer_input * training.offload_activations
    inputs = tokens * recomputed * layer_input - offloaded
    kept = {
        "activations kept for the backward pass": inputs + tokens * whole * layer,
        "last hidden states, predictors and their gradient": 3.0 * tokens * activations.hidden,
    }
    # A layer that kept its activations computes less in its backward pass than one that recomputes them.
    recompute = tokens * activations.layer_backward
    backward = tokens * max(activations.layer_backward - layer, 0.0)
    accumulated = (4.0 + training.dtype.itemsize) * shape.trained_head_weights
    chunk = HEAD_ROWS * shape.vocabulary * logit_bytes(training.compute_bytes, backward=True)
    every, one = _autocast_copies(shape, training)
    copies = every if whole else one
    phases = {
        "head": {**kept, **every, "head: a chunk of logits": chunk, "head: sum of its gradient": accumulated},
        "backward pass": {**kept, **copies, "one layer's backward pass": backward},
    }
    optimizer_step = {"temporary of the optimizer": lasting["gradients"]}
    if not training.accumulates and not training.offload:
        gradients = {"gradients": lasting.pop("gradients")}
        head = shape.trained_head_weights * training.trained_bytes(shape) / training.shards
        phases["backward pass"]["gradient of the head"] = head
        if recomputed and whole:
            # The layers that kept their activations are done, and the last one of the others is recomputed.
            phases["backward pass of recomputed layers"] = {
                **kept,
                "activations kept for the backward pass": inputs,
                **one,
                "one layer's backward pass": recompute,
                "gradient of the head": head,
                "gradients of the other layers": (gradients["gradients"] - head) * whole / shape.layers,
            }
        # The first layer comes last.
        first_kept = layer_input if recomputed else layer
        first_backward = recompute if recomputed else backward
        phases["end of the backward pass"] = {
            **gradients,
            "activations of a layer": tokens * first_kept,
            **one,
            "one layer's backward pass": first_backward,
        }
        optimizer_step |= gradients
    if training.step_copy and not training.offload:
        phases["optimizer step"] = optimizer_step
    if training.short_pass:
        together = largest_short_pass(training)
        chunk = HEAD_ROWS * shape.vocabulary * logit_bytes(training.compute_bytes, backward=False)
        largest = max(together * activations.forward, 2.0 * together * activations.hidden + chunk)
        phases["short windows"] = {**one, "short windows, one layer or the head of a pass": largest}
    if training.offload:
        for name in ("weights", "gradients", "optimizer"):
            del lasting[name]
    return Memory(lasting, phases)


def lasting_memory(shape: ModelShape, training: Training) -> dict[str, float]:
    """Return weights, gradients and optimizer state of one GPU in bytes, including offloaded parts."""
    size = training.dtype.itemsize
    shards = training.shards
    trained = training.trained_bytes(shape)
    weights = float(shape.parameters * size + shape.trained * (trained - size))
    if training.quantized is not None:
        weights -= shape.quantizable * (size - training.quantized)
    gradients = float(shape.trained * trained)
    parts = {"weights": weights / shards, "gradients": gradients / shards}
    if training.sharded:
        gathered = 2 * shape.largest_layer + shape.vocabulary_weights
        parts["gathered weights (two layers, head, embedding)"] = float(gathered * training.compute_bytes)
    if training.gradient_copy:
        parts["gradient buckets of DDP"] = gradients
    parts["optimizer"] = gradients / shards * training.moments
    return parts


def largest_short_pass(training: Training) -> int:
    """Return the tokens of one GPU in its largest forward pass over the short contexts of a batch."""
    if training.short_context.method == "sliding_window":
        return math.ceil(training.tokens_per_gpu)
    windows = training.rows * len(short_context_windows([0, training.tokens], training.short_context))
    length = training.short_context.window_length
    return min(max(1, TOKENS_PER_PASS // length), windows) * length


def _autocast_copies(shape: ModelShape, training: Training) -> tuple[dict[str, float], dict[str, float]]:
    """Return the copies of weights in the type of matrix products: kept by the forward pass, and of one layer.

    Copies are freed after their use, unless the backward pass needs them: those of layers that are not recomputed.
    Sharded weights are gathered in that type instead.
    """
    if training.autocast is None or training.sharded:
        return {}, {}
    name = "copies of the weights for autocast"
    size = float(training.autocast.itemsize)
    one = {name: max(shape.largest_layer, shape.head_weights) * size}
    whole = shape.layers - training.recomputed_layers(shape)
    copied = shape.parameters - shape.vocabulary_weights  # of the layers
    if training.quantized is not None:  # quantized weights are converted again in the backward pass
        copied -= shape.quantizable
    every = copied * whole / shape.layers
    if whole:
        every += shape.head_weights
    return {name: max(every * size, one[name])}, one


def logit_bytes(compute: int, *, backward: bool) -> float:
    """Return bytes per logit: float32 is used in place, half precision is widened and has a gradient."""
    if compute >= 4:
        return float(compute)
    widened = compute + 4.0
    if backward:
        widened += compute
    return widened
