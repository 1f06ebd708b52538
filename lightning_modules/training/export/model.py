"""A trained model as a folder that transformers, and what builds on it, loads."""

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_modules.models.adapters import changes_base, is_peft_model
from lightning_modules.training.export.card import model_card
from lightning_modules.training.export.facts import TrainingFacts
from lightning_modules.training.export.options import ExportOptions
from lightning_modules.training.export.rope import as_abf, guard_keys, legacy_rope_keys
from lightning_modules.utilities.files import atomic_folder, writable_folder
from lightning_modules.utilities.locks import exclusive

if TYPE_CHECKING:  # peft imports bitsandbytes
    from peft import PeftModel

SHARD_SIZE: int | str = "5GB"
"""Largest file of weights."""

MARKER = "longce_export.json"
"""File with the facts of the training and the names of the files that the export wrote."""

log = logging.getLogger(__name__)


def export_model(
    model: "PreTrainedModel | PeftModel",
    tokenizer: PreTrainedTokenizerBase | None,
    output_dir: Path,
    *,
    options: ExportOptions,
    facts: TrainingFacts,
) -> None:
    """Write model, tokenizer and model card; the folder appears whole or not at all, and the model is not changed.

    The weights must all be in this process, and main memory is needed for another copy of them.
    """
    check_export(model, output_dir, options, facts)
    with _export_folder(output_dir, facts.published().to_json()) as folder:
        base = model.get_base_model() if is_peft_model(model) else model
        config = _export_config(base.config, options)
        if options.kept:
            _write_adapters(model, config, folder, facts)
        else:
            _write_merged(model, config, folder, options)
        file = folder / "base/config.json" if options.kept else folder / "config.json"
        content = json.loads(file.read_text())  # to which is added what readers of other versions need
        content |= legacy_rope_keys(content) if options.legacy_rope_keys else guard_keys(content)
        file.write_text(json.dumps(content, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        shown = facts if options.kept else facts.published()
        card = model_card(shown, content, options, has_tokenizer=tokenizer is not None)
        (folder / "README.md").write_text(card, encoding="utf-8")
    if options.eabf_as_abf:
        log.warning("As plain ABF, the export's logits differ from the model's beyond the original length.")
    log.info("Exported to %s.", output_dir)


def check_export(
    model: "PreTrainedModel | PeftModel", output_dir: Path, options: ExportOptions, facts: TrainingFacts
) -> None:
    """Raise a ``ValueError`` for what `export_model` would refuse; before training rather than after it."""
    check_replaceable(output_dir)
    base = model.get_base_model() if is_peft_model(model) else model
    if facts.base_is_local and Path(str(facts.base_model)) == output_dir.resolve():
        raise ValueError(f"`output_dir` '{output_dir}' is the model that this one is made from: name another folder.")
    if options.kept:
        _check_kept(model, facts)
    elif getattr(base.config, "quantization_config", None) is not None:
        raise ValueError(
            "`adapters: merged` would have to round to the few bits of a quantized base, and give other numbers than"
            " were trained: set `adapters` to 'kept'."
        )
    elif is_peft_model(model):
        from lightning_modules.training.export.weights import check_mergeable  # imports peft

        check_mergeable(model)
    config = _export_config(base.config, options)
    if options.legacy_rope_keys:
        legacy_rope_keys(config.to_dict())
    writable_folder(output_dir.resolve().parent, remedy="Name another `output_dir`.")


def _check_kept(model: "PreTrainedModel | PeftModel", facts: TrainingFacts) -> None:
    if not is_peft_model(model):
        raise ValueError("`adapters: kept`: the model has none. Set it to 'merged', which saves the whole model.")
    start = model.peft_config[model.active_adapter].init_lora_weights
    if changes_base({"init_lora_weights": start}):
        raise ValueError(
            f"`adapters: kept`: with `init_lora_weights: {start}` the base model was changed as well, and adapters"
            " alone would give other numbers. Set `adapters` to 'merged'."
        )
    if facts.base_model is None:
        raise ValueError(
            "`adapters: kept`: the weights under the adapters came from no hub id or folder, so that they cannot be"
            " loaded again. Set `adapters` to 'merged'."
        )


def _export_config(config: PreTrainedConfig, options: ExportOptions) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    if options.eabf_as_abf:
        config.rope_parameters = as_abf(config.rope_parameters)
    return config


def _write_merged(
    model: "PreTrainedModel | PeftModel", config: PreTrainedConfig, folder: Path, options: ExportOptions
) -> None:
    base = model.get_base_model() if is_peft_model(model) else model
    # One type for all: weights that are trained beside half-precision ones may be in float32.
    dtype = base.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    from lightning_modules.training.export.weights import drop_tied, merged_weights  # imports peft

    weights = merged_weights(model, dtype)
    if drop_tied(weights, base):
        config.get_text_config(decoder=True).tie_word_embeddings = False
        config.tie_word_embeddings = False
    with torch.device("meta"):
        shell: Any = type(base)(config)
    shell.to(dtype)  # the type that the config will name
    shell.generation_config = _generation_config(base)
    shell.save_pretrained(folder, state_dict=weights, max_shard_size=SHARD_SIZE)


def _write_adapters(model: Any, config: PreTrainedConfig, folder: Path, facts: TrainingFacts) -> None:
    model.save_pretrained(folder, save_embedding_layers=False)
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    path = facts.base_model
    # Not a name that would be loaded with the base model's own config, without an error.
    content["base_model_name_or_path"] = f"{path} with the config in base/, see README.md" if facts.changes else path
    content["revision"] = facts.revision
    file.write_text(json.dumps(content, indent=2) + "\n")
    if facts.quantization is not None:
        del config.quantization_config  # it describes the stored weights, which are not quantized
    config.architectures = [type(model.get_base_model()).__name__]
    config.save_pretrained(folder / "base")


def _generation_config(base: Any) -> GenerationConfig:
    """Return the model's own, unless it contradicts itself, which transformers reads but refuses to save."""
    try:
        base.generation_config.validate(strict=True)
    except ValueError as error:
        log.warning("The model's generation config is left out, as it is not valid: %s", error)
        return GenerationConfig.from_model_config(base.config)
    return base.generation_config


def check_replaceable(folder: Path) -> None:
    """Raise a ``ValueError`` unless a folder is missing, empty, or an earlier export without anything added to it."""
    if folder.is_file():
        raise ValueError(f"`output_dir` of the export, '{folder}', is a file: name a new folder.")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    try:
        written = {MARKER, *json.loads((folder / MARKER).read_text())["files"]}
    except (OSError, ValueError, KeyError):
        written = set()
    if added := sorted(files - written):
        raise ValueError(
            f"`output_dir` of the export, '{folder}', exists and is not an earlier export, which would be replaced"
            f" (it holds '{added[0]}'): name a new folder, or remove this one."
        )


@contextmanager
def _export_folder(target: Path, facts: str) -> Iterator[Path]:
    """Yield a folder that replaces an earlier export, or the one that a link leads to, as the block ends.

    Several processes that export to one folder wait for each other. The marker keeps the facts, a JSON text.
    """
    try:
        with exclusive(target.resolve()), atomic_folder(target.resolve(), replace=True) as folder:
            yield folder
            files = [path for path in folder.rglob("*") if path.is_file()]
            content = {"training": json.loads(facts), "files": sorted(str(path.relative_to(folder)) for path in files)}
            (folder / MARKER).write_text(json.dumps(content, indent=2) + "\n")
            for path in files:
                path.chmod((folder / MARKER).stat().st_mode)  # safetensors ignores the umask
            check_replaceable(target)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"The export to '{target}' could not be written: {error}. What was there before still is. Free some room,"
            " or name another `output_dir`."
        ) from error
