"""Measure what the options that make LongCE's weights cheaper do to its gradient, on your model and texts.

Each option is compared with exact LongCE on the same rows: cosine of the gradients, precision and recall of the key
tokens (LSD > alpha and LCL > beta), mean token weight, and CPU time of the short pass. For windows drawn at random also
the size of the gradient noise over several draws, relative to the exact gradient, and of the noise that is left in
their mean.

    python benchmarks/cheaper_weights.py --model MODEL_FOLDER --files TEXT.. --context_length 64 --stride 16
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import ShortContext, key_token_mask, long_cross_entropy
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.short_context import short_log_likelihood, sliding_window_log_likelihood
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.objectives import LongCE, Objective, StoredInfluence
from lightning_modules.scoring.influence_transfer import compute_influence, make_transfer


@dataclass
class Outcome:
    """Gradient ``[P]``, key tokens ``[B, T]`` of each batch, mean weight, and CPU seconds of the short passes."""

    gradient: Tensor
    keys: list[Tensor]
    weight: float
    seconds: float


class Comparison:
    """One model and some sequences."""

    def __init__(self, backbone: Backbone, rows: list[PackedBatch], options: argparse.Namespace) -> None:
        self.backbone, self.rows, self.options = backbone, rows, options

    def sliding(self, sinks: int) -> Outcome:
        """Compute gradient and key tokens of all sequences with one pass in a sliding window."""
        started, length = time.process_time(), self.options.context_length
        score = partial(sliding_window_log_likelihood, self.backbone, context_length=length, sinks=sinks)
        short = [score(batch) for batch in self.rows]
        return self._outcome(LongCE(), self.rows, short, time.process_time() - started)

    def outcome(self, *, stride: int | None = None, dtype: Any = None, share: float = 1.0, seed: int = 0) -> Outcome:
        """Compute gradient and key tokens of all sequences with one setting of the short pass."""
        short, seconds = [], 0.0
        for number, batch in enumerate(self.rows):
            started = time.process_time()
            half = torch.autocast(self.backbone.device.type, dtype=torch.bfloat16)
            with nullcontext() if dtype is None else half:
                short.append(
                    short_log_likelihood(
                        self.backbone,
                        batch,
                        context_length=self.options.context_length,
                        stride=stride or self.options.stride,
                        window_fraction=share,
                        seed=seed * len(self.rows) + number,
                    )
                )
            seconds += time.process_time() - started
        return self._outcome(LongCE(), self.rows, short, seconds)

    def stored(self, weights: list[Tensor]) -> Outcome:
        """Compute the gradient with given weights."""
        rows = [PackedBatch(**batch, influence=weight) for batch, weight in zip(self.rows, weights, strict=True)]
        return self._outcome(StoredInfluence(), rows, [None] * len(rows), 0.0)

    def _outcome(
        self, objective: Objective, rows: list[PackedBatch], shorts: Sequence[ShortContext | None], seconds: float
    ) -> Outcome:
        self.backbone.zero_grad()
        keys, total, count = [], 0.0, 0
        for batch, short in zip(rows, shorts, strict=True):
            long = self.backbone(batch)
            known = long.detach()
            weights = objective(known, short, batch)
            total, count = total + float(weights.sum()), count + int(batch["labels"].ne(IGNORE_INDEX).sum())
            loss = long_cross_entropy(long, weights, batch["labels"])
            (loss / len(rows)).backward()
            if short is not None:
                thresholds = {"alpha": self.options.alpha, "beta": self.options.beta}
                keys.append(key_token_mask(known, short.fill_missing(known), **thresholds))
        parts = [p.grad.flatten() for p in self.backbone.parameters() if p.grad is not None]
        return Outcome(torch.cat(parts).clone(), keys, total / count, seconds)


def compare(comparison: Comparison, evaluator: str | None) -> Iterator[str]:
    """Yield the rows of the table."""
    options = comparison.options
    exact = comparison.outcome()
    settings: dict[str, Callable[[], Outcome]] = {
        f"stride = context_length = {options.context_length}": partial(
            comparison.outcome, stride=options.context_length
        ),
        "short_context: sliding_window": partial(comparison.sliding, 0),
        "short_context: sliding_window, 4 sink_tokens": partial(comparison.sliding, 4),
        "short_dtype: bfloat16": partial(comparison.outcome, dtype="bfloat16"),
    }
    for name, compute in settings.items():
        outcome = compute()
        yield (
            f"| {name} | {F.cosine_similarity(outcome.gradient, exact.gradient, dim=0):.4f}"
            f" | {key_token_agreement(outcome, exact)} | {outcome.weight / exact.weight:.3f}"
            f" | {outcome.seconds / exact.seconds:.2f} |"
        )
    for share in (0.5, 0.25) if options.draws else ():
        draws = [comparison.outcome(share=share, seed=seed) for seed in range(options.draws)]
        gradients = torch.stack([draw.gradient for draw in draws])
        noise = (gradients - exact.gradient).norm(dim=1).square().mean().sqrt() / exact.gradient.norm()
        left = (gradients.mean(0) - exact.gradient).norm() / exact.gradient.norm()
        cosine = torch.stack([F.cosine_similarity(each, exact.gradient, dim=0) for each in gradients]).mean()
        seconds = sum(draw.seconds for draw in draws) / len(draws)
        yield (
            f"| window_fraction: {share}, {len(draws)} draws: noise {noise:.3f}, of which {left:.3f} is left in the"
            f" mean ({noise / len(draws) ** 0.5:.3f} expected without bias) | {cosine:.4f} | | |"
            f" {seconds / exact.seconds:.2f} |"
        )
    plain = comparison.stored([torch.ones_like(batch["labels"], dtype=torch.float32) for batch in comparison.rows])
    cosine = F.cosine_similarity(plain.gradient, exact.gradient, dim=0)
    yield f"| cross entropy | {cosine:.4f} | | {1 / exact.weight:.3f} | 0 |"
    if evaluator is not None:
        weights = stored_weights(evaluator, comparison)
        other = comparison.stored(weights)
        cosine, weight = F.cosine_similarity(other.gradient, exact.gradient, dim=0), other.weight / exact.weight
        yield f"| weights stored by {Path(evaluator).name} (`longce influence`) | {cosine:.4f} | | {weight:.3f} | 0 |"


def key_token_agreement(outcome: Outcome, exact: Outcome) -> str:
    """Return precision and recall of an outcome's key tokens."""
    hits = sum(int((a & b).sum()) for a, b in zip(exact.keys, outcome.keys, strict=True))
    found, wanted = (sum(int(mask.sum()) for mask in each.keys) for each in (outcome, exact))
    return f"{hits / max(found, 1):.3f} / {hits / max(wanted, 1):.3f}"


