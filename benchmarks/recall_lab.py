"""Train tiny models on the synthetic language in plain loops without Lightning, for `equal_compute.py`."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from datamodules.recall import GET, recall_documents, recall_tokenizer
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import long_cross_entropy, long_perplexity
from lightning_modules.models import short_context
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import short_precision
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.objectives import CrossEntropy, Objective

LENGTH, ROWS, FAR = (
    512,
    4,
    128,
)  # tokens of a sequence, sequences of a step, and the distance K + d from which on a value is far


@dataclass(frozen=True)
class Setting:
    """An objective to compare, built for a number of steps, and its short pass."""

    objective: Callable[[int], Objective]
    context_length: int = 64
    stride: int = 64
    window_share: float = 1.0
    short_dtype: Any = None
    gamma: float = 5.0  # of stored weights
    scorer: str = "evaluator"  # of stored weights; or `base`, the model before training
    counts_scoring: bool = True  # of stored weights, as a part of training


CROSS_ENTROPY = Setting(lambda _: CrossEntropy())


# ---------------------------------------------------------------------------------------------------------------- data


@cache
def token_ids() -> dict[str, int]:
    return recall_tokenizer().get_vocab()


def documents(count: int, *, length: int, slot: int, seed: int) -> Tensor:
    """Return ``[count, length]`` int64 token ids, ``<bos>`` first."""
    ids = token_ids()
    texts = recall_documents(count, length=length - 1, slot=slot, seed=seed)
    return torch.tensor([[ids["<bos>"], *(ids[word] for word in text.split())] for text in texts])


def training_rows(steps: int, *, length: int, rows: int, slot: int, seed: int) -> Tensor:
    """Return ``[steps, rows, length]`` token ids cut from longer documents, so that some begin mid-document."""
    halves = documents(-(-steps * rows // 2), length=2 * length, slot=slot, seed=seed).reshape(-1, length)
    order = torch.randperm(len(halves), generator=torch.Generator().manual_seed(seed))
    return halves[order][: steps * rows].reshape(steps, rows, length)


def batch_of(ids: Tensor) -> PackedBatch:
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return PackedBatch(
        input_ids=ids, labels=labels, position_ids=positions, document_boundaries=[[0, ids.shape[1]]] * len(ids)
    )


def recalled(ids: Tensor, *, beyond: int) -> Tensor:
    """Return ``[B, T]`` bool: values after `recall`, last seen more than ``beyond`` tokens before."""
    mask, recall = torch.zeros_like(ids, dtype=torch.bool), token_ids()[GET]
    for row, words in enumerate(ids.tolist()):
        seen: dict[int, int] = {}
        for place, word in enumerate(words):
            if place >= 2 and words[place - 2] == recall and place - seen.get(word, place) > beyond:
                mask[row, place] = True
            seen[word] = place
    return mask


# --------------------------------------------------------------------------------------------------------------- model


def new_model(length: int, theta: float) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(token_ids()),
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=length,
            initializer_range=0.125,  # = hidden_size ** -0.5: with the usual 0.02 recall forms late
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
    )


def long_model(state: dict[str, Tensor]) -> Backbone:
    model = new_model(LENGTH, 4000.0)
    model.load_state_dict(state)
    # All windows of a batch in one pass: at this size a pass costs more than what it computes.
    short_context.windows_per_pass = lambda *_: 1 << 20
    return Backbone(model)


class Run:
    """A model in training, with AdamW, a warm-up over 20 steps and a cosine to a tenth of the learning rate."""

    def __init__(self, backbone: Backbone, setting: Setting, *, steps: int, learning_rate: float, seed: int) -> None:
        self.backbone, self.setting, self.seed = backbone.train(), setting, seed
        self.objective = setting.objective(steps)
        self.optimizer = torch.optim.AdamW(
            backbone.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * min(step / max(steps, 1), 1))),
        )

    def step(self, batch: PackedBatch, number: int, stored: Tensor | None = None) -> float:
        """Train on a batch as `LongContextLM` does, and return the CPU seconds."""
        started = time.process_time()
        objective, setting = self.objective.at_step(number), self.setting
        batch = batch if stored is None else PackedBatch(**batch, influence=stored)
        short = None
        if objective.uses_short_context:
            with short_precision(self.backbone.device, setting.short_dtype):
                short = short_log_likelihood(
                    self.backbone,
                    batch,
                    context_length=setting.context_length,
                    stride=setting.stride,
                    window_fraction=setting.window_share,
                    seed=self.seed * 100_003 + number,
                )
        long = self.backbone(batch)
        weights = objective(long.detach(), short, batch)
        divisor = float(weights.sum()) if objective.normalized and weights.sum() > 0 else None
        loss = long_cross_entropy(long, weights, batch["labels"], divisor=divisor)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.backbone.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return time.process_time() - started


# ---------------------------------------------------------------------------------------------------------- evaluation


@dataclass
class Examination:
    """Held-out documents, and an evaluator's key tokens in the first of them."""

    ids: Tensor
    key_tokens: Tensor

    @torch.no_grad()
    def __call__(self, backbone: Backbone) -> dict[str, float]:
        """Return far recall (fraction of answers that are the likeliest word), perplexity and LongPPL."""
        backbone.eval()
        far = recalled(self.ids, beyond=FAR)
        right = torch.cat([hits(backbone, *part) for part in zip(self.ids.split(50), far.split(50), strict=True)])
        ids = self.ids[: len(self.key_tokens)]
        long = backbone(batch_of(ids))
        scored = torch.ones_like(ids, dtype=torch.bool)
        scored[:, 0] = False
        return {
            "recall": right.double().mean().item(),
            "answers": len(right),
            "perplexity": float(long_perplexity(long, scored)),
            "longppl": float(long_perplexity(long, self.key_tokens)),
        }


