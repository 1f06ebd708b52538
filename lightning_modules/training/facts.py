"""Facts about a training run in plain types, for checkpoints and the model card."""

import inspect
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from transformers import PreTrainedTokenizerFast

from lightning_modules.models.loading.config import DType, ModelConfig
from lightning_modules.models.loading.identity import hub_commit
from lightning_modules.models.short_context import ShortContextConfig
from lightning_modules.objectives import Objective
from lightning_modules.utilities.identity import package_version

PACKAGES = ("longce", "torch", "transformers", "peft", "lightning")
OPTIMIZER_SETTINGS = ("lr", "betas", "momentum", "eps", "weight_decay")
SCHEDULE_SETTINGS = (
    *("start_factor", "end_factor", "total_iters", "T_max", "eta_min", "gamma", "step_size"),
    *("schedule", "warmup_steps", "total_steps", "arguments"),
)


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about the training of a model; None if unknown. Objects are stored as their class name and settings."""

    base_model: str | None = None  # hub id or absolute path of the model before training; None for random weights
    base_is_local: bool = False  # whether it is a folder of the training machine
    revision: str | None = None  # commit, branch or tag of the base model on the hub
    changes: dict[str, Any] = field(default_factory=dict)  # overrides of its config, and `context_extension`
    dtype: DType = "float32"  # of the trained weights, or of the frozen base weights of adapters
    lora: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None  # arguments of `BitsAndBytesConfig`, if the base was quantized
    objective: dict[str, Any] | None = None
    context_length: int | None = None  # K and, as `stride`, d, if the objective uses short contexts
    stride: int | None = None
    optimizer: dict[str, Any] | None = None
    lr_scheduler: dict[str, Any] | None = None
    precision: str | None = None
    steps: int | None = None
    sequence_length: int | None = None
    pose: dict[str, Any] | None = None  # target length and chunks of positions that skip
    tokens_per_step: int | None = None  # of all sequences of an optimizer step, including padding
    data: str | None = None  # class of the data module
    dataset: str | None = None  # hub id of its data
    tokenizer: str | None = None  # hub id or absolute path; None if the data module makes its own
    tokenizer_revision: str | None = None
    resumes: list[dict[str, Any]] = field(default_factory=list)  # by `step`: values before and after of what `changed`
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    metrics_step: int | None = None  # optimizer step of that evaluation
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the facts as JSON."""
        return json.dumps(asdict(self), indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> "TrainingFacts":
        """Parse the result of `to_json`; unknown keys are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})

    def published(self) -> "TrainingFacts":
        """Return the facts without paths of this machine: only the folder name of a local base, and no tokenizer."""
        base = Path(str(self.base_model)).name if self.base_is_local else self.base_model
        return replace(self, base_model=base, tokenizer=None, tokenizer_revision=None)


def loading_facts(loading: ModelConfig, config: Any) -> dict[str, Any]:
    """Return the facts about loading a model, from the arguments of `load_backbone` and the loaded config."""
    path = loading.pretrained_model_name_or_path
    base = None if path is None or path.endswith(".json") else _make_absolute(path)
    local = base is not None and Path(base).exists()
    revision = None if local or base is None else loading.revision
    if base is not None and not local:
        with suppress(ValueError):  # a read-only cache has no commits
            revision = hub_commit(base, revision, fetched=True)
    changes = dict(loading.model_config or {})
    if loading.context_extension is not None:
        changes["context_extension"] = dict(loading.context_extension)
    quantization = None
    if loading.quantization is not None:
        non_default = config.quantization_config.to_diff_dict().items()
        quantization = {name: value for name, value in non_default if name != "quant_method" and name[0] != "_"}
    return {
        "base_model": base,
        "base_is_local": local,
        "revision": revision,
        "changes": changes,
        "dtype": loading.dtype,
        "lora": loading.lora,
        "quantization": quantization,
    }


def _make_absolute(path_or_id: str) -> str:
    """Return a hub id, or the absolute path of a local folder; a relative one could be mistaken for an id elsewhere."""
    path = Path(path_or_id).expanduser()
    return str(path.resolve()) if path.exists() else path_or_id


def objective_facts(objective: Objective, short_context: ShortContextConfig) -> dict[str, Any]:
    """Return the facts about the objective; a short context other than the paper's windows is one of its settings."""
    described = _describe_objective(objective)
    if not objective.uses_short_context:
        return {"objective": described}
    facts: dict[str, Any] = {"objective": described, "context_length": short_context.context_length}
    if short_context.method == "windows":
        facts["stride"] = short_context.stride
    else:
        facts["objective"] = described | {"short_method": short_context.method}
    return facts


def _describe_objective(objective: Objective) -> dict[str, Any]:
    """Return class name and constructor arguments, including those of nested objectives."""
    parameters = inspect.signature(type(objective)).parameters
    settings = {name: value for name, value in vars(objective).items() if name in parameters}
    inner = {name: _describe_objective(value) for name, value in settings.items() if isinstance(value, Objective)}
    return {"name": type(objective).__name__, **settings, **inner}


def run_facts(trainer: Trainer, metrics_step: int | None) -> dict[str, Any]:
    """Return the facts about optimizer, data and results; the last evaluation was at ``metrics_step``."""
    data: Any = getattr(trainer, "datamodule", None)
    path = getattr(data, "path", None)
    length = getattr(data, "sequence_length", None)
    batch_size = getattr(data, "batch_size", None)
    pose = getattr(data, "pose", None)
    tokens = None
    if batch_size is not None and length is not None:
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)  # processes may share sequences
        tokens = batch_size * length * trainer.accumulate_grad_batches * replicas
    tokenizer = None if builtin_tokenizer(data) else getattr(data, "tokenizer_name", None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return {
        **_optimizer_facts(trainer),
        "precision": str(trainer.precision),
        "steps": trainer.global_step,
        "sequence_length": length,
        "pose": None if pose is None else {name: int(value) for name, value in asdict(pose).items()},
        "tokens_per_step": tokens,
        "data": None if data is None else type(data).__name__,
        "dataset": path if isinstance(path, str) and not Path(path).expanduser().exists() else None,
        "tokenizer": None if tokenizer is None else _make_absolute(tokenizer),
        "tokenizer_revision": getattr(data, "tokenizer_revision", None),
        "metrics": metrics,
        "metrics_step": metrics_step if metrics else None,
        "versions": {name: package_version(name) for name in PACKAGES},
    }


def builtin_tokenizer(data: Any) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a data module that builds it without a path, or None."""
    tokenizer = loaded_tokenizer(data)
    return None if tokenizer is None or tokenizer.name_or_path else tokenizer


def loaded_tokenizer(data: Any) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a data module if it is already loaded; reading the attribute would load it."""
    tokenizer = None if data is None else vars(data).get("tokenizer")
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None


def _optimizer_facts(trainer: Trainer) -> dict[str, Any]:
    if not trainer.optimizers:
        return {}
    optimizer = trainer.optimizers[0]
    settings = {name: value for name, value in optimizer.defaults.items() if name in OPTIMIZER_SETTINGS}
    settings = json.loads(json.dumps(settings, default=str))  # plain types, as in a checkpoint
    facts: dict[str, Any] = {"optimizer": {"name": type(optimizer).__name__, **settings}}
    if trainer.lr_scheduler_configs:
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        state = {name: value for name, value in vars(scheduler).items() if name in SCHEDULE_SETTINGS}
        facts["lr_scheduler"] = {"name": type(scheduler).__name__, **state}
    return facts
