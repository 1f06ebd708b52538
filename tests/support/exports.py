"""Adapters that do something, their exports, and what the card of an export loads."""

import re

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lightning_modules.export.model import export_model
from lightning_modules.export.options import ExportOptions
from lightning_modules.training.facts import TrainingFacts
from tests.conftest import tiny_model

IDS = torch.arange(60).unsqueeze(0)


TARGETS = ["q_proj", "up_proj"]


def adapted(*, tied=False, model_type="llama", dtype=torch.float32, **lora):
    """A model with adapters that do something, as after a training."""
    model = tiny_model(model_type, tie_word_embeddings=tied, dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **{"target_modules": TARGETS, **lora}))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model.eval()


def export(model, folder, facts=None, **options):
    export_model(model, None, folder, options=ExportOptions(**options), facts=facts or TrainingFacts())
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def run_card(folder, monkeypatch):
    """What the Python lines of a model card define, run as they stand."""
    monkeypatch.chdir(folder)
    names = {}
    exec(re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1], names)
    return names


@torch.no_grad()
def logits(model):
    return model(IDS).logits
