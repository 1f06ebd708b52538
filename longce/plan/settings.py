"""Read the experiment to be planned from its parsed config, without instantiating it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from lightning_modules.functional.checks import check_count
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.context_extension.frequencies import global_parameters
from lightning_modules.models.context_extension.patterns import PATTERNS
from lightning_modules.models.loading.config import Checkpointing, ModelConfig
from lightning_modules.models.loading.dtypes import stored_dtype
from lightning_modules.models.loading.load import load_config
from lightning_modules.objectives import find_step_dependent
from lightning_modules.training.preflight import check_influence, check_sequence_parallelism, check_trainable
from lightning_modules.training.sequence_parallel import check_processes
from longce.plan.flops import Checkpointing as PlannedCheckpointing
from longce.plan.memory import QUANTIZED_BYTES, Training
from longce.plan.shapes import has_experts

# Type of the weights, unless `model.dtype` decides it, and type of the matrix products in mixed precision.
_PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    **dict.fromkeys(("32-true", "32"), (None, None)),
    **dict.fromkeys(("bf16-mixed", "bf16"), (None, torch.bfloat16)),
    **dict.fromkeys(("16-mixed", "16"), (None, torch.float16)),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
}
# Numbers that an optimizer keeps for each weight, if they are not the two of AdamW.
_MOMENTS = {"SGD": 0.0, "Adagrad": 1.0, "RMSprop": 1.0, "Lion": 1.0, "Adafactor": 0.0}

CHECKPOINTING: dict[Checkpointing, PlannedCheckpointing] = {
    False: "none",
    "selective": "selective",
    True: "full",
    "auto": "full",  # until `choose_checkpointing` chooses it
}
"""Names of the plan for the values of `ModelConfig.gradient_checkpointing`."""


@dataclass(frozen=True)
class Curriculum:
    """Shorter sequences in the first part of training: batches have the same tokens, cut into more sequences."""

    tokens: int  # of a sequence before the switch
    fraction: float  # of the optimizer steps


@dataclass(frozen=True)
class Experiment:
    """A training run."""

    name: str  # of the model
    config: PreTrainedConfig
    lora: dict[str, Any] | None  # arguments of `peft.LoraConfig`, if only adapters are trained
    objective: str
    training: Training
    accumulated: int = 1  # micro-batches of an optimizer step
    max_steps: int | None = None  # None if the run is limited otherwise
    optimizer: str = "AdamW"
    precision: str = "bf16-mixed"
    attn_implementation: str = "auto"
    chooses_checkpointing: bool = False  # whether the memory of the GPU decides it
    curriculum: Curriculum | None = None
    notes: tuple[str, ...] = ()  # assumptions, and settings that the plan ignores


def read_experiment(model: LongContextLM, options: Any) -> Experiment:
    """Read the parsed options of ``longce fit`` and ``longce plan``; the model's weights are not loaded."""
    if not isinstance(model, LongContextLM):
        raise ValueError(f"`longce plan` needs a `LongContextLM`, got a `{type(model).__name__}`.")
    parsed = options.as_dict()
    _, data = _read_component(parsed.get("data"))
    trainer = parsed["trainer"]
    objective = model.objective
    loading = model.loading
    tokens: Any = data.get("sequence_length")
    check_count("`data.sequence_length`", tokens)
    config = load_config(loading)
    stored = data.get("influence")
    check_influence(objective, f"in '{stored}'" if stored else None)
    if objective.uses_short_context:
        model.short_context.check_sequence(tokens)
        if data.get("curriculum"):
            model.short_context.check_sequence(data["curriculum"]["sequence_length"])
    precision = str(trainer.get("precision") or "32-true")
    if precision not in _PRECISIONS:
        raise ValueError(f"`longce plan` does not support `trainer.precision` '{precision}', only {[*_PRECISIONS]}.")
    cast, autocast = _PRECISIONS[precision]
    checkpointing = loading.gradient_checkpointing
    check_trainable(loading, config)
    # A class of the user may have no such argument; it then has the default optimizer.
    optimizer, settings = _read_component(parsed["model"].get("init_args", parsed["model"]).get("optimizer", "AdamW"))
    moments = 1.0 if settings.get("momentum") else _MOMENTS.get(optimizer, 2.0)
    dtype = cast or stored_dtype(config, loading.dtype)
    notes = _list_notes(model, config, dtype, autocast)
    distribution = _read_distribution(loading, parsed, config, notes)
    training = Training(
        tokens=tokens,
        rows=data.get("batch_size") or 1,
        short_context=model.short_context,
        short_pass=objective.uses_short_context,
        dtype=dtype,
        autocast=autocast,
        quantized=_quantized_bytes(loading.quantization),
        offload_activations=loading.offload_activations,
        bfloat16_residual=loading.residual_dtype == "bfloat16" or distribution["sharded"],
        checkpointing=CHECKPOINTING[checkpointing],
        checkpointed_layers=loading.checkpointed_layers,
        moments=moments,
        accumulates=(trainer.get("accumulate_grad_batches") or 1) > 1,
        step_copy=moments > 0 and not settings.get("fused") and settings.get("foreach") is not False,
        **distribution,
    )
    return Experiment(
        name=loading.pretrained_model_name_or_path or f"new {config.model_type}",
        config=config,
        lora=loading.lora,
        objective=type(objective).__name__,
        training=training,
        accumulated=trainer.get("accumulate_grad_batches") or 1,
        max_steps=max(trainer.get("max_steps") or 0, 0) or None,
        optimizer=optimizer,
        precision=precision,
        attn_implementation=loading.attn_implementation,
        chooses_checkpointing=checkpointing == "auto",
        curriculum=_read_curriculum(data.get("curriculum"), tokens),
        notes=tuple(notes),
    )


