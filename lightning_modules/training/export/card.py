"""The model card: how an exported model came about, and how it is loaded."""

import json
from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from lightning_modules.models.context_extension.rope_types import register_rope_types
from lightning_modules.training.export.facts import TrainingFacts
from lightning_modules.training.export.options import ExportOptions
from lightning_modules.training.export.rope import guard_keys, own_type_name


def model_card(
    facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions, *, has_tokenizer: bool = True
) -> str:
    """Return the ``README.md`` of an export, given the ``config.json`` of the model, or of the base of adapters."""
    base = facts.base_model or "random weights"
    revision = f", revision `{facts.revision}`" if facts.revision else ""
    half = config["dtype"] in ("bfloat16", "float16")
    rounded = ", to which they were rounded after training" if half and (options.dtype != "auto" or facts.lora) else ""
    weights = "" if options.kept else f" Weights are stored in {config['dtype']}{rounded}."
    published = {name: value for name, value in json.loads(facts.published().to_json()).items() if value}
    sections = [
        f"# {base.rstrip('/').rpartition('/')[2]}, trained by longce",
        f"A {'LoRA adapter for' if options.kept else 'model made from'} `{base}`{revision}.{weights}",
        "## How to load it",
        *_loading(facts, config, options, has_tokenizer),
        "## Compatibility",
        *_compatibility(facts, config, options),
        f"## Training\n\n```json\n{json.dumps(published, indent=2)}\n```",
    ]
    public = facts.base_model and not facts.base_is_local
    header = ModelCardData(
        library_name="peft" if options.kept else "transformers",
        pipeline_tag="text-generation",
        base_model=facts.base_model if public else None,
        base_model_relation=("adapter" if options.kept else "finetune") if public else None,
        datasets=[facts.dataset] if facts.dataset else None,
        tags=["longce", "long-context", *(["lora"] if options.kept else [])],
    )
    text = "\n\n".join([f"---\n{header.to_yaml()}\n---", *sections]) + "\n"
    return str(ModelCard(text, ignore_metadata_errors=True))


def _loading(facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions, has_tokenizer: bool) -> list[str]:
    own, parts = own_type_name(config), []
    lines = ["import transformers"]
    if own is not None:
        parts.append(
            f"The model's RoPE type `{own}` is longce's own: install longce (`pip install -e .` in a checkout of its"
            f" repository). Without the two lines that register it, loading stops with `KeyError: '{own}'`."
        )
        name = register_rope_types.__name__
        lines += [f"from {register_rope_types.__module__} import {name}  # of the package longce", "", f"{name}()"]
    lines += ["", 'folder = "."  # where this file is']
    if options.kept:
        lines.insert(0, "from peft import PeftModel")
        more = f", revision={json.dumps(facts.revision)}" if facts.revision else ""
        if facts.quantization:
            settings = ", ".join(f"{name}={value!r}" for name, value in facts.quantization.items())
            more += f", quantization_config=transformers.BitsAndBytesConfig({settings})"
        base = f"{json.dumps(facts.base_model)}, config=config{more}"
        lines += [
            'config = transformers.AutoConfig.from_pretrained(f"{folder}/base")  # not the base model\'s own',
            f"base = transformers.AutoModelForCausalLM.from_pretrained({base})",
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    else:
        lines.append("model = transformers.AutoModelForCausalLM.from_pretrained(folder)")
    if has_tokenizer:
        lines.append("tokenizer = transformers.AutoTokenizer.from_pretrained(folder)")
    parts.append("\n".join(["```python", *lines, "```"]))
    if options.kept and facts.base_is_local:
        parts.append(f"`{facts.base_model}` is a folder of the machine that trained: replace it by yours.")
    return parts


def _compatibility(facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions) -> list[str]:
    parts = ["transformers 5, and programs that load models through it."]
    if (own := own_type_name(config)) is not None:
        parts = [f"Programs that run the lines above. vLLM and the command line of lm-eval cannot compute `{own}`."]
    if options.eabf_as_abf:
        parts.append(
            "The model was trained with EABF and is exported as plain ABF with the same RoPE base: attention is not"
            " scaled, so that **logits differ from those of the trained model beyond the original length**."
        )
    if options.legacy_rope_keys:
        parts.append("The config also has the keys `rope_theta` and `rope_scaling` for transformers 4.45 and later.")
    elif (guard := guard_keys(config)) and guard.items() <= config.items():
        parts.append(
            f"transformers 4 does not know `rope_parameters` and stops at `{next(iter(guard))}: null` in the config."
        )
    if options.kept and facts.changes:
        parts.append(
            "Whatever puts the adapter on the base model with its own config (`--lora-modules` of vLLM, `peft=` of"
            " lm-eval) **computes other numbers, without an error**: the adapter was trained on the config in `base/`."
            " Export merged for such readers."
        )
    return parts
