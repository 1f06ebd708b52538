"""Measure how much a tiny model recalls beyond its length, extended by each method, before and after training.

For each seed a base model learns the synthetic language of `RecallDataModule` in sequences of 64 tokens (the settings
of `configs/quickstart/base.yaml`, but for four layers). Every method extends it to 512 tokens, and it is asked
questions in documents of each length: the document ends in ``recall FIELD``, the field got its value in its first half
and is not named again, and the answer counts if it is the likeliest of all words. Then the model is trained further in
sequences of 512 tokens, and asked again.

    python benchmarks/extended_contexts.py --seeds 3 --steps 150

This is not natural language: one fact is looked up by its name. RoPE bases fit the size of the model, not 500,000.
"""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer, seed_everything

from datamodules import RecallDataModule
from datamodules.packing.sequences import collate_rows, make_row
from datamodules.recall import GET, SET, recall_documents, recall_tokenizer
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.objectives import CrossEntropy, LongCE

SHORT, LONG, BASE = 64, 512, 10_000.0
LENGTHS = (64, 128, 256, 512)
LAYERS = 4  # two of which EABF does not change
CONFIG = Path(__file__).parent.parent / "configs" / "quickstart" / "base.yaml"
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "pi": {},
    "abf": {"base": BASE},
    "eabf": {"base": BASE},
    "ntk": {},
    "ntk_by_parts": {"beta_fast": 4.0},
    "yarn": {"beta_fast": 4.0},
}
PATTERNS = ("streaming_llm", "lm_infinite", "rerope", "self_extend", "dual_chunk")  # that need no training


def extension(method: str) -> dict[str, Any]:
    return {"method": method, "original_length": SHORT, "target_length": LONG, **METHODS.get(method, {})}


def questions(count: int, length: int) -> Iterator[torch.Tensor]:
    """Yield ``[length]`` token ids of documents whose last token is the answer."""
    tokenizer = recall_tokenizer()
    tokenizer.eos_token = None
    found = 0
    for text in recall_documents(100 * count, length=length - 4, slot=5, seed=900 + length):
        words = text.split()
        early = words[: len(words) // 2]
        facts = [(early[t + 1], early[t + 2]) for t in range(len(early) - 2) if early[t] == SET]
        facts = [(field, value) for field, value in facts if field not in words[len(words) // 2 :]]
        if facts:
            yield torch.tensor(tokenizer(f"{text} {GET} {' '.join(facts[0])}").input_ids)
            found += 1
        if found == count:
            return


@torch.no_grad()
def accuracy(backbone: Backbone, count: int, length: int) -> float:
    """Return the fraction of answers that are the likeliest word."""
    rows = [make_row(ids.numpy(), torch.tensor([len(ids)]).numpy()) for ids in questions(count, length)]
    right = 0
    with eval_mode(backbone):
        for start in range(0, len(rows), 25):
            batch = collate_rows(rows[start : start + 25])
            hidden = backbone.decoder(input_ids=batch["input_ids"], use_cache=False).last_hidden_state[:, -2]
            right += int((backbone.logits(hidden).argmax(-1) == batch["input_ids"][:, -1]).sum())
    return right / len(rows)


def train(model: LongContextLM, data: RecallDataModule, steps: int, folder: Path) -> None:
    Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        default_root_dir=folder,
    ).fit(model, data)


def optimizer(rate: float) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.999), weight_decay=0.01)


def base_model(seed: int, folder: Path, steps: int) -> Path:
    seed_everything(seed)
    config = yaml.safe_load(CONFIG.read_text())["model"]["model_config"] | {"num_hidden_layers": LAYERS}
    model = LongContextLM(model_config=config, objective=CrossEntropy(), optimizer=optimizer(0.005))
    data = RecallDataModule(sequence_length=SHORT, slot=5, train_documents=32 * steps, batch_size=32, seed=10 + seed)
    train(model, data, steps, folder)
    model.backbone.base_model.save_pretrained(folder / f"base-{seed}")
    return folder / f"base-{seed}"


def further(path: Path, method: str, seed: int, steps: int, folder: Path) -> Backbone:
    seed_everything(seed)
    sizes = {"context_length": SHORT, "stride": SHORT}
    model = LongContextLM(str(path), LongCE(), **sizes, context_extension=extension(method), optimizer=optimizer(0.002))
    data = RecallDataModule(sequence_length=LONG, train_documents=4 * steps, batch_size=4, seed=20 + seed)
    train(model, data, steps, folder)
    return model.backbone


def measure(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, int, float]]:
    """Yield method, stage, length and accuracy for each seed."""
    for seed in range(options.seeds):
        path = base_model(seed, folder, options.base_steps)
        for method in options.methods:
            stages = {"extended": load_backbone(ModelConfig(str(path), context_extension=extension(method)))}
            if options.steps:
                stages["trained"] = further(path, method, seed, options.steps, folder)
            for stage, backbone in stages.items():
                for length in LENGTHS:
                    yield method, stage, length, accuracy(backbone, options.questions, length)
            print(f"seed {seed}: {method} done", flush=True)


def table(title: str, results: dict[tuple[str, str, int], list[float]], stage: str) -> str:
    rows = [f"{title}", "| method |" + "".join(f" {length} |" for length in LENGTHS), "|---|" + "---|" * len(LENGTHS)]
    for method in dict.fromkeys(key[0] for key in results):
        cells = [results[method, stage, length] for length in LENGTHS]
        rows.append(f"| {method} |" + "".join(f" {mean(c):.2f} ({min(c):.2f}-{max(c):.2f}) |" for c in cells))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base_steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=150, help="Of further training in long rows; 0 for none.")
    parser.add_argument("--questions", type=int, default=200, help="Per length.")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=[*METHODS, *PATTERNS])
    options = parser.parse_args()
    results: dict[tuple[str, str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method, stage, length, share in measure(options, Path(folder)):
            results.setdefault((method, stage, length), []).append(share)
    print(f"\nAccuracy by length in tokens, mean of {options.seeds} seeds (lowest-highest)\n")
    print(table("extended, not trained", results, "extended"))
    if options.steps:
        print("\n" + table(f"after {options.steps} steps of LongCE in rows of {LONG}", results, "trained"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    main()
