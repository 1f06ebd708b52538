"""Time to move weights, gradients and activations between GPUs, and between a GPU and main memory.

A GPU sends and receives at a fraction of its bandwidth. Between nodes, all GPUs of a node share its network.
"""

from lightning_modules.commands.plan.activations import ActivationBytes
from lightning_modules.commands.plan.hardware import GPU
from lightning_modules.commands.plan.memory import Training, short_passes
from lightning_modules.commands.plan.shapes import ModelShape

BANDWIDTH = 0.8
"""Assumed: fraction of the bandwidth in data sheets that collectives and copies reach."""

WAITING = ("exchange of Ulysses", "activations to and from main memory")
"""Transfers that computation waits for. All others may overlap with it, completely or not at all."""


def transfer_seconds(
    shape: ModelShape, activations: ActivationBytes, training: Training, gpu: GPU, *, batches: int
) -> dict[str, float]:
    """Return the time of each kind of transfer in an optimizer step of ``batches`` micro-batches."""
    size, gpus = training.compute_bytes, training.gpus
    # Sharded weights are gathered in the forward pass, again in the backward pass, and in each pass of short windows.
    # Gradients are summed in every micro-batch, in float32 unless all is float32 already.
    gathers = batches * (2 + training.short_pass * short_passes(training)[0])
    weights, gradients = float(shape.parameters), float(shape.trained)
    seconds = {}
    if training.sharded:
        seconds["all-gather of weights"] = gathers * _collective(weights * size, gpus, training, gpu)
        seconds["reduce-scatter of gradients"] = batches * _collective(4.0 * gradients, gpus, training, gpu)
    elif gpus > 1:
        sent = gradients * training.trained_bytes(shape)
        seconds["all-reduce of gradients"] = 2 * _collective(sent, gpus, training, gpu)
    if (group := training.sequence_parallel_size) > 1:
        # Query, key, value and output of each layer: forward, backward and recomputed; each GPU has 1 / group of them.
        passes = batches * training.rows * (2 if training.checkpointing == "none" else 3)
        exchanged = passes * shape.layers * training.tokens * shape.attention_width * size
        seconds["exchange of Ulysses"] = _collective(exchanged / group, group, training, gpu, distinct=True)
    copies = gpu.host * 1e9 * BANDWIDTH
    if training.offload:
        moved = gathers * weights * training.dtype.itemsize + batches * gradients * 4
        seconds["weights and gradients from and to main memory"] = moved / gpus / copies
    if training.offload_activations:
        kept = batches * training.tokens_per_gpu * shape.layers * activations.layer_input
        seconds["activations to and from main memory"] = 2 * kept / copies
    return {name: value for name, value in seconds.items() if value > 0}


def _collective(size: float, gpus: int, training: Training, gpu: GPU, *, distinct: bool = False) -> float:
    """Return the time in which each GPU receives all shards of ``size`` bytes, which the GPUs of a node share.

    If what they receive is ``distinct``, as in an exchange, all of it comes over the network.
    """
    within, nodes = min(gpus, training.gpus_per_node), -(-gpus // training.gpus_per_node)
    inside = size * (gpus - 1) / gpus / gpu.link
    between = size * (within if distinct else 1) * (nodes - 1) / nodes / (within * gpu.network)
    return max(inside, between) / 1e9 / BANDWIDTH
