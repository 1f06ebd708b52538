"""Train a tiny model on a long-context task in short texts, and evaluate it there and in longer ones.

    python benchmarks/recall_tasks.py --output runs/recall_tasks

Two layers learn the answers of `passkey` prompts as `longce evaluate` writes them, for some minutes on one CPU thread.
``longce evaluate`` then scores this model and one with random weights. Both reports are in the output folder.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.commands.evaluate import evaluate
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.tasks.questions.prompter import ForcedAnswer, Prompter
from lightning_modules.tasks.questions.registry import find_tasks

TOKENS_PER_STEP = 4096


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/recall_tasks")
    parser.add_argument("--cpu_seconds", type=float, default=300, help="Of training.")
    parser.add_argument("--trained_lengths", type=int, nargs="+", default=[144, 176, 208])
    parser.add_argument("--lengths", type=int, nargs="+", default=[144, 176, 208, 256, 320, 416, 832])
    parser.add_argument("--samples", type=int, default=8, help="Questions of each length and depth.")
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--mode", default="generate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(options.output)
    tokenizer = make_tokenizer()
    for name, seconds in (("random", 0.0), ("trained", options.cpu_seconds)):
        torch.manual_seed(0)
        backbone = make_model(tokenizer, max(options.trained_lengths))
        train(backbone, Prompter(tokenizer), options.trained_lengths, seconds)
        backbone.base_model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        settings = {"tasks": ["passkey"], "lengths": options.lengths, "samples": options.samples}
        text = evaluate(
            str(folder / name), str(folder / f"{name}_scores"), depths=options.depths, mode=options.mode, **settings
        )
        print(f"\n{name}\n{text}")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with single digits on some questions."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings = {"special_tokens": ["</s>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + 1, **settings)
    plain.train_from_iterator([""], trainer)
    count_bytes = Prompter(PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>"))
    examples = [find_tasks(["passkey"])[0].example(count_bytes, 4096, index, seed=99) for index in range(4)]
    texts = [example.prompt + example.answer_prefix + example.target for example in examples]
    plain.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, min_frequency=1, **settings))
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")


def make_model(tokenizer: PreTrainedTokenizerFast, longest: int) -> Backbone:
    config = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": longest,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return load_backbone(ModelConfig(model_config=config, dtype="float32"))


def train(backbone: Backbone, prompter: Prompter, lengths: list[int], seconds: float) -> None:
    """Train in steps of about the same number of tokens, each with new questions of one length; the rate falls to 0."""
    optimizer = torch.optim.AdamW(backbone.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    rng, started, step, asked = random.Random(0), time.process_time(), 0, 0
    backbone.train()
    while (share := (time.process_time() - started) / max(seconds, 1e-9)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * max(0.02, 1 - share)
        length = rng.choice(lengths)
        rows = [forced(prompter, length, asked + row) for row in range(max(1, TOKENS_PER_STEP // length))]
        log_likelihood = backbone(batch := answers_only(rows, prompter.tokenizer.eos_token_id))
        loss = -log_likelihood.sum() / batch["labels"].ne(IGNORE_INDEX).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(backbone.parameters(), 1.0)
        optimizer.step()
        step, asked = step + 1, asked + len(rows)
        if step % 100 == 0:
            print(
                f"step {step}, {time.process_time() - started:.0f} CPU s: loss {loss.item():.3f}",
                file=sys.stderr,
                flush=True,
            )
    backbone.eval()


def forced(prompter: Prompter, length: int, index: int) -> ForcedAnswer:
    """Return a question with another seed than in the evaluation."""
    example = find_tasks(["passkey"])[0].example(prompter, length, index, seed=1)
    return prompter.force(example.prompt, example.answer_prefix, example.target, example.answers)


def answers_only(rows: list[ForcedAnswer], end: int) -> dict:
    """Return a batch that trains on the answers and on the end of the text after them."""
    ids = [torch.tensor([*row.input_ids, end]) for row in rows]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for row, question in enumerate(rows):
        written = slice(question.answer_start, len(ids[row]))  # with the space before the answer
        labels[row, written] = tokens[row, written]
    return {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens),
        "document_boundaries": [[0, len(row)] for row in ids],
    }


if __name__ == "__main__":
    main()
