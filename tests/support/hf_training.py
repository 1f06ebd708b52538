"""Training by Hugging Face's Trainer in one of several processes."""

import json

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import longce


def train(root, context_length, stride):
    """Train and evaluate as ``settings.json`` says, and write the weights and the log of each process."""
    settings = json.loads((root / "settings.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float64)
    longce.apply_longce(model, context_length=context_length, stride=stride)
    rows = Dataset.from_list(settings["rows"])
    trainer = Trainer(
        model,
        TrainingArguments(root / "run", **settings["arguments"]),
        train_dataset=rows,
        eval_dataset=rows.select(range(2)),
        data_collator=DataCollatorWithFlattening(),
        processing_class=AutoTokenizer.from_pretrained(root / "model"),
    )
    sizes = {"context_length": 16, "stride": 8, "alpha": 0.5, "beta": -6.0}
    trainer.add_callback(longce.LongPPLCallback(trainer, settings["texts"], settings["evaluator"], **sizes))
    trainer.train()
    rank = trainer.args.process_index
    torch.save(model.state_dict(), root / f"weights-{rank}.pt")
    (root / f"log-{rank}.json").write_text(json.dumps(trainer.state.log_history))
