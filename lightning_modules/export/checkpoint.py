"""Export of a Lightning checkpoint to a folder that transformers loads, without data or a GPU."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from lightning_modules.export.gguf import export_gguf
from lightning_modules.export.model import check_export, check_replaceable, export_model
from lightning_modules.export.options import ExportOptions
from lightning_modules.export.upload import check_upload, upload_export
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.extend import extend_config
from lightning_modules.models.loading.adapters import add_adapters, frozen_fingerprint, trained_state
from lightning_modules.models.loading.config import ModelConfig, is_gguf
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.tokenization.tokenizer import load_tokenizer, tokenizer_from_json
from lightning_modules.training.checkpoint_contents import EXPORT_KEY, FINGERPRINT_KEY
from lightning_modules.training.checkpoints.io import (
    CheckedCheckpointIO,
    check_checkpoint,
    check_integrity,
    newest_checkpoint,
)
from lightning_modules.training.checkpoints.sharded import is_sharded, load_unsharded
from lightning_modules.training.facts import TrainingFacts

log = logging.getLogger(__name__)


def export_checkpoint(
    checkpoint: str,
    output_dir: str,
    *,
    tokenizer: str | None = None,
    tokenizer_revision: str | None = None,
    **options: Any,
) -> Path:
    """Export the model of a checkpoint of ``longce fit`` to a folder that transformers loads, and return the folder.

    For the folder of a run, it is the newest complete checkpoint. A GGUF file of llama.cpp can be exported as well.

    An earlier export in the folder is replaced once the new one is complete; other folders are refused. A sharded
    checkpoint is gathered in main memory. The default tokenizer is that of the training.
    """
    export_options = ExportOptions(**options)
    folder = Path(output_dir).expanduser()
    if is_gguf(checkpoint):
        if tokenizer is not None or tokenizer_revision is not None:
            raise ValueError(f"'{checkpoint}' is a GGUF file, which has its own tokenizer: remove `--tokenizer`.")
        return export_gguf(checkpoint, folder, export_options)
    check_replaceable(folder)
    check_upload(export_options)
    # 1. Build the model without memory, and check what can be known without its weights.
    content = _read_checkpoint(checkpoint)
    facts = TrainingFacts.from_json(content[EXPORT_KEY]["facts"])
    module = _build_on_meta(content[EXPORT_KEY], facts)
    check_export(module["backbone"].model, folder, export_options, facts)
    saved_tokenizer = content[EXPORT_KEY].get("tokenizer")
    chosen_tokenizer = _choose_tokenizer(tokenizer, tokenizer_revision, facts, saved_tokenizer)
    # 2. Assign the weights. A merged model also needs frozen base weights, which the checkpoint omits.
    if FINGERPRINT_KEY in content and not export_options.kept:
        module["backbone"] = _load_base(facts, content[FINGERPRINT_KEY])
    # A subclass of `LongContextLM` may have trained other parts, which are not exported.
    weights = {name: weight for name, weight in content["state_dict"].items() if name.startswith("backbone.")}
    _assign_weights(module, weights, trained_only=FINGERPRINT_KEY in content)
    # 3. Write the folder.
    export_model(module["backbone"].model, chosen_tokenizer, folder, options=export_options, facts=facts)
    upload_export(folder, export_options)
    return folder


def _choose_tokenizer(
    name: str | None, revision: str | None, facts: TrainingFacts, saved: str | None
) -> PreTrainedTokenizerFast:
    """Return the tokenizer with this name, or the one used in training, which is ``saved`` if it had no path."""
    if name is not None:
        return load_tokenizer(name, revision=revision, trimmed_offsets=True)
    if saved is not None:
        return tokenizer_from_json(saved)
    if facts.tokenizer is None:
        raise ValueError("The checkpoint does not specify a tokenizer: set one with `--tokenizer`.")
    return load_tokenizer(facts.tokenizer, revision=facts.tokenizer_revision, trimmed_offsets=True)


def _read_checkpoint(path: str) -> dict[str, Any]:
    """Load the checkpoint; weights in a file stay on disk until they are used."""
    file = Path(path).expanduser()
    if file.is_dir() and not is_sharded(file):
        newest = newest_checkpoint(file, resume=False)
        if newest is None:
            raise ValueError(f"`checkpoint` '{path}' has no complete checkpoint: give a file, or the folder of a run.")
        log.info("The newest checkpoint is %s.", newest)
        file = newest
    check_checkpoint(path if "://" in path else file, "checkpoint")
    if file.is_dir():
        check_integrity(file, "checkpoint")
        content = load_unsharded(file)
    else:
        content = CheckedCheckpointIO().load_checkpoint(file)
    if EXPORT_KEY not in content:
        raise ValueError(
            f"`checkpoint` '{path}' was not written by this version of `longce fit`, so it lacks the model's config:"
            " resume from it for one step (`longce fit --ckpt_path`), or use another one."
        )
    return content


def _build_on_meta(saved: Mapping[str, str], facts: TrainingFacts) -> nn.ModuleDict:
    """Build the model on the meta device, without memory for its weights."""
    content = json.loads(saved["config"])
    model_type = content.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"Models of type '{model_type}' run code from their repository, which a checkpoint does not contain:"
            " export at the end of training, with the callback `HuggingFaceExport`."
        )
    config = CONFIG_MAPPING[model_type].from_dict(content)
    extend_config(config, None)  # registers its RoPE type
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype, attn_implementation="sdpa")
        model.generation_config = GenerationConfig.from_dict(json.loads(saved["generation_config"]))
        if facts.lora is not None:
            # Without initial values: some are computed from weights, and the checkpoint replaces them.
            model = add_adapters(model, {**facts.lora, "init_lora_weights": False})
            model.peft_config[model.active_adapter].init_lora_weights = facts.lora.get("init_lora_weights", True)
    return nn.ModuleDict({"backbone": Backbone(model)})  # the prefix of weight names in checkpoints


def _load_base(facts: TrainingFacts, fingerprint: str) -> Backbone:
    """Load the base model with new adapters, for a checkpoint that contains trained weights only."""
    changes = dict(facts.changes)
    extension = changes.pop("context_extension", None)
    settings: dict[str, Any] = {"revision": facts.revision, "dtype": facts.dtype, "lora": facts.lora}
    # Adapters that changed the base model's weights do not come here: their checkpoints have all weights.
    log.info("The adapters will be merged into '%s'; `--adapters kept` does not need the base model.", facts.base_model)
    backbone = load_backbone(ModelConfig(facts.base_model, changes, extension, **settings))
    if fingerprint != frozen_fingerprint(nn.ModuleDict({"backbone": backbone})):
        raise ValueError(
            f"The weights of '{facts.base_model}' have changed since the checkpoint's adapters were trained: restore"
            " them, or export with `--adapters kept`."
        )
    return backbone


def _assign_weights(module: nn.ModuleDict, weights: Mapping[str, torch.Tensor], *, trained_only: bool) -> None:
    """Assign the weights of a checkpoint, which contains all weights or only the trained ones."""
    required = trained_state(module, module.state_dict()) if trained_only else module.state_dict()
    first: dict[nn.Parameter, str] = {}  # tied weights are stored under their first name
    names = [(name, first.setdefault(p, name)) for name, p in module.named_parameters(remove_duplicate=False)]
    tied = {name: weights[stored] for name, stored in names if name not in weights and stored in weights}
    report = module.load_state_dict({**weights, **tied}, strict=False, assign=True)
    missing = [name for name in report.missing_keys if name in required]
    if missing or report.unexpected_keys:
        raise ValueError(
            "The weights of the checkpoint do not match its model:"
            f" '{[*missing, *report.unexpected_keys][0]}' is {'missing' if missing else 'unknown'}. Use another one."
        )