def stored_weights(evaluator: str, comparison: Comparison) -> list[Tensor]:
    """Compute the weights of the sequences as ``longce influence`` does."""
    options = comparison.options
    scorer = load_backbone(ModelConfig(evaluator)).eval().requires_grad_(False)
    check_scoring(scorer)
    transfer = make_transfer(load_tokenizer(options.model), load_tokenizer(evaluator), add_special_tokens=True)
    weigh = compute_influence if transfer is None else transfer.compute_influence
    sizes = {"context_length": options.context_length, "stride": options.stride}
    return [weigh(batch, scorer, **sizes, gamma=5.0) for batch in comparison.rows]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--files", nargs="+", required=True, help="UTF-8 texts, a row each")
    parser.add_argument("--evaluator", help="hub id or folder of a model that could store its weights")
    parser.add_argument("--tokens", type=int, default=512, help="of each text, at most")
    parser.add_argument("--context_length", type=int, default=64)
    parser.add_argument("--stride", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=2.0)
    parser.add_argument("--beta", type=float, default=-2.0)
    parser.add_argument("--draws", type=int, default=40, help="of random windows; 0 leaves their rows out")
    options = parser.parse_args()
    backbone = load_backbone(ModelConfig(options.model, dtype="float32")).train()
    check_scoring(backbone)
    tokenizer = load_tokenizer(options.model)
    rows = [encode_document(Path(file).read_text(), tokenizer, max_tokens=options.tokens) for file in options.files]
    print(f"{len(rows)} rows of up to {options.tokens} tokens, K={options.context_length}, d={options.stride}\n")
    print("| option | cosine of gradients | key tokens: precision / recall | mean weight | time of the short pass |")
    print("|---|---|---|---|---|")
    for line in compare(Comparison(backbone, rows, options), options.evaluator):
        print(line, flush=True)


if __name__ == "__main__":
    main()
