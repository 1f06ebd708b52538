"""Facts of a training run in plain types, for checkpoints and for the model card."""

import inspect
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from transformers import PreTrainedTokenizerFast

from lightning_modules.models.config import DType, ModelConfig
from lightning_modules.models.identity import hub_commit
from lightning_modules.objectives import Objective

PACKAGES = ("longce", "torch", "transformers", "peft", "lightning")
OPTIMIZER_SETTINGS = ("lr", "betas", "momentum", "eps", "weight_decay")
SCHEDULE_SETTINGS = ("start_factor", "end_factor", "total_iters", "T_max", "eta_min", "gamma", "step_size")


@dataclass(frozen=True)
class TrainingFacts:
    """How a model came about; what is unknown is None. Classes are stored under ``name``, with their settings."""

    base_model: str | None = None  # hub id or absolute path of the model that was trained on; None for random weights
    base_is_local: bool = False  # whether it is a folder of the machine that trained
    revision: str | None = None  # commit, or branch or tag, of the base model on the hub
    changes: dict[str, Any] = field(default_factory=dict)  # replaced values of its config, and `context_extension`
    dtype: DType = "float32"  # of the trained weights, or of the frozen ones under adapters
    lora: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None  # arguments of `BitsAndBytesConfig`, if the base was quantized
    objective: dict[str, Any] | None = None
    context_length: int | None = None  # K, if the objective looks at a short context; `stride` likewise
    stride: int | None = None
    optimizer: dict[str, Any] | None = None
    lr_scheduler: dict[str, Any] | None = None
    precision: str | None = None
    steps: int | None = None
    sequence_length: int | None = None
    tokens_per_step: int | None = None  # of all sequences of an optimizer step, padding included
    data: str | None = None  # class of the data module
    dataset: str | None = None  # hub id of its data
    tokenizer: str | None = None  # hub id or absolute path; None if the data module makes its own
    tokenizer_revision: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # last value of everything logged in an evaluation
    metrics_step: int | None = None  # optimizer steps before it
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self), indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> "TrainingFacts":
        """Read what `to_json` wrote; unknown keys are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})

    def published(self) -> "TrainingFacts":
        """Return the same without paths of this machine: only the name of a base in a folder, and no tokenizer."""
        base = Path(str(self.base_model)).name if self.base_is_local else self.base_model
        return replace(self, base_model=base, tokenizer=None, tokenizer_revision=None)


def loading_facts(loading: ModelConfig, config: Any) -> dict[str, Any]:
    """Return the facts of how a model was loaded, by the arguments of `load_backbone` and the loaded config."""
    path = loading.pretrained_model_name_or_path
    base = None if path is None or path.endswith(".json") else _absolute(path)
    local = base is not None and Path(base).exists()
    revision = None if local or base is None else loading.revision
    if base is not None and not local:
        with suppress(ValueError):  # a read-only cache remembers none
            revision = hub_commit(base, revision, fetched=True)
    changes = dict(loading.model_config or {})
    if loading.context_extension is not None:
        changes["context_extension"] = dict(loading.context_extension)
    quantization = None
    if loading.quantization is not None:
        different = config.quantization_config.to_diff_dict().items()  # from the defaults
        quantization = {name: value for name, value in different if name != "quant_method" and name[0] != "_"}
    return {
        "base_model": base,
        "base_is_local": local,
        "revision": revision,
        "changes": changes,
        "dtype": loading.dtype,
        "lora": loading.lora,
        "quantization": quantization,
    }


def _absolute(path_or_id: str) -> str:
    """Return the absolute path of a local folder, as a relative one might be a hub id elsewhere; else the id."""
    path = Path(path_or_id).expanduser()
    return str(path.resolve()) if path.exists() else path_or_id


def objective_facts(objective: Objective, context_length: int, stride: int) -> dict[str, Any]:
    """Return the facts of the objective."""
    lengths = {"context_length": context_length, "stride": stride} if objective.uses_short_context else {}
    return {"objective": _described(objective), **lengths}


def _described(objective: Objective) -> dict[str, Any]:
    """Return class and constructor arguments, also of an objective in another one."""
    parameters = inspect.signature(type(objective)).parameters
    settings = {name: value for name, value in vars(objective).items() if name in parameters}
    inner = {name: _described(value) for name, value in settings.items() if isinstance(value, Objective)}
    return {"name": type(objective).__name__, **settings, **inner}


def run_facts(trainer: Trainer, metrics_step: int | None) -> dict[str, Any]:
    """Return the facts of optimizer, data and results, with the last evaluation after ``metrics_step`` steps."""
    data: Any = getattr(trainer, "datamodule", None)
    path, length = getattr(data, "path", None), getattr(data, "sequence_length", None)
    rows, tokens = getattr(data, "batch_size", None), None
    if rows is not None and length is not None:
        readers = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)  # processes may share rows
        tokens = rows * length * trainer.accumulate_grad_batches * readers
    tokenizer = None if made_tokenizer(data) else getattr(data, "tokenizer_name", None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return {
        **_optimizer_facts(trainer),
        "precision": str(trainer.precision),
        "steps": trainer.global_step,
        "sequence_length": length,
        "tokens_per_step": tokens,
        "data": None if data is None else type(data).__name__,
        "dataset": path if isinstance(path, str) and not Path(path).expanduser().exists() else None,
        "tokenizer": None if tokenizer is None else _absolute(tokenizer),
        "tokenizer_revision": getattr(data, "tokenizer_revision", None),
        "metrics": metrics,
        "metrics_step": metrics_step if metrics else None,
        "versions": {name: version(name) for name in PACKAGES},
    }


def made_tokenizer(data: Any) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a data module that makes its own, stored nowhere else; otherwise None."""
    tokenizer = loaded_tokenizer(data)
    return None if tokenizer is None or tokenizer.name_or_path else tokenizer


def loaded_tokenizer(data: Any) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a data module if it is loaded; asking for the attribute might load an unused one."""
    tokenizer = None if data is None else vars(data).get("tokenizer")
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None


def _optimizer_facts(trainer: Trainer) -> dict[str, Any]:
    if not trainer.optimizers:
        return {}
    optimizer = trainer.optimizers[0]
    settings = {name: value for name, value in optimizer.defaults.items() if name in OPTIMIZER_SETTINGS}
    settings = json.loads(json.dumps(settings, default=str))  # plain types, as a checkpoint gives them back
    facts: dict[str, Any] = {"optimizer": {"name": type(optimizer).__name__, **settings}}
    if trainer.lr_scheduler_configs:
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        state = {name: value for name, value in vars(scheduler).items() if name in SCHEDULE_SETTINGS}
        facts["lr_scheduler"] = {"name": type(scheduler).__name__, **state}
    return facts