def _quantized_bytes(quantization: Mapping[str, Any] | None) -> float | None:
    """Return the bytes of a quantized weight; None without quantization."""
    if quantization is None:
        return None
    bits = 4 if quantization.get("load_in_4bit") else 8
    return QUANTIZED_BYTES[bits]


def _read_component(component: Any) -> tuple[str, dict[str, Any]]:
    """Return the class name and the arguments of a class in a parsed config."""
    if not isinstance(component, dict):
        component = {"class_path": str(component)}
    _, _, name = component["class_path"].rpartition(".")
    return name, dict(component.get("init_args") or {})


def _read_curriculum(settings: dict[str, Any] | None, tokens: int) -> Curriculum | None:
    """Return the length curriculum of the data, if it has one."""
    if not settings:
        return None
    curriculum = Curriculum(settings["sequence_length"], settings["share"])
    if not 0 < curriculum.tokens < tokens or tokens % curriculum.tokens:
        raise ValueError(
            f"`data.curriculum.sequence_length` = {curriculum.tokens} must divide `data.sequence_length` = {tokens}"
            " and be smaller."
        )
    return curriculum


def _list_notes(
    model: LongContextLM, config: PreTrainedConfig, dtype: torch.dtype, autocast: torch.dtype | None
) -> list[str]:
    notes = []
    if model.objective.uses_short_context and find_step_dependent(model.objective) is not None:
        notes.append("the plan has a short pass in every step, but the schedule has steps without one")
    if (autocast or dtype).itemsize > 2:
        notes.append(f"{str(dtype).removeprefix('torch.')} is planned at the rates of bfloat16, but is much slower")
    elif dtype.itemsize > 2 and has_experts(config):
        notes.append(
            "float32 experts, if FSDP2 does not shard them, are planned at the rates of bfloat16, but are slower"
        )
    pattern = global_parameters(config.get_text_config(decoder=True)).get("rope_type")
    if pattern in PATTERNS:
        notes.append(f"'{pattern}' is planned at the rates of flash attention, but its blockwise products are slower")
    if model.loading.attn_implementation == "eager":
        notes.append("eager attention keeps tokens * tokens numbers for each head, which are not counted: use sdpa")
    if model.loading.shifted_sparse_attention is not None:
        notes.append("shifted sparse attention is planned as full attention, without the additional pass for weights")
    return notes


def _read_distribution(
    loading: ModelConfig, parsed: dict[str, Any], config: PreTrainedConfig, notes: list[str]
) -> dict[str, Any]:
    """Return the number of GPUs, and how the model is sharded across them."""
    trainer = parsed["trainer"]
    gpus = parsed.get("gpus")
    name, arguments = _read_component(trainer.get("strategy") or "auto")
    sharded = name.startswith("FullySharded")
    if not sharded and not name.lower().startswith(("auto", "ddp", "ulysses", "single")):
        raise ValueError(
            f"`longce plan` does not support `trainer.strategy` '{name}', only auto, ddp, UlyssesStrategy,"
            " FullyShardedStrategy and FullyShardedUlyssesStrategy (see configs/strategies)."
        )
    devices: Any = trainer.get("devices")
    if isinstance(devices, list):
        devices = len(devices)
    known = str(devices).isdecimal() and int(devices) > 0
    if gpus is None and not known:
        notes.append(f"`trainer.devices` is {devices!r}, so one GPU is assumed; set another number by --gpus")
    count = 1
    if gpus:
        count = gpus
    elif known:
        count = int(devices) * (trainer.get("num_nodes") or 1)
    shared = arguments.get("sequence_parallel_size", 1)
    check_processes(shared, count)
    check_sequence_parallelism(config, shared, loading.attn_implementation)
    return {
        "sharded": sharded,
        "gradient_copy": count > 1 and not sharded and not arguments.get("gradient_as_bucket_view"),
        "gpus": count,
        "offload": bool(arguments.get("offload")),
        "sequence_parallel_size": shared,
    }
