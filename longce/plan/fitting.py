"""Find settings with which a training step that is too large fits on a GPU."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import choose_attention
from lightning_modules.models.optimizations import can_keep_attention
from lightning_modules.training.preflight import check_sequence_parallelism
from longce.plan.flops import Checkpointing
from longce.plan.hardware import GPU
from longce.plan.memory import GIB
from longce.plan.settings import Experiment
from longce.plan.sizes import ModelSizes

NODE = 8
"""GPUs of the node that is assumed where one GPU was planned and several are needed."""


@dataclass(frozen=True)
class Fitting:
    """Combination of remedies with which a training step fits."""

    settings: list[str]  # what to set
    gpus: int
    needed: float  # GiB on each of them


def choose_checkpointing(experiment: Experiment, gpu: GPU, sizes: ModelSizes) -> Checkpointing:
    """Return the checkpointing with the least recomputation with which a step fits; ``full`` if it never does.

    An attention whose outputs cannot be kept is not planned with ``selective``, and offloaded inputs of layers need
    checkpointing. Eager attention keeps ``T * T`` numbers for each head, which the plan does not count: it gets
    ``full``.
    """
    kinds: list[Checkpointing] = ["none", "selective"]
    if experiment.training.offload_activations:
        kinds.remove("none")
    attention = experiment.attn_implementation
    if attention == "auto":
        attention = choose_attention(ModelConfig(), experiment.config, device="cuda")
    if attention == "eager":
        return "full"
    if not can_keep_attention(attention, experiment.config):
        kinds.remove("selective")
    for kind in kinds:
        training = replace(experiment.training, checkpointing=kind)
        if sizes.training_memory(training, experiment.lora).needed <= gpu.memory * GIB:
            return kind
    return "full"


def find_fitting(experiment: Experiment, gpu: GPU, sizes: ModelSizes) -> Fitting | None:
    """Return the first combination of `REMEDIES` with which a step fits; None if it never does.

    Each remedy is tried alone first, in their order, then each pair, and so on.
    """
    for count in range(1, len(REMEDIES) + 1):
        for names in combinations(REMEDIES, count):
            changed = _apply(names, experiment)
            if changed is None:
                continue
            try:
                memory = sizes.training_memory(changed.training, changed.lora)
            except ValueError:  # the model does not support it, such as adapters without linear layers
                continue
            needed = memory.needed / GIB
            if needed <= gpu.memory:
                return Fitting(list(names), changed.training.gpus, needed)
    return None


def _apply(names: Iterable[str], experiment: Experiment) -> Experiment | None:
    """Return an experiment with all of these remedies, or None if one is in use already or not possible."""
    for name in names:
        changed = REMEDIES[name](experiment)
        if changed is None:
            return None
        experiment = changed
    return experiment


def _offload_activations(experiment: Experiment) -> Experiment | None:
    """Keep the inputs of checkpointed layers in main memory."""
    training = experiment.training
    if training.offload_activations:
        return None
    checkpointing = "full" if training.checkpointing == "none" else training.checkpointing
    return replace(experiment, training=replace(training, checkpointing=checkpointing, offload_activations=True))


def _shard(experiment: Experiment) -> Experiment | None:
    """Shard weights, gradients and optimizer state across the GPUs, or those of a node."""
    training = experiment.training
    if training.sharded:
        return None
    gpus = training.gpus if training.gpus > 1 else NODE
    sharded = replace(training, sharded=True, gradient_copy=False, bfloat16_residual=True, gpus=gpus)
    return replace(experiment, training=sharded)


def _train_adapters(experiment: Experiment) -> Experiment | None:
    """Train adapters of frozen weights in bfloat16."""
    training = experiment.training
    if experiment.lora is not None:
        return None
    training = replace(training, dtype=torch.bfloat16)
    return replace(experiment, lora={"r": 16, "target_modules": "all-linear"}, training=training)


def _split_sequences(experiment: Experiment) -> Experiment | None:
    """Split each sequence over as many of the GPUs, or of those of a node, as the model's heads allow."""
    training = experiment.training
    if training.sequence_parallel_size > 1:
        return None
    gpus = training.gpus if training.gpus > 1 else NODE
    for size in range(min(gpus, NODE), 1, -1):
        if gpus % size:
            continue
        try:
            check_sequence_parallelism(experiment.config, size, experiment.attn_implementation)
        except ValueError:
            continue
        copies = not training.sharded
        split = replace(training, sequence_parallel_size=size, gpus=gpus, gradient_copy=copies)
        return replace(experiment, training=split)
    return None


REMEDIES: dict[str, Callable[[Experiment], Experiment | None]] = {
    "activation offload (model.gradient_checkpointing and model.offload_activations: true)": _offload_activations,
    "FSDP2 (configs/strategies/fsdp.yaml)": _shard,
    "LoRA (model.lora: {r: 16, target_modules: all-linear}, model.dtype: bfloat16)": _train_adapters,
    "Ulysses (configs/strategies/ulysses.yaml, or its UlyssesStrategy without FSDP2)": _split_sequences,
}
"""Changes to an experiment by what to set; each returns None where it is in use already, or is not possible."""
