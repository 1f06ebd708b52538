"""Exports of trained adapters."""

import torch

from lightning_modules.export.model import export_model
from lightning_modules.export.options import ExportOptions
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.training.facts import TrainingFacts
from tests.conftest import tiny_model


def export_adapters(folder, tokenizer):
    """Export adapters of a model with an extended context to ``kept`` and, merged, to ``merged``; return the model."""
    tiny_model("llama", len(tokenizer)).save_pretrained(folder / "base")
    extension = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}
    model = load_backbone(ModelConfig(str(folder / "base"), extension, lora={"target_modules": ["q_proj"]})).model
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    facts = TrainingFacts(str(folder / "base"), base_is_local=True, changes=extension)
    for kind in ("kept", "merged"):
        export_model(model, tokenizer, folder / kind, options=ExportOptions(kind), facts=facts)
    return model.eval()
