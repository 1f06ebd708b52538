"""The model card of an export: how the model was trained, and how to load it."""

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
    """Write the ``README.md`` of an export; ``config`` is that of the model, or of the adapters' base."""
    base = facts.base_model or "random weights"
    revision = f", revision `{facts.revision}`" if facts.revision else ""
    half = config["dtype"] in ("bfloat16", "float16")
    rounded = ", rounded after training" if half and (options.dtype != "auto" or facts.lora) else ""
    weights = "" if options.kept else f" Weights are stored in {config['dtype']}{rounded}."
    published = {name: value for name, value in json.loads(facts.published().to_json()).items() if value}
    sections = [
        f"# {base.rstrip('/').rpartition('/')[2]}, trained with longce",
        f"A {'LoRA adapter for' if options.kept else 'model trained from'} `{base}`{revision}.{weights}",
        "## How to load it",
        *_describe_loading(facts, config, options, has_tokenizer),
        "## Compatibility",
        *_describe_compatibility(facts, config, options),
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


def _describe_loading(
    facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions, has_tokenizer: bool
) -> list[str]:
    own, paragraphs = own_type_name(config), []
    lines = ["import transformers"]
    if own is not None:
        paragraphs.append(
            f"The model's RoPE type `{own}` is part of longce: install longce (`pip install -e .` in a checkout of its"
            f" repository). Without the two lines that register it, loading fails with `KeyError: '{own}'`."
        )
        name = register_rope_types.__name__
        lines += [f"from {register_rope_types.__module__} import {name}  # from the longce package", "", f"{name}()"]
    lines += ["", 'folder = "."  # the folder with this file']
    if options.kept:
        lines.insert(0, "from peft import PeftModel")
        more = f", revision={json.dumps(facts.revision)}" if facts.revision else ""
        if facts.quantization:
            settings = ", ".join(f"{name}={value!r}" for name, value in facts.quantization.items())
            more += f", quantization_config=transformers.BitsAndBytesConfig({settings})"
        base = f"{json.dumps(facts.base_model)}, config=config{more}"
        lines += [
            'config = transformers.AutoConfig.from_pretrained(f"{folder}/base")  # instead of the base model\'s config',
            f"base = transformers.AutoModelForCausalLM.from_pretrained({base})",
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    else:
        lines.append("model = transformers.AutoModelForCausalLM.from_pretrained(folder)")
    if has_tokenizer:
        lines.append("tokenizer = transformers.AutoTokenizer.from_pretrained(folder)")
    paragraphs.append("\n".join(["```python", *lines, "```"]))
    if options.kept and facts.base_is_local:
        paragraphs.append(f"`{facts.base_model}` is a folder of the training machine: replace it with yours.")
    return paragraphs


def _describe_compatibility(facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions) -> list[str]:
    paragraphs = ["transformers 5, and programs that load models with it."]
    if (own := own_type_name(config)) is not None:
        paragraphs = [f"Programs that run the lines above. vLLM and the lm-eval command line do not support `{own}`."]
    if options.eabf_as_abf:
        paragraphs.append(
            "The model was trained with EABF and exported as plain ABF with the same RoPE base. Attention is not"
            " scaled, so **logits differ from those of the trained model beyond the original length**."
        )
    if options.legacy_rope_keys:
        paragraphs.append("The config also has `rope_theta` and `rope_scaling`, for transformers 4.45 and later.")
    elif (guard := guard_keys(config)) and guard.items() <= config.items():
        paragraphs.append(
            f"transformers 4 does not support `rope_parameters` and fails at `{next(iter(guard))}: null` in the config."
        )
    if options.kept and facts.changes:
        paragraphs.append(
            "Programs that add the adapter to the base model with its original config (`--lora-modules` of vLLM,"
            " `peft=` of lm-eval) **compute other results, without an error**: the adapter was trained with the"
            " config in `base/`. Export a merged model for them."
        )
    return paragraphs
