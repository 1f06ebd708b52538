"""Whether LongCE pays on a real model: SmolLM2 trained on books by each weighting, for equal steps and equal time.

Table 3 and Figure 7 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, at the size of a CPU and of minutes of a
GPU. The protocol, with hypotheses and decision rules, is in `benchmarks/real_models/PROTOCOL.md`.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from benchmarks.real_models.weightings import METHODS, Run, batch_of
from lightning_modules.batch import PackedBatch, batch_to
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.scoring.key_tokens import Tokens, find_key_tokens
from lightning_modules.scoring.token_scores import TokenScores

MODEL = "smollm2-135m"
RATES = (1e-5, 2e-5, 4e-5)
TUNING_SEED, SEEDS = 100, (0, 1, 2)
SHORT = 256
"""Tokens of the windows of the short perplexity."""

STARTS: dict[str, dict[str, Any] | None] = {
    "as it is": None,
    "interpolated": {"method": "pi", "original_length": 8192, "target_length": 32768},
}
"""The model with its positions, and with a quarter of them, so that it has to learn long contexts again."""

COUNTED = ("LongCE", "LongCE, half CE")
"""Weightings that are also compared after the time of cross entropy."""


@dataclass(frozen=True)
class Scale:
    """How much is trained, and on what the trained models are compared."""

    study: str
    length: int  # tokens of a training row
    k: int  # K and d in training: an eighth, as in the paper
    steps: int
    exam_tokens: int  # of a text
    exam_k: int  # K and d of its evaluators
    exam_characters: int  # of a question sheet
    weightings: tuple[str, ...]
    evaluators: tuple[str, ...]  # the first one chooses learning rates, and stores weights
    autocast: bool = False  # whether products are in bfloat16
    cost_device: str | None = None  # on which steps are timed; by default that of the runs


CPU_SCALE = Scale(
    *("fine_tune", 1024, 128, 24, 2048, 256, 7_500),
    weightings=("CE", "LongCE", "LongCE, half CE", "stored by the evaluator", "control: shuffled weights"),
    evaluators=("gemma-3-270m", "qwen2.5-coder-0.5b"),
    cost_device="cpu",
)
GPU_SCALE = Scale(
    *("fine_tune_8k", 8192, 1024, 64, 8192, 1024, 30_000),
    weightings=("CE", "LongCE", "LongCE, half CE"),
    evaluators=("gemma-3-270m",),
    autocast=True,
)


@dataclass(frozen=True)
class Arm:
    """One training run; ``budget`` is that of the steps of cross entropy: "steps" or "time"."""

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


Keep = Callable[[Sequence[Any], Callable[[Any], dict[str, Any]]], dict[str, dict[str, Any]]]
"""Measures those of the runs that are not yet kept, and returns the numbers of all kept ones by their path."""


def compare_weightings(
    scale: Scale,
    models: Path,
    batches: Callable[[int], Sequence[PackedBatch]],
    weights: Callable[[Sequence[PackedBatch]], Sequence[Tensor]],
    tuning: "Examination",
    examination: "Examination",
    keep: Keep,
    *,
    device: str = "cpu",
) -> dict[str, Any]:
    """Choose each weighting's learning rate, train all runs, and return the numbers of the study.

    ``batches`` are the training rows of a seed; ``weights`` returns the stored weights of batches.
    """
    timed = scale.cost_device or device
    costs = keep([Costs()], lambda _: measure_costs(scale, models, batches(TUNING_SEED), device=timed))[Costs().path]
    steps = {name: equal_time_steps(scale, costs, name) for name in COUNTED}

    def measure(arm: Arm) -> dict[str, Any]:
        chosen = tuning if arm.seed == TUNING_SEED else examination
        count = steps[arm.weighting] if arm.budget == "time" else scale.steps
        return train(scale, arm, models, batches(arm.seed), weights, chosen, count, device=device)

    tuned = [name for name in scale.weightings if not name.startswith("control")]
    found = keep([arm for name in tuned for arm in tuning_arms(name)], measure)
    rates = {name: best_rate(found, name, scale.evaluators[0]) for name in tuned}
    found = keep(list_arms(scale, rates), measure)
    return {"costs": costs, "rates": rates, "rows": list(compare_arms(scale, found, rates))}


def measure_costs(
    scale: Scale, models: Path, batches: Sequence[PackedBatch], rounds: int = 5, *, device: str = "cpu"
) -> dict[str, float]:
    """Measure the median seconds of a step by each weighting that is compared at equal time; all take turns."""
    loaded = LoadedSystem(System(MODEL, "costs"), models)
    config = ModelConfig(loaded.file, dtype="float32")
    names = ("CE", *COUNTED)
    runs = {
        name: Run(
            load_backbone(config, device=device).to(device), METHODS[name], steps=rounds, rate=1e-6, window=scale.k
        )
        for name in names
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for batch in batches[:rounds]:
        for name, run in runs.items():
            seconds[name].append(timed_step(run, batch, autocast=scale.autocast))
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def timed_step(run: Run, batch: PackedBatch, stored: Tensor | None = None, *, autocast: bool = False) -> float:
    """Train on a batch, and return the CPU seconds, or on a GPU the seconds that passed."""
    device = run.backbone.device
    moved, weights = batch_to(batch, device), None if stored is None else stored.to(device)
    with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
        if device.type == "cpu":
            return run.step(moved, weights)
        torch.cuda.synchronize()
        started = time.perf_counter()
        run.step(moved, weights)
        torch.cuda.synchronize()
        return time.perf_counter() - started


def tuning_arms(weighting: str) -> list[Arm]:
    """Return the runs that decide a weighting's learning rate."""
    return [Arm("as it is", weighting, "steps", rate, TUNING_SEED) for rate in RATES]


