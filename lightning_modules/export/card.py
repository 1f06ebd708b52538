"""The model card of an export: how the model was trained, and how to load it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from lightning_modules.export.options import ExportOptions
from lightning_modules.export.rope import guard_keys
from lightning_modules.models.context_extension.rope_types import ROPE_TYPES, register_rope_types
from lightning_modules.training.facts import TrainingFacts

TEMPLATE = Path(__file__).with_name("card.md")


def model_card(
    facts: TrainingFacts, config: Mapping[str, Any], options: ExportOptions, *, has_tokenizer: bool = True
) -> str:
    """Write the ``README.md`` of an export; ``config`` is that of the model, or of the adapters' base."""
    base = facts.base_model or "random weights"
    rope = config.get("rope_parameters") or {}
    # Of some models, a set for each kind of layer.
    types = [rope.get("rope_type")] + [value.get("rope_type") for value in rope.values() if isinstance(value, dict)]
    own_types = [rope_type for rope_type in types if rope_type in ROPE_TYPES]
    half = config["dtype"] in ("bfloat16", "float16")
    arguments = f"{json.dumps(facts.base_model)}, config=config"
    if facts.revision:
        arguments += f", revision={json.dumps(facts.revision)}"
    if facts.quantization:
        settings = ", ".join(f"{name}={value!r}" for name, value in facts.quantization.items())
        arguments += f", quantization_config=transformers.BitsAndBytesConfig({settings})"
    public = facts.base_model and not facts.base_is_local
    header = ModelCardData(
        library_name="peft" if options.kept else "transformers",
        pipeline_tag="text-generation",
        base_model=facts.base_model if public else None,
        base_model_relation=("adapter" if options.kept else "finetune") if public else None,
        datasets=[facts.dataset] if facts.dataset else None,
        tags=["longce", "long-context", *(["lora"] if options.kept else [])],
    )
    published = {name: value for name, value in json.loads(facts.published().to_json()).items() if value}
    card = ModelCard.from_template(
        header,
        str(TEMPLATE),
        facts=facts,
        config=config,
        options=options,
        title=base.rstrip("/").rpartition("/")[2],
        base=base,
        rounded=half and (options.dtype != "auto" or facts.lora),
        own_type=own_types[0] if own_types else None,
        register=register_rope_types,
        base_arguments=arguments,
        has_tokenizer=has_tokenizer,
        guard=next(iter(guard_keys(config)), None),
        published=json.dumps(published, indent=2),
    )
    return f"{card}\n"
