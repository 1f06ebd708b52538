"""LongCE in Hugging Face's Trainer: python hf_trainer.py, or torchrun --nproc_per_node 8 hf_trainer.py."""

from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import longce


def main():
    name = "HuggingFaceTB/SmolLM2-1.7B"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    longce.apply_longce(model, context_length=2048, stride=512)

    # One document in each row; the collator packs the rows of a batch, whose `position_ids` restart.
    books = load_dataset("text", data_files="books/*.txt", sample_by="document", split="train")
    rows = books.map(lambda book: {"input_ids": tokenizer(book["text"])["input_ids"][:8192]}, remove_columns="text")
    arguments = TrainingArguments(
        "runs/trainer",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_steps=200,
        bf16=True,
        learning_rate=1e-5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=50,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows.select(range(2)),
        data_collator=DataCollatorWithFlattening(),
        processing_class=tokenizer,
    )
    texts = {path.name: path.read_text() for path in Path("validation").glob("*.txt")}
    trainer.add_callback(longce.LongPPLCallback(trainer, texts, evaluator="Qwen/Qwen3-8B", max_tokens=8192))
    trainer.train()
    trainer.save_model("trained")


if __name__ == "__main__":
    main()