def hits(backbone: Backbone, ids: Tensor, wanted: Tensor) -> Tensor:
    """Return for each wanted token whether it is the likeliest."""
    hidden = backbone.decoder(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    return backbone.logits(hidden[wanted[:, 1:]]).argmax(-1) == ids[:, 1:][wanted[:, 1:]]


# ------------------------------------------------------------------------------------------------------------- models


def trained_base(folder: Path, seed: int, accuracy: float = 0.5) -> dict[str, Tensor]:
    """Return the weights of a model that has learned to recall in sequences of 128 tokens."""

    def learn() -> dict[str, Tensor]:
        torch.manual_seed(seed)
        run = Run(Backbone(new_model(128, 500.0)), CROSS_ENTROPY, steps=1_000_000, learning_rate=5e-3, seed=seed)
        ids = documents(200, length=128, slot=8, seed=900)
        wanted = recalled(ids, beyond=0)
        for number in range(1500):
            if number % 50 == 0:
                rows = training_rows(50, length=128, rows=16, slot=8, seed=10_000 + 100 * seed + number // 50)
                with torch.no_grad():
                    right = hits(run.backbone, ids, wanted).double().mean().item()
                print(f"base {seed}: step {number}, recall {right:.3f}", flush=True)
                if right >= accuracy:
                    return run.backbone.base_model.state_dict()
            run.step(batch_of(rows[number % 50]), number)
        raise RuntimeError(f"The base model with seed {seed} does not recall after 1500 steps: take another seed.")

    return stored_tensors(folder / f"base_{seed}.pt", learn)


def trained_evaluator(folder: Path, base: dict[str, Tensor], steps: int) -> Backbone:
    """Return a model trained longer, on dense text, in sequences of 512 tokens."""

    def learn() -> dict[str, Tensor]:
        run = Run(long_model(base), CROSS_ENTROPY, steps=steps, learning_rate=4e-3, seed=1)
        for number, rows in enumerate(training_rows(steps, length=LENGTH, rows=ROWS, slot=8, seed=5_000)):
            run.step(batch_of(rows), number)
        return run.backbone.base_model.state_dict()

    return long_model(stored_tensors(folder / "evaluator.pt", learn)).eval().requires_grad_(False)


def stored_tensors(path: Path, make: Callable[[], Any]) -> Any:
    """Compute tensors once, and read them from then on."""
    if not path.exists():
        torch.save(make(), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return torch.load(path, weights_only=True)
