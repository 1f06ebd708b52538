"""Whether LongCE pays on a real model: SmolLM2 trained on books by each weighting, for equal steps and CPU time.

Table 3 and Figure 7 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, at the size of a CPU. The protocol, with
hypotheses and decision rules, is in `docs/real.md`.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.real_models.extend import loss_ratio
from benchmarks.real_models.questions import QuestionSheet
from benchmarks.real_models.systems import LoadedSystem, System
from benchmarks.real_models.texts import Text
from benchmarks.token_weights import METHODS, Run, batch_of
from lightning_modules.batch import PackedBatch, batch_to
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.scoring.key_tokens import Tokens, find_key_tokens
from lightning_modules.scoring.token_scores import TokenScores

MODEL = "smollm2-135m"
LENGTH, K = 1024, 128
"""Tokens of a training row, and K and d in training: an eighth, as in the paper."""

STEPS = 24
RATES = (1e-5, 2e-5, 4e-5)
TUNING_SEED, SEEDS = 100, (0, 1, 2)
SHORT = 256
"""Tokens of the windows of the short perplexity."""

STARTS: dict[str, dict[str, Any] | None] = {
    "as it is": None,
    "interpolated": {"method": "pi", "original_length": 8192, "target_length": 32768},
}
"""The model with its positions, and with a quarter of them, so that it has to learn long contexts again."""

WEIGHTINGS = ("CE", "LongCE", "LongCE, half CE", "stored by the evaluator", "control: shuffled weights")
COUNTED = ("LongCE", "LongCE, half CE")
"""Weightings that are also compared after the CPU time of cross entropy."""


@dataclass(frozen=True)
class Arm:
    """One training run; ``budget`` is that of `STEPS` steps of cross entropy: "steps" or "CPU"."""

    start: str
    weighting: str
    budget: str
    rate: float
    seed: int

    @property
    def path(self) -> str:
        """Name of the run among the kept results."""
        return f"fine_tune/{self.start}/{self.weighting}/{self.budget}/{self.rate:g}/{self.seed}"


@dataclass(frozen=True)
class Costs:
    """The measurement of what a step costs."""

    path: str = "costs"


def measure_costs(models: Path, batches: Sequence[PackedBatch], rounds: int = 5) -> dict[str, float]:
    """Measure the median CPU seconds of a step by each weighting that is compared at equal time; all take turns."""
    loaded = LoadedSystem(System(MODEL, "costs"), models)
    names = ("CE", *COUNTED)
    runs = {
        name: Run(
            load_backbone(ModelConfig(loaded.file, dtype="float32")), METHODS[name], steps=rounds, rate=1e-6, window=K
        )
        for name in names
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number, batch in enumerate(batches[:rounds]):
        for name, run in runs.items():
            seconds[name].append(run.step(batch, number))
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def tuning_arms(weighting: str) -> list[Arm]:
    """Return the runs that decide a weighting's learning rate."""
    return [Arm("as it is", weighting, "steps", rate, TUNING_SEED) for rate in RATES]


def list_arms(rates: Mapping[str, float]) -> list[Arm]:
    """Return all compared runs, given the learning rate of each weighting; the control has that of the stored ones."""
    kinds = [*((name, "steps") for name in WEIGHTINGS), *((name, "CPU") for name in COUNTED)]
    return [
        Arm(start, name, budget, rates.get(name, rates["stored by the evaluator"]), seed)
        for start, (name, budget), seed in itertools.product(STARTS, kinds, SEEDS)
    ]


class Examination:
    """Held-out texts with the key tokens of each evaluator, and question sheets."""

    def __init__(
        self,
        texts: Sequence[Text],
        evaluators: Mapping[str, Mapping[str, TokenScores]],
        sheets: Sequence[QuestionSheet],
    ) -> None:
        self.texts, self.evaluators, self.sheets = texts, evaluators, sheets

    @torch.no_grad()
    def __call__(self, backbone: Backbone, loaded: LoadedSystem) -> dict[str, Any]:
        """Return the answers, and losses ``[text, kind of tokens, sum in nats, number of tokens]``.

        Kinds are ``all`` tokens, the key tokens of each evaluator, and ``short``: all tokens, in windows of `SHORT`
        tokens.
        """
        backbone.eval()
        losses: list[list[Any]] = []
        for text in self.texts:
            own = loaded.log_likelihoods(text)
            tokens, loss = Tokens(own["token_ids"], own["offsets"]), -own["log_likelihood"].double()
            masks = {"all": torch.ones(len(loss), dtype=torch.bool)}
            for name, scores in self.evaluators.items():
                masks[name] = find_key_tokens(scores[text.name], tokens).mask.clone()
            for kind, mask in masks.items():
                mask[0] = False  # the first token has no context
                losses.append([text.name, kind, float(loss[mask].sum()), int(mask.sum())])
            windows = own["token_ids"][: len(loss) // SHORT * SHORT].view(-1, SHORT)
            short = -backbone(batch_to(batch_of(windows), backbone.device))[:, 1:].double()
            losses.append([text.name, "short", float(short.sum()), short.numel()])
        right = [answer for sheet in self.sheets for answer in loaded.answers(sheet)]
        return {"losses": losses, "right": right}


def training_rows(books: Sequence[str], tokenizer: PreTrainedTokenizerFast, seed: int, count: int) -> list[PackedBatch]:
    """Return rows of `LENGTH` tokens, a batch each, cut from books at places and in an order by ``seed``."""
    draw = np.random.default_rng(seed)
    rows: list[Tensor] = []
    for book in books:
        ids = torch.tensor(tokenizer.backend_tokenizer.encode(book, add_special_tokens=False).ids)
        ids = ids[draw.integers(LENGTH) :]
        rows.extend(ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH))
    order = draw.permutation(len(rows))[:count]
    return [batch_of(rows[number][None]) for number in order]


