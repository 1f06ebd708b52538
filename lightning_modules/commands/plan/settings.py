"""What a plan needs of an experiment: its layered config, parsed and not instantiated."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from lightning_modules.batch import LONGEST_ROW
from lightning_modules.commands.plan.flops import Checkpointing
from lightning_modules.commands.plan.memory import FULLY_SHARDED, QUANTIZED_BYTES, Sharding, Training
from lightning_modules.functional.windows import check_context
from lightning_modules.models.adapters import quantization_config
from lightning_modules.models.context_extension.patterns import PATTERNS
from lightning_modules.models.context_extension.patterns.blocks import BLOCK_BYTES, block_size
from lightning_modules.models.loading import load_config
from lightning_modules.objectives import Objective, check_influence
from lightning_modules.training.sequence_parallel import check_processes, check_sequence_parallelism
from lightning_modules.utilities.user_modules import import_object

_AUTOCAST = {"bf16-mixed": "bfloat16", "bf16": "bfloat16", "16-mixed": "float16", "16": "float16"}
_CAST = {"bf16-true": "bfloat16", "16-true": "float16", "64-true": "float64", "64": "float64"}
_MOMENTS = {"Adagrad": 1, "RMSprop": 1, "Lion": 1, "Rprop": 2, "Adafactor": 0}


@dataclass(frozen=True)
class Judge:
    """The evaluator.

    Attributes:
        name: Hub id, folder or config file.
        config: Its config.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one window.
        dtype: Of its weights.
    """

    name: str
    config: PreTrainedConfig
    context_length: int
    stride: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Experiment:
    """A training run.

    Attributes:
        name: Of the model.
        config: Of the model.
        lora: Arguments of ``peft.LoraConfig``, if only adapters are trained.
        objective: Name of the loss.
        training: What memory depends on.
        window_share: Share of the short windows that are computed.
        stored_influence: Whether the weights of the tokens come with the rows.
        accumulated: Micro-batches of an optimizer step.
        max_steps: Optimizer steps; None if the run is limited otherwise.
        optimizer: Name of its class.
        precision: As Lightning calls it.
        judge: The evaluator, if there is one.
        validation_documents: How many each validation scores; None if the config does not say.
        notes: What was assumed because the config does not say it.
    """

    name: str
    config: PreTrainedConfig
    lora: dict[str, Any] | None
    objective: str
    training: Training
    window_share: float
    stored_influence: bool
    accumulated: int
    max_steps: int | None
    optimizer: str
    precision: str
    judge: Judge | None
    validation_documents: int | None
    notes: tuple[str, ...]


def read_experiment(options: Any, *, gpus: int | None = None, evaluator: str | None = None) -> Experiment:
    """Read the options of ``longce fit``.

    Args:
        options: Parsed namespace with ``model``, ``data`` and ``trainer``.
        gpus: Number of GPUs; by default ``trainer.devices`` times ``trainer.num_nodes``, where those are numbers.
        evaluator: Hub id, folder or config file of the evaluator; by default that of the callback ExternalEvaluator.

    Raises:
        ValueError: If a model cannot be found, a setting is unknown here, or rows are too short for the short context.
    """
    model, data, trainer = options.model, _arguments(options.get("data")), options.trainer
    tokens = data.get("sequence_length")
    if tokens is None:
        raise ValueError("The plan needs the length of the rows: give `data` with a `sequence_length`.")
    if not 1 <= tokens <= LONGEST_ROW:
        raise ValueError(f"`data.sequence_length` must be 1 to {LONGEST_ROW:,} tokens, got {tokens:,}.")
    names = ("pretrained_model_name_or_path", "model_config", "context_extension", "revision", "trust_remote_code")
    config = load_config(**{name: _plain(model.get(name)) for name in names})
    count, notes = (gpus, []) if gpus is not None else _gpus(trainer)
    if count < 1:
        raise ValueError(f"`gpus` must be 1 or more, got {count}.")
    objective = _objective(model.get("objective"))
    stored = bool(data.get("influence"))
    check_influence(objective, f"in '{data['influence']}'" if stored else None)
    if objective.uses_short_context:
        check_context(model.context_length, model.stride, tokens)
    notes += _not_planned(model, config, tokens)
    dtype, autocast = _precision(str(trainer.get("precision") or "32-true"), model.get("dtype"), config)
    sharding = _sharding(trainer.get("strategy") or "auto", count)
    notes += _not_supported(trainer.get("strategy") or "auto", sharding)
    shared = _arguments(trainer.get("strategy") or "auto").get("sequence_parallel_size", 1)
    check_processes(shared, count)
    check_sequence_parallelism(config, shared, model.get("attn_implementation") or "auto")
    optimizer, moments = _optimizer(model.get("optimizer"), notes)
    arguments = _arguments(model.get("optimizer"))
    training = Training(
        tokens=tokens,
        rows=data.get("batch_size") or 1,
        context_length=model.context_length,
        stride=model.stride,
        short_pass=objective.uses_short_context,
        dtype=dtype,
        quantized=_quantized(_plain(model.get("quantization")), _plain(model.get("lora"))),
        autocast=autocast,
        checkpointing=_checkpointing(model.get("gradient_checkpointing")),
        moments=moments,
        step_copy=moments > 0 and not arguments.get("fused") and arguments.get("foreach") is not False,
        sharding=sharding,
        gpus=count,
        sequence_parallel_size=shared,
    )
    return Experiment(
        name=model.get("pretrained_model_name_or_path") or f"new {config.model_type}",
        config=config,
        lora=_plain(model.get("lora")),
        objective=type(objective).__name__,
        training=training,
        window_share=_share(model.get("short_window_share")),
        stored_influence=stored,
        accumulated=trainer.get("accumulate_grad_batches") or 1,
        max_steps=steps if (steps := trainer.get("max_steps") or -1) > 0 else None,
        optimizer=optimizer,
        precision=str(trainer.get("precision") or "32-true"),
        judge=_judge(evaluator, trainer.get("callbacks"), model),
        validation_documents=data.get("validation_documents"),
        notes=tuple(notes),
    )


def _quantized(arguments: dict[str, Any] | None, lora: dict[str, Any] | None) -> float | None:
    """Bytes of a quantised weight."""
    if arguments is None:
        return None
    if lora is None:
        raise ValueError("Quantised weights cannot be trained: set `model.lora`, which trains adapters over them.")
    quantization_config(arguments, compute_dtype=torch.bfloat16)
    return QUANTIZED_BYTES[4 if arguments.get("load_in_4bit") else 8]


def _plain(value: Any) -> Any:
    return value.as_dict() if callable(getattr(value, "as_dict", None)) else value


def _arguments(component: Any) -> dict[str, Any]:
    """Constructor arguments of a class named in a config."""
    component = _plain(component) or {}
    return dict(component.get("init_args") or {}) if isinstance(component, dict) else {}


def _class(component: Any) -> str:
    component = _plain(component)
    return str(component.get("class_path")) if isinstance(component, dict) else str(component)


def _gpus(trainer: Any) -> tuple[int, list[str]]:
    devices = trainer.get("devices")
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    if isinstance(devices, list):
        devices = len(devices)
    if isinstance(devices, int) and devices > 0:
        return devices * (trainer.get("num_nodes") or 1), []
    return 1, [f"`trainer.devices` is {devices!r}, so one GPU is assumed; --gpus says otherwise"]


def _objective(objective: Any) -> Objective:
    """The loss itself: it is nothing but a few numbers."""
    if not isinstance(_plain(objective), dict):
        return objective
    arguments = _arguments(objective)
    if "objective" in arguments:  # one made of another one
        arguments["objective"] = _objective(arguments["objective"])
    return import_object(_class(objective))(**arguments)


def _not_planned(model: Any, config: PreTrainedConfig, tokens: int) -> list[str]:
    """What the figures leave out of account."""
    notes = []
    if _class(model.get("objective")).endswith(".Scheduled"):
        notes.append("every step is planned with a short pass, and a schedule has steps without one")
    if model.get("short_dtype") is not None:
        notes.append(f"`short_dtype: {model.short_dtype}` makes the short pass cheaper than it is planned here")
    if model.get("head_kernel") not in (None, "chunked"):
        notes.append(f"the head is planned as `chunked`, not as `{model.head_kernel}`")
    if model.get("quantization") is not None:
        notes.append("the conversion of quantised weights takes time that is not planned here")
    text = config.get_text_config(decoder=True)
    pattern = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    if pattern in PATTERNS:
        heads = text.num_attention_heads
        size = BLOCK_BYTES * block_size(heads, tokens) * heads * tokens / 2**30
        notes.append(
            f"'{pattern}' is planned at the rates of flash attention, and computes the same operations by plain"
            f" products in blocks: it is slower, and needs up to {size:.1f} GiB more at a time"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and positions < tokens and getattr(text, "rope_parameters", None) is None:
        notes.append(f"the model has {positions:,} learned positions and cannot read rows of {tokens:,} tokens")
    return notes


def _precision(precision: str, dtype: Any, config: PreTrainedConfig) -> tuple[torch.dtype, torch.dtype | None]:
    """Types of the weights, and of the matrix products in mixed precision."""
    weights = stored_dtype(config) if dtype in (None, "auto") else getattr(torch, dtype)
    if precision in _AUTOCAST:
        return weights, getattr(torch, _AUTOCAST[precision])
    if precision in _CAST:
        return getattr(torch, _CAST[precision]), None
    if precision in ("32-true", "32"):
        return weights, None
    raise ValueError(
        f"`trainer.precision` '{precision}' cannot be planned: known are {[*_AUTOCAST, *_CAST, '32-true']}."
    )


def stored_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Type that a config says its weights are stored in."""
    dtype = config.dtype or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _sharding(strategy: Any, gpus: int) -> Sharding:
    name, arguments = _class(strategy).rpartition(".")[2], _arguments(strategy)
    plain = name.lower().removesuffix("strategy").removesuffix("_find_unused_parameters_true")
    if plain in ("auto", "ddp", "ulysses", "singledevice", "single_device"):
        if gpus == 1:
            return Sharding()
        view = bool(arguments.get("gradient_as_bucket_view"))
        return Sharding("DDP: everything on each GPU", gradient_copy=not view)
    if plain.startswith(("fsdp", "fullysharded", "modelparallel")):
        return _fully_sharded(plain, arguments)
    raise ValueError(
        f"`trainer.strategy` '{name}' cannot be planned: known are auto, ddp, fsdp, FullyShardedStrategy,"
        " ModelParallelStrategy, UlyssesStrategy and FullyShardedUlyssesStrategy."
    )


