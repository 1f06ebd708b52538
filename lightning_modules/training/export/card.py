"""The model card: how an exported model came about, and how it is loaded."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from lightning_modules.models.context_extension.rope_types import register_rope_types
from lightning_modules.training.export.facts import TrainingFacts
from lightning_modules.training.export.options import ExportOptions
from lightning_modules.training.export.rope import guard_keys, own_type_name


def model_card(
    facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions, *, has_tokenizer: bool = True
) -> str:
    """The ``README.md`` of an export.

    Args:
        facts: Of the training.
        config: Content of the ``config.json`` of the model, or of the base of adapters.
        options: Of the export.
        has_tokenizer: Whether the folder holds a tokenizer.
    """
    base = facts.base_model or "random weights"
    sections = [
        f"---\n{yaml.safe_dump(_front_matter(facts, options), sort_keys=False)}---",
        f"# {base.rstrip('/').rpartition('/')[2]}, trained by longce",
        f"A {'LoRA adapter for' if options.kept else 'model made from'} `{base}`{_revision(facts)}.",
        *_extension(facts),
        *_weights(facts, config, options),
        f"## How to load it\n\n{_loading(facts, config, options, has_tokenizer)}",
        f"## Who computes it right\n\n{_readers(facts, config, options)}",
    ]
    if facts.steps is not None:
        sections.append(f"## Training\n\n{_table(_training(facts))}")
    if facts.metrics:
        rows = {f"`{name}`": f"{value:.6g}" for name, value in sorted(facts.metrics.items())}
        sections.append(f"## Last evaluation, after {facts.metrics_step} steps\n\n{_table(rows)}")
    if facts.versions:
        sections.append("Made with " + ", ".join(f"{name} {number}" for name, number in facts.versions.items()) + ".")
    return "\n\n".join(sections) + "\n"


def _loading_code(facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions, has_tokenizer: bool) -> str:
    """The Python lines that load an export, to be run in its folder."""
    auto = ", AutoTokenizer" if has_tokenizer else ""
    lines = []
    if own_type_name(config) is not None:
        name = register_rope_types.__name__
        lines += [f"from {register_rope_types.__module__} import {name}  # of the package longce", "", f"{name}()"]
    folder = 'folder = "."  # where this file is'
    if not options.kept:
        imports = [f"from transformers import AutoModelForCausalLM{auto}"]
        body = [folder, "model = AutoModelForCausalLM.from_pretrained(folder)"]
    else:
        bits = ", BitsAndBytesConfig" if facts.quantization else ""
        imports = [
            "from peft import PeftModel",
            f"from transformers import AutoConfig, AutoModelForCausalLM{auto}{bits}",
        ]
        more = f", revision={json.dumps(facts.revision)}" if facts.revision else ""
        if facts.quantization:
            settings = ", ".join(f"{name}={value!r}" for name, value in facts.quantization.items())
            more += f", quantization_config=BitsAndBytesConfig({settings})"
        body = [
            folder,
            'config = AutoConfig.from_pretrained(f"{folder}/base")'
            + ("  # the base model's own config will not do" if facts.changes else ""),
            f"base = AutoModelForCausalLM.from_pretrained({json.dumps(facts.base_model)}, config=config{more})",
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    if has_tokenizer:
        body.append("tokenizer = AutoTokenizer.from_pretrained(folder)")
    return "\n".join([*imports, *lines, "", *body])


def _front_matter(facts: TrainingFacts, options: ExportOptions) -> dict[str, Any]:
    matter: dict[str, Any] = {
        "library_name": "peft" if options.kept else "transformers",
        "pipeline_tag": "text-generation",
    }
    if facts.base_model and not facts.base_is_local:
        matter |= {"base_model": facts.base_model, "base_model_relation": "adapter" if options.kept else "finetune"}
    if facts.dataset:
        matter["datasets"] = [facts.dataset]
    return {**matter, "tags": ["longce", "long-context", *(["lora"] if options.kept else [])]}


def _revision(facts: TrainingFacts) -> str:
    return f", revision `{facts.revision}`" if facts.revision else ""


def _extension(facts: TrainingFacts) -> list[str]:
    extension = facts.changes.get("context_extension")
    text = []
    if extension is not None:
        more = {name: value for name, value in extension.items() if value is not None}
        method, original, target = (more.pop(name) for name in ("method", "original_length", "target_length"))
        text.append(
            f"Its context was extended from {original} to {target} tokens by the method `{method}`"
            + (f" ({_settings(more)})" if more else "")
            + "."
        )
    if values := {name: value for name, value in facts.changes.items() if name != "context_extension"}:
        text.append(f"In its config these values were replaced: {_settings(values)}.")
    return text


def _weights(facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions) -> list[str]:
    if options.kept:
        return []
    half = config["dtype"] in ("bfloat16", "float16")
    rounded = ", to which they were rounded after training" if half and (options.dtype != "auto" or facts.lora) else ""
    return [f"Weights are stored in {config['dtype']}{rounded}."]


def _loading(facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions, has_tokenizer: bool) -> str:
    parts = []
    if (own := own_type_name(config)) is not None:
        parts.append(
            f"The model's RoPE type `{own}` is longce's own: install longce (`pip install -e .` in a checkout of its"
            f" repository). Without the two lines that register it, loading stops with `KeyError: '{own}'`."
        )
    parts.append(f"```python\n{_loading_code(facts, config, options, has_tokenizer)}\n```")
    if options.kept and facts.base_is_local:
        parts.append(f"`{facts.base_model}` is a folder of the machine that trained: put in its place where yours is.")
    return "\n\n".join(parts)


def _readers(facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions) -> str:
    parts = ["transformers 5, and what loads models through it."]
    if (own := own_type_name(config)) is not None:
        parts = [
            f"What runs the lines above. vLLM and the command line of lm-eval do not, and cannot compute `{own}`;"
            " lm-eval's `HFLM` takes the loaded model."
        ]
    if options.eabf_as_abf:
        parts.append(
            "The model was trained with EABF and is exported as plain ABF with the same RoPE base: attention is not"
            " scaled, so that **logits differ from those of the trained model beyond the original length**."
        )
    if options.legacy_rope_keys:
        parts.append(
            "The config has the keys `rope_theta` and `rope_scaling` for transformers 4.45 and later, too. Where that"
            " does not know the tokenizer's class, `PreTrainedTokenizerFast` loads it."
        )
    elif (guard := guard_keys(config)) and guard.items() <= config.items():
        parts.append(
            f"transformers 4 knows no `rope_parameters` and stops at `{next(iter(guard))}: null` in the config."
        )
    if options.kept and facts.changes:
        parts.append(
            "Whatever loads the base model with its own config and puts the adapter on it (`--lora-modules` of vLLM,"
            " `peft=` of lm-eval) **computes other numbers, without an error**: the adapter was trained on the config"
            " in `base/`. `AutoPeftModelForCausalLM` would do so, too, so that `adapter_config.json` names no base that"
            " it could load. Export merged for such readers."
        )
    return "\n\n".join(parts)


def _training(facts: TrainingFacts) -> dict[str, str]:
    contexts = None
    if facts.context_length is not None:
        contexts = f"K = {facts.context_length}, d = {facts.stride} tokens"
    data = f"{facts.data} ({facts.dataset})" if facts.dataset else facts.data
    rows = {
        "objective": _named(facts.objective),
        "short contexts": contexts,
        "optimizer": _named(facts.optimizer),
        "schedule": _named(facts.lr_scheduler),
        "adapters": _settings(facts.lora) if facts.lora else None,
        "quantised base": _settings(facts.quantization) if facts.quantization else None,
        "data": data,
        "tokens per row": facts.sequence_length,
        "tokens per step": facts.tokens_per_step,
        "steps": facts.steps,
        "precision": facts.precision,
    }
    return {name: str(value) for name, value in rows.items() if value is not None}


def _named(settings: Mapping[str, Any] | None) -> str | None:
    if settings is None:
        return None
    more = {name: value for name, value in settings.items() if name != "name"}
    return settings["name"] + (f" ({_settings(more)})" if more else "")


def _settings(settings: Mapping[str, Any]) -> str:
    texts = {
        name: _named(value) if isinstance(value, Mapping) and "name" in value else value
        for name, value in settings.items()
    }
    return ", ".join(f"{name} = {text}" for name, text in texts.items()).replace("|", "\\|")


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
