"""Training by TRL's SFTTrainer in one of several processes."""

import json

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

import longce
from tests.support.recipes import load_recipe


def train(root, context_length, stride):
    """Train as ``settings.json`` says, and write the weights and the log of each process."""
    settings = json.loads((root / "settings.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float64)
    longce.apply_longce(model, context_length=context_length, stride=stride)
    trainer = load_recipe("trl_sft").LongCETrainer(
        model,
        SFTConfig(root / "run", **settings["arguments"]),
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=AutoTokenizer.from_pretrained(root / "model"),
    )
    trainer.train()
    rank = trainer.args.process_index
    torch.save(model.state_dict(), root / f"weights-{rank}.pt")
    (root / f"log-{rank}.json").write_text(json.dumps(trainer.state.log_history))
