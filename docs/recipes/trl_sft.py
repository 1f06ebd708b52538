"""LongCE in TRL's SFTTrainer: python trl_sft.py, or torchrun --nproc_per_node 8 trl_sft.py."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from trl import SFTConfig, SFTTrainer

import longce


class LongCETrainer(SFTTrainer):
    """TRL's trainer, whose training takes the loss of the model; its evaluation and metrics stay."""

    def compute_loss(self, model, inputs, **options):
        if model.training:  # TRL computes cross entropy from the log-likelihoods of its own head
            return Trainer.compute_loss(self, model, inputs, **options)
        return super().compute_loss(model, inputs, **options)


def main():
    name = "Qwen/Qwen3-1.7B"
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    longce.apply_longce(model, context_length=4096, stride=1024)
    arguments = SFTConfig(
        "runs/trl",
        assistant_only_loss=True,  # `messages`; the chat template marks what the assistant says
        max_length=32768,  # the default of 1024 tokens is shorter than the short context
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        bf16=True,
        learning_rate=1e-5,
        logging_steps=1,
    )
    trainer = LongCETrainer(
        model,
        arguments,
        train_dataset=load_dataset("json", data_files="chats.jsonl", split="train"),
        processing_class=AutoTokenizer.from_pretrained(name),
    )
    trainer.train()
    trainer.save_model("trained")


if __name__ == "__main__":
    main()