def _not_supported(strategy: Any, sharding: Sharding) -> list[str]:
    """What `longce fit` refuses, or has not been tried with."""
    remedy = "take lightning_modules.training.fsdp.FullyShardedStrategy (configs/strategies/fsdp.yaml)"
    if sharding.weights and "fsdp" in _class(strategy).rpartition(".")[2].lower():
        return [f"`longce fit` refuses this strategy: {remedy}"]
    if _arguments(strategy).get("sequence_parallel_size", 1) > 1:
        return ["rows shared by GPUs have been tried with longce on CPUs only; exchange and its buffers do not count"]
    return []


def _fully_sharded(name: str, arguments: dict[str, Any]) -> Sharding:
    kind = str(arguments.get("sharding_strategy") or "FULL_SHARD").rpartition(".")[2]
    if kind not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise ValueError(f"`sharding_strategy` '{kind}' cannot be planned: known are FULL_SHARD and SHARD_GRAD_OP.")
    if arguments.get("tensor_parallel_size") not in (None, "auto", 1):
        raise ValueError("Tensor parallelism cannot be planned: leave `tensor_parallel_size` at 1.")
    offload = "offload" in name or bool(arguments.get("cpu_offload"))
    return replace(FULLY_SHARDED, weights=kind == "FULL_SHARD", offload=offload)


