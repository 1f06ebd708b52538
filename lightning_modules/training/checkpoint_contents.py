"""Additional contents of a checkpoint, and the checks when it is loaded."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import PreTrainedModel

from lightning_modules.models.loading.adapters import check_same_scaling, trained_state
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.tokenization.tokenizer import tokenizer_to_json
from lightning_modules.training.checkpoints.io import RUN_ID
from lightning_modules.training.checkpoints.spans import CONFIG_KEY, Span
from lightning_modules.training.facts import TrainingFacts, builtin_tokenizer, loading_facts

EXPORT_KEY = "longce_export"
"""Key in a checkpoint for everything except weights that an export needs, as JSON texts."""

FINGERPRINT_KEY = "frozen_fingerprint"
"""Key in a checkpoint for the hash of the frozen weights that it leaves out."""

COSTS_KEY = "longce_costs"
"""Key in a checkpoint for the tokens and GPU hours of the run so far."""

TRAINED_KEY = "trained_weights"
"""Key in a checkpoint that leaves out frozen weights, for the names of the trained ones."""


def run_contents(run_id: str | None, costs: Mapping[str, float], config: str, spans: Sequence[Span]) -> dict[str, Any]:
    """Return the facts about a run for its checkpoint: id, costs so far, config (YAML, or empty) and resumes."""
    contents: dict[str, Any] = {COSTS_KEY: dict(costs)}
    if run_id is not None:
        contents[RUN_ID] = run_id
    if config:
        contents[CONFIG_KEY] = {"config": config, "spans": json.dumps(spans)}
    return contents


def export_contents(model: PreTrainedModel, facts: TrainingFacts, data: Any) -> dict[str, dict[str, str]]:
    """Return the contents that an export needs in addition to the weights; ``data`` is the data module, or None."""
    texts = {
        "config": model.config.to_json_string(use_diff=False),
        "generation_config": json.dumps(model.generation_config.to_dict(), default=str),
        "facts": facts.to_json(),
    }
    tokenizer = builtin_tokenizer(data)
    if tokenizer is not None:
        texts["tokenizer"] = tokenizer_to_json(tokenizer)
    return {EXPORT_KEY: texts}


def leave_out_frozen_weights(checkpoint: dict[str, Any], module: nn.Module, fingerprint: str, *, sharded: bool) -> None:
    """Leave the frozen base weights of adapters out of a checkpoint: those of a 7B model take 27 GB.

    ``fingerprint`` identifies them. If weights are ``sharded``, the strategy writes them, and leaves them out.
    """
    checkpoint[TRAINED_KEY] = [name for name, weight in module.named_parameters() if weight.requires_grad]
    checkpoint[FINGERPRINT_KEY] = fingerprint
    if not sharded:
        checkpoint["state_dict"] = trained_state(module, checkpoint["state_dict"])


def check_contents(
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    model: PreTrainedModel,
    loading: ModelConfig,
    *,
    fingerprint: str | None,
    resumes: bool,
) -> None:
    """Check a checkpoint before a module loads it.

    Args:
        checkpoint: The checkpoint, perhaps without its weights.
        module: The module that loads it.
        model: The Hugging Face model inside.
        loading: How the model was loaded.
        fingerprint: Hash of the frozen weights, or None if checkpoints contain all weights.
        resumes: Whether training resumes.
    """
    if EXPORT_KEY in checkpoint:
        _check_same_model(checkpoint[EXPORT_KEY], model, loading)
    if resumes and "state_dict" in checkpoint:
        missing = {"optimizer_states", "lr_schedulers", "loops"}.difference(checkpoint)
        if missing or "fit_loop" not in checkpoint["loops"]:
            raise ValueError(
                f"The checkpoint lacks {', '.join(sorted(missing)) or 'the state of training'}, without which training"
                " cannot resume: it contains weights only. Start a new training from its export (`longce export`)."
            )
    if fingerprint is None:
        _check_same_weights(checkpoint.get("state_dict"), module.state_dict())
        return
    # Strategies that shard the model have already removed the weights.
    stored = checkpoint.get("state_dict", checkpoint.get(TRAINED_KEY, ()))
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    missing = trained.keys() - set(stored)
    if missing:
        raise ValueError(
            f"The checkpoint lacks {len(missing)} of the weights that `model.lora` trains ({min(missing)}, ..):"
            " set `lora` as in the run that wrote it."
        )
    if "state_dict" in checkpoint:
        _check_same_weights({name: stored[name] for name in trained}, trained)
    if checkpoint.get(FINGERPRINT_KEY) not in (None, fingerprint):
        raise ValueError(
            "The checkpoint's adapters were trained on other weights than those of"
            f" '{loading.pretrained_model_name_or_path}' (or on the same in another `dtype`): set model,"
            " revision and dtype as in that run."
        )


def _without_dtypes(quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a quantization but for the dtypes in which it computes and stores."""
    settings = quantization or {}
    return {name: value for name, value in settings.items() if "dtype" not in name and "storage" not in name}


def _check_same_model(saved: Mapping[str, str], model: PreTrainedModel, loading: ModelConfig) -> None:
    """Check that this run uses the checkpoint's weights in the same way as the run that wrote them.

    RoPE and sliding windows may differ on purpose, to try an extension on a trained model: that is a warning.
    """
    facts, own = TrainingFacts.from_json(saved["facts"]), loading_facts(loading, model.config)
    if facts.lora is not None and own["lora"] is not None:
        check_same_scaling(facts.lora, own["lora"])
    before = _without_dtypes(facts.quantization)
    now = _without_dtypes(own["quantization"])
    if before and now and before != now:
        raise ValueError(
            f"The checkpoint's adapters were trained with `quantization` = {before}, and this run has {now}: set it as"
            " in the run that wrote the checkpoint."
        )
    configs = [json.loads(saved["config"]), json.loads(model.config.to_json_string(use_diff=False))]
    for name in ("rope_parameters", "sliding_window"):
        before, now = (config.get(name) for config in configs)
        if before != now:
            rank_zero_warn(
                f"The checkpoint was trained with `{name}` = {before}, and this run has {now}, which changes results:"
                " set `context_extension` and `model_config` as in that run, unless the change is intended."
            )


def _check_same_weights(stored: Mapping[str, Any] | None, own: Mapping[str, Any]) -> None:
    """Compare names and shapes; ``stored`` is None if a strategy that shards the weights has removed them."""
    shapes = {name: tuple(value.shape) for name, value in own.items() if isinstance(value, torch.Tensor)}
    given = {name: tuple(value.shape) for name, value in (stored or {}).items() if isinstance(value, torch.Tensor)}
    if stored is None or given == shapes:
        return
    name = min(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
    raise ValueError(
        f"The checkpoint is of another model: the shape of '{name}' is {given.get(name, 'missing')} in it and"
        f" {shapes.get(name, 'missing')} in this run. Set `model` as in the run that wrote it."
    )