def list_arms(scale: Scale, rates: Mapping[str, float]) -> list[Arm]:
    """Return all compared runs, given the learning rate of each weighting."""
    kinds = [*((name, "steps") for name in scale.weightings), *((name, "time") for name in COUNTED)]
    return [
        Arm(start, name, budget, _rate(rates, name), seed)
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


def training_rows(
    books: Sequence[str], tokenizer: PreTrainedTokenizerFast, seed: int, count: int, length: int
) -> list[PackedBatch]:
    """Return rows of ``length`` tokens, a batch each, cut from books at places and in an order by ``seed``."""
    draw = np.random.default_rng(seed)
    rows: list[Tensor] = []
    for book in books:
        ids = torch.tensor(tokenizer.backend_tokenizer.encode(book, add_special_tokens=False).ids)
        ids = ids[draw.integers(length) :]
        rows.extend(ids[: len(ids) // length * length].view(-1, length))
    order = draw.permutation(len(rows))[:count]
    return [batch_of(rows[number][None]) for number in order]


def train(
    scale: Scale,
    arm: Arm,
    models: Path,
    batches: Sequence[PackedBatch],
    weights: Callable[[Sequence[PackedBatch]], Sequence[Tensor]],
    examination: Examination,
    steps: int,
    *,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train a model for some steps, and return its examination and the median seconds of a step.

    ``weights`` returns the stored ones of each batch, and is called only by a weighting that needs them.
    """
    method = METHODS[arm.weighting]
    loaded = LoadedSystem(System(MODEL, arm.path, context_extension=STARTS[arm.start]), models, device=device)
    config = ModelConfig(loaded.file, dtype="float32", context_extension=STARTS[arm.start])
    torch.manual_seed(arm.seed)
    backbone = load_backbone(config, device=device).to(device)
    stored = weights(batches) if method.stored else [None] * steps
    run = Run(backbone, method, steps=steps, rate=arm.rate, window=scale.k)
    seconds = [
        timed_step(run, batch, own, autocast=scale.autocast)
        for batch, own in zip(batches[:steps], stored, strict=False)
    ]
    loaded.use(backbone)
    return {"steps": steps, "step_seconds": statistics.median(seconds), **examination(backbone, loaded)}


def best_rate(found: Mapping[str, Mapping[str, Any]], weighting: str, evaluator: str) -> float:
    """Return the learning rate with the lowest LongPPL of the tuning texts by an evaluator."""
    results = {arm.rate: found[arm.path] for arm in tuning_arms(weighting)}
    return min(results, key=lambda rate: _perplexity([results[rate]], evaluator))


def equal_time_steps(scale: Scale, costs: Mapping[str, float], weighting: str) -> int:
    """Return the steps of a weighting in the time of all steps of cross entropy, given their costs."""
    return min(scale.steps, int(scale.steps * costs["CE"] / costs[weighting]))


def _rate(rates: Mapping[str, float], weighting: str) -> float:
    """Return the learning rate of a weighting; the control has that of the stored weights."""
    return rates["stored by the evaluator" if weighting.startswith("control") else weighting]


class Compared(NamedTuple):
    """Ratio of a weighting's perplexity over some tokens to that of cross entropy, with its interval over texts."""

    ratio: float
    interval: tuple[float, float] | None
    by_seed: list[float]


def compare_arms(
    scale: Scale, found: Mapping[str, Mapping[str, Any]], rates: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Yield for each start, weighting and budget the ratios to cross entropy by kind of tokens, and the answers.

    ``found`` are the results of `train` by the path of their arms. Losses are means over the seeds.
    """
    arms = list_arms(scale, rates)
    for start, (name, budget) in itertools.product(STARTS, dict.fromkeys((arm.weighting, arm.budget) for arm in arms)):
        own = [found[arm.path] for arm in arms if (arm.start, arm.weighting, arm.budget) == (start, name, budget)]
        base = [found[arm.path] for arm in arms if (arm.start, arm.weighting, arm.budget) == (start, "CE", "steps")]
        kinds = dict.fromkeys(row[1] for row in own[0]["losses"])
        right = [answer for each in own for answer in each["right"]]
        yield {
            "start": start,
            "weighting": name,
            "budget": budget,
            "rate": _rate(rates, name),
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