def train(
    arm: Arm,
    models: Path,
    batches: Sequence[PackedBatch],
    weights: Callable[[Sequence[PackedBatch]], Sequence[Tensor]],
    examination: Examination,
    steps: int,
    *,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train a model for some steps, and return its examination and the CPU seconds of its steps.

    ``weights`` returns the stored ones of each batch, and is called only by a weighting that needs them.
    """
    method = METHODS[arm.weighting]
    loaded = LoadedSystem(System(MODEL, arm.path, context_extension=STARTS[arm.start]), models, device=device)
    config = ModelConfig(loaded.file, dtype="float32", context_extension=STARTS[arm.start])
    torch.manual_seed(arm.seed)
    backbone = load_backbone(config, device=device).to(device)
    stored = weights(batches) if method.scorer == "evaluator" else [None] * steps
    run = Run(backbone, method, steps=steps, rate=arm.rate, window=K)
    seconds = []
    for number, (batch, own) in enumerate(zip(batches[:steps], stored, strict=False)):
        moved = batch_to(batch, backbone.device)
        seconds.append(run.step(moved, number, None if own is None else own.to(device)))
    loaded.use(backbone)
    return {"steps": steps, "step_seconds": statistics.median(seconds), **examination(backbone, loaded)}


def best_rate(found: Mapping[str, Mapping[str, Any]], weighting: str, evaluator: str) -> float:
    """Return the learning rate with the lowest LongPPL of the tuning texts by an evaluator."""
    results = {arm.rate: found[arm.path] for arm in tuning_arms(weighting)}
    return min(results, key=lambda rate: _perplexity([results[rate]], evaluator))


def equal_time_steps(costs: Mapping[str, float], weighting: str) -> int:
    """Return the steps of a weighting in the CPU time of `STEPS` steps of cross entropy, given their costs."""
    return min(STEPS, int(STEPS * costs["CE"] / costs[weighting]))


class Compared(NamedTuple):
    """Ratio of a weighting's perplexity over some tokens to that of cross entropy, with its interval over texts."""

    ratio: float
    interval: tuple[float, float] | None
    by_seed: list[float]


def compare_arms(found: Mapping[str, Mapping[str, Any]], rates: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Yield for each start, weighting and budget the ratios to cross entropy by kind of tokens, and the answers.

    ``found`` are the results of `train` by the path of their arms. Losses are means over the seeds.
    """
    arms = list_arms(rates)
    for start, (name, budget) in itertools.product(STARTS, dict.fromkeys((arm.weighting, arm.budget) for arm in arms)):
        own = [found[arm.path] for arm in arms if (arm.start, arm.weighting, arm.budget) == (start, name, budget)]
        base = [found[arm.path] for arm in arms if (arm.start, arm.weighting, arm.budget) == (start, "CE", "steps")]
        kinds = dict.fromkeys(row[1] for row in own[0]["losses"])
        right = [answer for each in own for answer in each["right"]]
        yield {
            "start": start,
            "weighting": name,
            "budget": budget,
            "rate": rates.get(name, rates["stored by the evaluator"]),
            "steps": own[0]["steps"],
            "step_seconds": statistics.median(each["step_seconds"] for each in own),
            "accuracy": sum(right) / len(right),
            "perplexity": {kind: _perplexity(own, kind) for kind in kinds},
            "ratio": {kind: _compare(own, base, kind)._asdict() for kind in kinds},
        }


def _compare(own: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], kind: str) -> Compared:
    by_seed = [
        loss_ratio(*_mean_losses([one], kind), _mean_losses([other], kind)[0])[0]
        for one, other in zip(own, base, strict=True)
    ]
    ratio, *interval = loss_ratio(*_mean_losses(own, kind), _mean_losses(base, kind)[0])
    return Compared(ratio, None if interval[0] is None else (interval[0], interval[1]), by_seed)


def _perplexity(results: Sequence[Mapping[str, Any]], kind: str) -> float:
    loss, tokens = _mean_losses(results, kind)
    return float(np.exp(loss.sum() / tokens.sum()))


def _mean_losses(results: Sequence[Mapping[str, Any]], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed loss of each text, a mean over results, and its number of tokens."""
    tables = [pd.DataFrame(each["losses"], columns=["text", "kind", "loss", "tokens"]) for each in results]
    chosen = [table[table["kind"] == kind] for table in tables]
    tokens = chosen[0]["tokens"].to_numpy(dtype=np.float64)
    return np.mean([table["loss"].to_numpy() for table in chosen], axis=0), tokens
