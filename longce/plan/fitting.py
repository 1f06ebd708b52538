"""Find settings that make a training step fit on a GPU."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import choose_attention
from lightning_modules.models.optimizations import can_keep_attention
from lightning_modules.training.preflight import check_sequence_parallelism
from longce.plan.flops import Checkpointing, ce_step_flops
from longce.plan.hardware import GPU
from longce.plan.memory import GIB, Training
from longce.plan.settings import Experiment
from longce.plan.sizes import ModelSizes

RESERVE = 0.05
"""Fraction of the memory that is left free where not all layers are recomputed: no such step was measured."""

NODE = 8
"""GPUs of the node that is assumed where one GPU was planned and several are needed."""


@dataclass(frozen=True)
class Fitting:
    """Combination of remedies that makes a training step fit."""

    settings: list[str]  # what to set
    gpus: int
    needed: float  # GiB on each of them


def choose_checkpointing(experiment: Experiment, gpu: GPU, sizes: ModelSizes) -> Training:
    """Return the training with the checkpointing that recomputes least and fits; all layers if none fits.

    An attention whose outputs cannot be kept is not planned with ``selective``. Eager attention keeps ``T * T`` numbers
    for each head, which the plan does not count: all its layers are recomputed. So are they where their inputs are
    offloaded, which is for runs without memory to spare.
    """
    training = experiment.training
    everything = replace(training, checkpointing="full", checkpointed_layers=None)
    attention = experiment.attn_implementation
    if attention == "auto":
        attention = choose_attention(ModelConfig(), experiment.config, device="cuda")
    if attention == "eager":
        return everything
    kinds: list[Checkpointing] = []
    if can_keep_attention(attention, experiment.config):
        kinds.append("selective")
    shape = sizes.shape(experiment.lora)
    if training.offload_activations:
        choices = [replace(everything, checkpointing=kind) for kind in kinds]
    else:
        choices = _list_choices(training, [*kinds, "full"], shape.checkpointed)

    def fits(each: Training) -> bool:
        is_partial = each.recomputed_layers(shape) < shape.layers
        reserve = RESERVE if is_partial else 0.0
        available = gpu.memory * GIB * (1 - reserve)
        return sizes.training_memory(each, experiment.lora).needed <= available

    def recomputed(each: Training) -> float:
        return ce_step_flops(shape, each.tokens, each.checkpointing, each.checkpointed_layers).total

    return min(filter(fits, choices), key=recomputed, default=everything)


def _list_choices(training: Training, kinds: Sequence[Checkpointing], layers: int) -> list[Training]:
    """Return a training without checkpointing, and with each kind of it, of any number of the layers."""
    choices = [replace(training, checkpointing="none")]
    for kind in kinds:
        counts = (*range(1, layers), None)
        choices += [replace(training, checkpointing=kind, checkpointed_layers=count) for count in counts]
    return choices


def find_fitting(experiment: Experiment, gpu: GPU, sizes: ModelSizes) -> Fitting | None:
    """Return the first combination of `REMEDIES` that makes a step fit; None if it never does.

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
    changed = replace(training, checkpointing=checkpointing, checkpointed_layers=None, offload_activations=True)
    return replace(experiment, training=changed)


def _checkpoint_all(experiment: Experiment) -> Experiment | None:
    """Recompute all layers."""
    if experiment.training.checkpointed_layers is None:
        return None
    return replace(experiment, training=replace(experiment.training, checkpointed_layers=None))


def _gpus_or_node(training: Training) -> int:
    """Return the GPUs of a run, or those of a node if it has one GPU."""
    if training.gpus > 1:
        return training.gpus
    return NODE


def _shard(experiment: Experiment) -> Experiment | None:
    """Shard weights, gradients and optimizer state across the GPUs, or those of a node."""
    training = experiment.training
    if training.sharded:
        return None
    gpus = _gpus_or_node(training)
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
    """Split each sequence over the largest number of GPUs of a node that the model's heads allow."""
    training = experiment.training
    if training.sequence_parallel_size > 1:
        return None
    gpus = _gpus_or_node(training)
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
    "checkpointing of all layers (without model.checkpointed_layers)": _checkpoint_all,
    "activation offload (model.gradient_checkpointing and model.offload_activations: true)": _offload_activations,
    "FSDP2 (configs/strategies/fsdp.yaml)": _shard,
    "LoRA (model.lora: {r: 16, target_modules: all-linear}, model.dtype: bfloat16)": _train_adapters,
    "Ulysses (configs/strategies/ulysses.yaml, or its UlyssesStrategy without FSDP2)": _split_sequences,
}
"""Changes to an experiment by what to set; each returns None where it is in use already, or is not possible."""