def _optimizer(optimizer: Any, notes: list[str]) -> tuple[str, float]:
    """Class of the optimizer, and the numbers it keeps per trained weight."""
    if not isinstance(_plain(optimizer), dict):
        return "AdamW", 2.0
    name = _class(optimizer).rpartition(".")[2]
    if name == "SGD":
        return name, 1.0 if _arguments(optimizer).get("momentum") else 0.0
    if "adam" in name.lower():
        return name, 2.0
    if name not in _MOMENTS:
        notes.append(f"the optimizer {name} is unknown here: two numbers per trained weight are assumed, as for AdamW")
    return name, float(_MOMENTS.get(name, 2))


def _checkpointing(value: Any) -> Checkpointing:
    return "selective" if value == "selective" else "full" if value else "none"


def _share(value: Any) -> float:
    share = 1.0 if value is None else float(value)
    if not 0 < share <= 1:
        raise ValueError(f"`short_window_share` must lie above 0 and at most at 1, got {share}.")
    return share


def _judge(evaluator: str | None, callbacks: Any, model: Any) -> Judge | None:
    """The evaluator of the command line, else that of the callback."""
    found = [_arguments(part) for part in callbacks or [] if _class(part).endswith("ExternalEvaluator")]
    settings = found[0] if found else {}
    name = evaluator or settings.get("evaluator")
    if name is None:
        return None
    names = {"revision": settings.get("revision")} if evaluator is None else {}
    config = load_config(name, trust_remote_code=bool(settings.get("trust_remote_code")), **names)
    context_length, stride = (settings.get(key) or model.get(key) for key in ("context_length", "stride"))
    asked = settings.get("dtype") if evaluator is None else None
    dtype = stored_dtype(config) if asked in (None, "auto") else getattr(torch, asked)
    return Judge(name, config, context_length, stride, dtype)
