"""LongCE in a LightningModule of your own, with a trainer and data of your own: python lightning_module.py."""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import longce


class MyModule(LightningModule):
    """A module as you may have one: the only new line is that with `apply_longce`."""

    def __init__(self, name, lr=1e-5):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype="float32").train()
        longce.apply_longce(self.model, context_length=2048, stride=512)
        self.lr = lr

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main():
    name = "HuggingFaceTB/SmolLM2-1.7B"
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = []
    for book in sorted(Path("books").glob("*.txt")):
        ids = tokenizer(book.read_text(), return_tensors="pt")["input_ids"][:, :8192]
        rows.append({"input_ids": ids, "labels": ids})
    trainer = Trainer(max_epochs=1, precision="bf16-mixed", default_root_dir="runs/lightning")
    module = MyModule(name)
    trainer.fit(module, DataLoader(rows, batch_size=None, shuffle=True))
    module.model.save_pretrained("trained")
    tokenizer.save_pretrained("trained")


if __name__ == "__main__":
    main()
