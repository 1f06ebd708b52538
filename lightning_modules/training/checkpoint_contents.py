"""Contents that a checkpoint has beside Lightning's own, and what must agree when it is loaded."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedModel

from lightning_modules.models.adapters import check_same_scaling, same_frozen, trained_state
from lightning_modules.models.config import ModelConfig
from lightning_modules.models.tokenization.tokenizer import tokenizer_to_json
from lightning_modules.training.checkpoints.io import RUN_ID
from lightning_modules.training.export.facts import TrainingFacts, loading_facts, made_tokenizer
from lightning_modules.training.fsdp import saves_parts

EXPORT_KEY = "longce_export"
"""Key in a checkpoint of what an export needs in addition to the weights, as JSON texts."""

FINGERPRINT_KEY = "frozen_fingerprint"
"""Key in a checkpoint of the hash of the frozen weights that it leaves out."""

TRAINED_KEY = "trained_weights"
"""Key of the names of the weights in a checkpoint that leaves out frozen weights under adapters."""


def add_contents(checkpoint: dict[str, Any], module: Any, facts: TrainingFacts, fingerprint: str | None) -> None:
    """Add what resuming and exporting a `LongContextLM` need, and leave out frozen weights under adapters.

    These are 27 GB for a 7B model. The fingerprint is None if nothing is left out.
    """
    model = module.backbone.base_model
    if module.run_id is not None:
        checkpoint[RUN_ID] = module.run_id
    checkpoint[EXPORT_KEY] = {
        "config": model.config.to_json_string(use_diff=False),
        "generation_config": json.dumps(model.generation_config.to_dict(), default=str),
        "facts": facts.to_json(),
    }
    if (tokenizer := made_tokenizer(getattr(module.trainer, "datamodule", None))) is not None:
        checkpoint[EXPORT_KEY]["tokenizer"] = tokenizer_to_json(tokenizer)
    if fingerprint is not None:
        checkpoint[TRAINED_KEY] = [name for name, part in module.named_parameters() if part.requires_grad]
        checkpoint[FINGERPRINT_KEY] = fingerprint
        if not saves_parts(module.trainer.strategy):
            checkpoint["state_dict"] = trained_state(module, checkpoint["state_dict"])


def check_contents(checkpoint: Mapping[str, Any], module: Any, fingerprint: str | None) -> None:
    """Check the weights of a checkpoint before a `LongContextLM` loads them; without a fingerprint, it has them all."""
    if EXPORT_KEY in checkpoint:
        _check_same_model(checkpoint[EXPORT_KEY], module.backbone.base_model, module.loading)
    if module._trainer and module.trainer.state.fn == "fit" and "state_dict" in checkpoint:
        missing = {"optimizer_states", "lr_schedulers", "loops"}.difference(checkpoint)
        if missing or "fit_loop" not in checkpoint["loops"]:
            raise ValueError(
                f"The checkpoint lacks {', '.join(sorted(missing)) or 'the state of training'}, without which training"
                " does not resume: it holds weights alone. `longce fit` takes what `longce export` makes of it."
            )
    if fingerprint is None:
        _check_same_weights(checkpoint.get("state_dict"), module.state_dict())
        return
    # Strategies that shard the model have taken the weights out already.
    found = checkpoint.get("state_dict", checkpoint.get(TRAINED_KEY, ()))
    trained = {name: part for name, part in module.named_parameters() if part.requires_grad}
    if missing := trained.keys() - set(found):
        raise ValueError(
            f"The checkpoint lacks {len(missing)} of the weights that `model.lora` trains ({min(missing)}, ..):"
            " give the `lora` of the run that wrote it."
        )
    if "state_dict" in checkpoint:
        _check_same_weights({name: found[name] for name in trained}, trained)
    if not same_frozen(checkpoint.get(FINGERPRINT_KEY), fingerprint):
        raise ValueError(
            "The checkpoint's adapters were trained on other weights than those of"
            f" '{module.loading.pretrained_model_name_or_path}' (or on the same in another `dtype`): give the"
            " model, revision and dtype of that run."
        )


def _check_same_model(saved: Mapping[str, str], model: PreTrainedModel, loading: ModelConfig) -> None:
    """Check that weights mean in this run what they meant in the run that wrote them.

    Rotation and windows may differ on purpose, to try an extension on a trained model: that is a warning.
    """
    facts, own = TrainingFacts.from_json(saved["facts"]), loading_facts(loading, model.config)
    if facts.lora is not None and own["lora"] is not None:
        check_same_scaling(facts.lora, own["lora"])
    before, now = (
        {name: value for name, value in (quantization or {}).items() if "dtype" not in name and "storage" not in name}
        for quantization in (facts.quantization, own["quantization"])
    )
    if before and now and before != now:
        raise ValueError(
            f"The checkpoint's adapters were trained over weights quantized by {before}, and this run has {now}: give"
            " the `quantization` of the run that wrote it."
        )
    configs = [json.loads(saved["config"]), json.loads(model.config.to_json_string(use_diff=False))]
    for name in ("rope_parameters", "sliding_window"):
        before, now = (config.get(name) for config in configs)
        if before != now:
            rank_zero_warn(
                f"The checkpoint was trained with `{name}` = {before}, and this run computes with {now}: without the"
                " `context_extension` and `model_config` of that run its numbers are others."
            )


def _check_same_weights(stored: Mapping[str, Any] | None, own: Mapping[str, Any]) -> None:
    """Compare names and shapes, unless a strategy that shards the weights has taken them out."""
    shapes = {name: tuple(value.shape) for name, value in own.items() if isinstance(value, torch.Tensor)}
    found = {name: tuple(value.shape) for name, value in (stored or {}).items() if isinstance(value, torch.Tensor)}
    if stored is None or found == shapes:
        return
    name = min(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    raise ValueError(
        f"The checkpoint is that of another model: '{name}' has the shape {found.get(name, 'of nothing')} there and"
        f" {shapes.get(name, 'of nothing')} in this run. Give the `model` settings of the run that wrote it."
    )
