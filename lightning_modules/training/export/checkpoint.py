"""A Lightning checkpoint as a folder that transformers loads, without data or a GPU."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from lightning_modules.models.adapters import add_adapters, frozen_fingerprint, same_frozen, trained_state
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.config import ModelConfig
from lightning_modules.models.context_extension.methods import extend_config
from lightning_modules.models.loading import load_backbone
from lightning_modules.models.tokenization.tokenizer import load_tokenizer, tokenizer_from_json
from lightning_modules.training.checkpoint_contents import EXPORT_KEY, FINGERPRINT_KEY
from lightning_modules.training.checkpoints.io import CheckedCheckpointIO, check_checkpoint, check_integrity
from lightning_modules.training.checkpoints.sharded import load_whole
from lightning_modules.training.export.facts import TrainingFacts
from lightning_modules.training.export.model import check_export, check_replaceable, export_model
from lightning_modules.training.export.options import ExportOptions


def export_checkpoint(
    checkpoint: str,
    output_dir: str,
    *,
    tokenizer: str | None = None,
    tokenizer_revision: str | None = None,
    **options: Any,
) -> Path:
    """Export the model of a checkpoint of ``longce fit`` to a folder that transformers loads, and return the folder.

    An earlier export there is replaced once the new one is complete; a folder of anything else is refused. The weights
    in a folder of FSDP2 are gathered in memory. By default the tokenizer is that of the training.
    """
    asked = ExportOptions(**options)
    folder = Path(output_dir).expanduser()
    check_replaceable(folder)
    content = _read(checkpoint)
    facts = TrainingFacts.from_json(content[EXPORT_KEY]["facts"])
    module = _build(content[EXPORT_KEY], facts)
    check_export(module["backbone"].model, folder, asked, facts)
    chosen = _tokenizer(tokenizer, tokenizer_revision, facts, content[EXPORT_KEY].get("tokenizer"))
    if FINGERPRINT_KEY in content and not asked.kept:
        module["backbone"] = _load_base(facts, content[FINGERPRINT_KEY])
    _fill(module, content["state_dict"], partly=FINGERPRINT_KEY in content)
    export_model(module["backbone"].model, chosen, folder, options=asked, facts=facts)
    return folder


def _tokenizer(
    name: str | None, revision: str | None, facts: TrainingFacts, made: str | None
) -> PreTrainedTokenizerFast:
    """Return the one asked for, or that of the training (in the checkpoint if the data module made it), as stored."""
    if name is not None:
        return load_tokenizer(name, revision=revision, trimmed_offsets=True)
    if made is not None:
        return tokenizer_from_json(made)
    if facts.tokenizer is None:
        raise ValueError("The checkpoint names no tokenizer: give one by `--tokenizer`.")
    try:
        return load_tokenizer(facts.tokenizer, revision=facts.tokenizer_revision, trimmed_offsets=True)
    except ValueError as error:
        raise ValueError(f"{error} Name another tokenizer than that of the training by `--tokenizer`.") from error


def _read(path: str) -> dict[str, Any]:
    """Load the checkpoint; the weights in a file stay on disk until they are used."""
    file = Path(path).expanduser()
    check_checkpoint(path if "://" in path else file, "checkpoint")
    if file.is_dir():
        check_integrity(file, "checkpoint")
        content = load_whole(file)
    else:
        content = CheckedCheckpointIO().load_checkpoint(file)
    if EXPORT_KEY not in content:
        raise ValueError(
            f"`checkpoint` '{path}' was not written by this version's `longce fit`, which stores how the model is"
            " built: resume from it for a step (`longce fit --ckpt_path`), or name another one."
        )
    return content


def _build(saved: Mapping[str, str], facts: TrainingFacts) -> nn.ModuleDict:
    """Build the model without memory for its weights."""
    content = json.loads(saved["config"])
    model_type = content.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"Models of type '{model_type}' run code of their repository, which a checkpoint does not hold:"
            " export at the end of training, by the callback `HuggingFaceExport`."
        )
    config = CONFIG_MAPPING[model_type].from_dict(content)
    extend_config(config, None)  # makes its RoPE type known
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype, attn_implementation="sdpa")
        model.generation_config = GenerationConfig.from_dict(json.loads(saved["generation_config"]))
        if facts.lora is not None:
            # Starting values are computed from weights, which come from the checkpoint.
            model = add_adapters(model, {**facts.lora, "init_lora_weights": False})
            model.peft_config[model.active_adapter].init_lora_weights = facts.lora.get("init_lora_weights", True)
    return nn.ModuleDict({"backbone": Backbone(model)})  # as the training module names its weights


def _load_base(facts: TrainingFacts, fingerprint: str) -> Backbone:
    """Load the base model with fresh adapters, for a checkpoint that holds only what was trained."""
    if facts.base_is_local and not Path(str(facts.base_model)).exists():
        raise ValueError(
            f"The checkpoint's adapters were trained on the model in '{facts.base_model}', which is not there now: put"
            " it back or link it there, or export with `--adapters kept`, which needs no base model."
        )
    changes = dict(facts.changes)
    extension = changes.pop("context_extension", None)
    settings: dict[str, Any] = {"revision": facts.revision, "dtype": facts.dtype, "lora": facts.lora}
    backbone = load_backbone(ModelConfig(facts.base_model, changes, extension, **settings))
    if not same_frozen(fingerprint, frozen_fingerprint(nn.ModuleDict({"backbone": backbone}))):
        raise ValueError(
            f"The checkpoint's adapters were trained on other weights than those of '{facts.base_model}' now: export"
            " where that model is as it was, or with `--adapters kept`."
        )
    return backbone


def _fill(module: nn.ModuleDict, weights: Mapping[str, torch.Tensor], *, partly: bool) -> None:
    """Put the weights of a checkpoint in place, which may be only those that were trained."""
    wanted = trained_state(module, module.state_dict()) if partly else module.state_dict()
    first: dict[nn.Parameter, str] = {}  # tied weights are stored under their first name
    names = [(name, first.setdefault(p, name)) for name, p in module.named_parameters(remove_duplicate=False)]
    tied = {name: weights[own] for name, own in names if name not in weights and own in weights}
    report = module.load_state_dict({**weights, **tied}, strict=False, assign=True)
    missing = [name for name in report.missing_keys if name in wanted]
    if missing or report.unexpected_keys:
        raise ValueError(
            "The weights of the checkpoint are not those of the model that it describes:"
            f" '{[*missing, *report.unexpected_keys][0]}' is {'missing' if missing else 'unknown'}. Name another one."
        )
