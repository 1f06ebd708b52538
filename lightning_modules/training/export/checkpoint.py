"""A Lightning checkpoint as a folder that transformers loads, without data or a GPU."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lightning_modules.models.adapters import (
    add_adapters,
    check_same_scaling,
    frozen_fingerprint,
    same_frozen,
    trained_state,
)
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.methods import extend_config
from lightning_modules.models.loading import load_backbone
from lightning_modules.models.tokenization.tokenizer import load_tokenizer, tokenizer_from_json, tokenizer_to_json
from lightning_modules.training.checkpoints.io import CheckedCheckpointIO, check_checkpoint, check_integrity
from lightning_modules.training.checkpoints.sharded import is_sharded, load_whole
from lightning_modules.training.export.facts import Adapters, ExportDType, ExportOptions, TrainingFacts, loading_facts
from lightning_modules.training.export.model import check_export, check_replaceable, export_model

KEY = "longce_export"
"""Key in a checkpoint of what `stored` returns."""

FINGERPRINT = "frozen_fingerprint"
"""Key in a checkpoint of the hash of the frozen weights that it leaves out."""


def stored(
    model: PreTrainedModel, facts: TrainingFacts, tokenizer: PreTrainedTokenizerFast | None = None
) -> dict[str, str]:
    """Return what a checkpoint needs for an export in addition to the weights, as JSON.

    The model is without the wrapper of peft; the tokenizer is given if the facts cannot name it.
    """
    return {
        **({} if tokenizer is None else {"tokenizer": tokenizer_to_json(tokenizer)}),
        "config": model.config.to_json_string(use_diff=False),
        "generation_config": json.dumps(model.generation_config.to_dict(), default=str),
        "facts": facts.to_json(),
    }


def check_same_model(saved: Mapping[str, str], model: PreTrainedModel, loading: Mapping[str, Any]) -> None:
    """Check that a checkpoint's weights mean in this run what they meant in the run that wrote it.

    Rotation and windows may differ on purpose, to try an extension on a trained model: that is a warning.

    Raises:
        ValueError: If the adapters would be scaled otherwise, or lie over weights that are quantized otherwise.
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


def check_resumable(checkpoint: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if a checkpoint file holds too little to resume training."""
    if "state_dict" in checkpoint:  # Lightning has taken the weights out of a sharded one
        missing = {"optimizer_states", "lr_schedulers", "loops"}.difference(checkpoint)
        if missing or "fit_loop" not in checkpoint["loops"]:
            raise ValueError(
                f"The checkpoint lacks {', '.join(sorted(missing)) or 'the state of training'}, without which training"
                " does not resume: it holds weights alone. `longce fit` takes what `longce export` makes of it."
            )


def check_same_weights(stored: Mapping[str, Any] | None, own: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if a checkpoint is that of another model; strategies that divide it have taken it out."""
    shapes = {name: tuple(value.shape) for name, value in own.items() if isinstance(value, torch.Tensor)}
    found = {name: tuple(value.shape) for name, value in (stored or {}).items() if isinstance(value, torch.Tensor)}
    if stored is None or found == shapes:
        return
    name = min(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    raise ValueError(
        f"The checkpoint is that of another model: '{name}' has the shape {found.get(name, 'of nothing')} there and"
        f" {shapes.get(name, 'of nothing')} in this run. Give the `model` settings of the run that wrote it."
    )


def export_checkpoint(
    checkpoint: str,
    output_dir: str,
    *,
    adapters: Adapters = "merged",
    dtype: ExportDType = "auto",
    legacy_rope_keys: bool = False,
    eabf_as_abf: bool = False,
    tokenizer: str | None = None,
    tokenizer_revision: str | None = None,
) -> Path:
    """Export the model of a checkpoint of ``longce fit`` to a folder that transformers loads.

    Args:
        checkpoint: What ``longce fit`` wrote: a file, or a folder of FSDP2, whose weights are then gathered in memory.
        output_dir: Folder to write. An earlier export there is replaced once the new one is complete; a folder of
            anything else is refused.
        adapters: This one and the next three: see `callbacks.HuggingFaceExport`.
        dtype: As there.
        legacy_rope_keys: As there.
        eabf_as_abf: As there.
        tokenizer: Hub id or local folder; by default that of the training.
        tokenizer_revision: Branch, tag or commit of the tokenizer on the hub.

    Returns:
        The folder.

    Raises:
        ValueError: If the checkpoint cannot be read, is not of this package, or does not allow what is asked for.
    """
    options = ExportOptions(adapters, dtype, legacy_rope_keys, eabf_as_abf)
    folder = Path(output_dir).expanduser()
    check_replaceable(folder)
    content = _read(checkpoint)
    facts = TrainingFacts.from_json(content[KEY]["facts"])
    module = _build(content[KEY], facts)
    check_export(module["backbone"].model, folder, options, facts)
    chosen = _tokenizer(tokenizer, tokenizer_revision, facts, content[KEY].get("tokenizer"))
    if FINGERPRINT in content and not options.kept:
        module["backbone"] = _load_base(facts, content[FINGERPRINT])
    _fill(module, content["state_dict"], partly=FINGERPRINT in content)
    export_model(module["backbone"].model, chosen, folder, options=options, facts=facts)
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
    if file.is_dir() and not is_sharded(file):
        raise ValueError(
            f"`checkpoint` '{path}' is a folder, and no checkpoint of FSDP2: name one of the checkpoints in it."
        )
    check_checkpoint(path if "://" in path else file, "checkpoint")
    if file.is_dir():
        check_integrity(file, "checkpoint")
        content = load_whole(file)
    else:
        content = CheckedCheckpointIO().load_checkpoint(file)
    if KEY not in content:
        raise ValueError(
            f"`checkpoint` '{path}' was not written by this version's `longce fit`, which stores how the model is"
            " built: resume from it for a step (`longce fit --ckpt_path`), or name another one."
        )
    return content


def _build(saved: Mapping[str, str], facts: TrainingFacts) -> nn.ModuleDict:
    """Return the model without memory for its weights."""
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
    backbone = load_backbone(
        facts.base_model,
        context_extension=changes.pop("context_extension", None),
        model_config=changes,
        revision=facts.revision,
        dtype=facts.dtype,
        lora=facts.lora,
    )
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
