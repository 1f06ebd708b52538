"""Export of a trained model to a folder that transformers loads."""

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_modules.export.card import model_card
from lightning_modules.export.options import ExportOptions
from lightning_modules.export.rope import as_abf, guard_keys
from lightning_modules.models.loading.adapters import CONFIG_IN_BASE, changes_base, is_peft_model
from lightning_modules.training.facts import TrainingFacts
from lightning_modules.utilities.files import atomic_folder, writable_folder
from lightning_modules.utilities.locks import exclusive

if TYPE_CHECKING:  # peft imports bitsandbytes
    from peft import PeftModel

SHARD_SIZE: int | str = "5GB"
"""Largest size of a weight file."""

EXPORT_MARKER = "longce_export.json"
"""File with the facts about the training and the names of the exported files."""

log = logging.getLogger(__name__)


def export_model(
    model: "PreTrainedModel | PeftModel",
    tokenizer: PreTrainedTokenizerBase | None,
    output_dir: Path,
    *,
    options: ExportOptions,
    facts: TrainingFacts,
) -> None:
    """Write model, tokenizer and model card to a folder atomically, without changing the model.

    The weights must not be sharded, and main memory needs room for a copy of them.
    """
    check_export(model, output_dir, options, facts)
    with export_folder(output_dir, facts.published().to_json()) as folder:
        if options.kept:
            _write_adapters(model, folder, options, facts)
            file = folder / "base/config.json"
        else:
            _write_merged(model, folder, options)
            file = folder / "config.json"
        content = json.loads(file.read_text())
        content |= guard_keys(content)
        file.write_text(json.dumps(content, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        card_facts = facts if options.kept else facts.published()
        card = model_card(card_facts, content, options, has_tokenizer=tokenizer is not None)
        (folder / "README.md").write_text(card, encoding="utf-8")
    if options.eabf_as_abf:
        log.warning("As plain ABF, the export's logits differ from the model's beyond the original length.")
    log.info("Exported to %s.", output_dir)


def check_export(
    model: "PreTrainedModel | PeftModel", output_dir: Path, options: ExportOptions, facts: TrainingFacts
) -> None:
    """Raise the ``ValueError`` that `export_model` would raise, before training instead of after it."""
    check_replaceable(output_dir)
    base = model.get_base_model() if is_peft_model(model) else model
    if facts.base_is_local and Path(str(facts.base_model)) == output_dir.resolve():
        raise ValueError(f"`output_dir` '{output_dir}' is the base model's folder: use another one.")
    if options.kept:
        _check_kept(model, facts)
    elif getattr(base.config, "quantization_config", None) is not None:
        raise ValueError(
            "`adapters: merged` would round the adapters to the precision of the quantized base, which changes results:"
            " set `adapters` to 'kept'."
        )
    if options.eabf_as_abf:
        as_abf(base.config.rope_parameters)  # refuses other RoPE types
    writable_folder(output_dir.resolve().parent, remedy="Use another `output_dir`.")


def _check_kept(model: "PreTrainedModel | PeftModel", facts: TrainingFacts) -> None:
    if not is_peft_model(model):
        raise ValueError("`adapters: kept`: the model has no adapters. Set it to 'merged' to save the whole model.")
    start = model.peft_config[model.active_adapter].init_lora_weights
    if changes_base({"init_lora_weights": start}):
        raise ValueError(
            f"`adapters: kept`: `init_lora_weights: {start}` also changes the base model, so adapters alone would give"
            " different results. Set `adapters` to 'merged'."
        )
    if facts.base_model is None:
        raise ValueError(
            "`adapters: kept`: the base weights did not come from a hub id or folder, so they cannot be loaded again."
            " Set `adapters` to 'merged'."
        )


def _write_merged(model: "PreTrainedModel | PeftModel", folder: Path, options: ExportOptions) -> None:
    from lightning_modules.export.merge import merged_copy  # imports peft

    # One dtype for all weights: fully trained ones of a half-precision model may be float32.
    base = model.get_base_model() if is_peft_model(model) else model
    merged = merged_copy(model, base.dtype if options.dtype == "auto" else getattr(torch, options.dtype))
    if options.eabf_as_abf:
        merged.config.rope_parameters = as_abf(merged.config.rope_parameters)
    try:
        merged.generation_config.validate(strict=True)
    except ValueError as error:  # transformers would save nothing
        log.warning("The model's generation config is invalid and was not exported: %s", error)
        merged.generation_config = GenerationConfig.from_model_config(merged.config)
    merged.save_pretrained(folder, max_shard_size=SHARD_SIZE)


def _write_adapters(model: Any, folder: Path, options: ExportOptions, facts: TrainingFacts) -> None:
    model.save_pretrained(folder, save_embedding_layers=False)
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    path = facts.base_model
    # Not a loadable name: readers would silently use the base model's original config.
    content["base_model_name_or_path"] = f"{path}{CONFIG_IN_BASE}" if facts.changes else path
    content["revision"] = facts.revision
    file.write_text(json.dumps(content, indent=2) + "\n")
    config = copy.deepcopy(model.get_base_model().config)
    if options.eabf_as_abf:
        config.rope_parameters = as_abf(config.rope_parameters)
    if facts.quantization is not None:
        del config.quantization_config  # it describes the stored weights, which are not quantized
    config.architectures = [type(model.get_base_model()).__name__]
    config.save_pretrained(folder / "base")


def check_replaceable(folder: Path) -> None:
    """Raise a ``ValueError`` unless a folder does not exist, is empty, or is an earlier export without other files."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    try:
        written = {EXPORT_MARKER, *json.loads((folder / EXPORT_MARKER).read_text())["files"]}
    except (OSError, ValueError, KeyError):
        written = set()
    added = [folder.name] if folder.is_file() else sorted(files - written)
    if added:
        raise ValueError(
            f"`output_dir` of the export, '{folder}', is or contains files that no export has written, such as"
            f" '{added[0]}': use a new folder, or remove this one."
        )


@contextmanager
def export_folder(target: Path, facts: str) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``target`` at the end of the block, or the folder that it links to.

    Processes that export to the same folder wait for each other. The facts, a JSON text, are stored in the marker.
    """
    try:
        with exclusive(target.resolve()), atomic_folder(target.resolve(), replace=True) as folder:
            yield folder
            files = [path for path in folder.rglob("*") if path.is_file()]
            content = {"training": json.loads(facts), "files": sorted(str(path.relative_to(folder)) for path in files)}
            (folder / EXPORT_MARKER).write_text(json.dumps(content, indent=2) + "\n")
            for path in files:
                path.chmod((folder / EXPORT_MARKER).stat().st_mode)  # safetensors ignores the umask
            check_replaceable(target)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"The export to '{target}' could not be written: {error}. An earlier export there is unchanged. Free some"
            " space, or use another `output_dir`."
        ) from error
