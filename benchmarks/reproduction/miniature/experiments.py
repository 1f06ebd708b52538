"""Compute the paper's experiments from measurements: nothing here trains or scores."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_accuracy,
    binary_f1_score,
    binary_precision,
    binary_recall,
    binary_specificity,
)

from benchmarks.reproduction.miniature.measure import METRICS
from benchmarks.reproduction.miniature.plan import Results, SeedPlan, tuned_accuracies
from benchmarks.reproduction.miniature.settings import Miniature, Windows
from benchmarks.reproduction.miniature.training import Measurement, ObjectiveName, Run
from lightning_modules.functional import (
    fit_power_law,
    key_token_mask,
    long_perplexity,
    short_context_windows,
)
from lightning_modules.utilities.statistics import correlate_values


def run_experiments(results: Results) -> dict[str, Any]:
    """Return the numbers of all experiments by letter, ready for JSON."""
    experiments: dict[str, Callable[[Results], dict[str, Any]]] = {
        "A": correlations,
        "B": objectives,
        "C": classification,
        "D": hyperparameters,
        "E": loss_by_context,
        "F": accuracy_by_depth,
    }
    return {letter: experiment(results) for letter, experiment in experiments.items()}


# ------------------------------------------------------------------------------------------------------- A: Tables 1, 6


def correlations(results: Results) -> dict[str, Any]:
    """Correlate each metric with accuracy over the models of a base seed (Tables 1, 6, 9, 11; Figures 1, 2, 5)."""
    return {"seeds": [_seed_correlations(results, seed) for seed in results.plan.seeds]}


def _seed_correlations(results: Results, seed: SeedPlan) -> dict[str, Any]:
    models: list[dict[str, Any]] = [
        {"name": name, "group": group, "accuracy": results.last(run).accuracy, **results.metrics(run)}
        for group, runs in (("trained", seed.family), ("extended", seed.extensions))
        for name, run in runs.items()
    ]
    groups = {"trained": [model for model in models if model["group"] == "trained"], "all": models}
    return {
        "models": models,
        "correlations": {
            group: {
                metric: correlation([m[metric] for m in members], [m["accuracy"] for m in members])
                for metric in METRICS
            }
            for group, members in groups.items()
        },
    }


def correlation(values: Sequence[float], accuracies: Sequence[float]) -> dict[str, Any]:
    """Return Pearson's and Spearman's correlation with their intervals, or the reason why they are missing."""
    found: dict[str, Any] = {}
    try:
        for kind in ("pearson", "spearman"):
            result = correlate_values(values, accuracies, kind)
            found |= {kind: result.value, f"{kind}_interval": result.interval}
    except ValueError as error:
        return {"undefined": str(error)}
    return found


# ---------------------------------------------------------------------------------------------- B: Tables 3, 10, Fig. 7


def objectives(results: Results) -> dict[str, Any]:
    """Compare CE and LongCE on the same data, at equal steps, CPU time and FLOPs (Table 3, Figure 7, Table 10)."""
    pairs = [_pair(results, seed, rows) for seed in results.plan.seeds for rows in results.settings.objectives.seeds]
    tuning = tuned_accuracies(results.laboratory, results.plan)
    return {"flops_ratio": flops_ratio(results.settings), "tuning": tuning, "pairs": pairs}


def _pair(results: Results, seed: SeedPlan, rows: int) -> dict[str, Any]:
    start = results.last(seed.start)
    runs: dict[ObjectiveName, Run] = {objective: seed.objectives[objective, rows] for objective in ("CE", "LongCE")}
    curves = {
        name: [
            {"step": m.step, "cpu_seconds": m.cpu_seconds, "accuracy": m.accuracy}
            for m in [start, *results.laboratory.measurements(run)]
        ]
        for name, run in runs.items()
    }
    last = max(results.settings.objectives.steps)
    return {
        "base": seed.base.name,
        "rows": rows,
        "curves": curves,
        "gain_at_equal": equal_compute(curves["CE"], curves["LongCE"], last, flops_ratio(results.settings)),
        "short": {
            "start": _short(results, seed.start),
            **{name: _short(results, run, last) for name, run in runs.items()},
        },
        "metrics": {name: results.metrics(run, last) for name, run in runs.items()},
    }


def _short(results: Results, run: Run, step: int | None = None) -> dict[str, float]:
    report = _at(results.laboratory.measurements(run), step).report
    assert report is not None
    return {"accuracy": fmean(report["short_right"]), "perplexity": report["short_perplexity"]}


def equal_compute(
    cross_entropy: Sequence[Mapping[str, float]], longce: Sequence[Mapping[str, float]], step: int, flops_ratio: float
) -> dict[str, float]:
    """Return how much more accurate LongCE is than CE after equal steps, CPU seconds and FLOPs.

    Accuracy is interpolated linearly between measurements. The budget is that of LongCE's steps, or all that CE had if
    that is less.

    Args:
        cross_entropy: ``step``, ``cpu_seconds`` and ``accuracy`` of CE, in ascending order.
        longce: The same for LongCE.
        step: Step at which both are compared and LongCE's budget ends.
        flops_ratio: FLOPs of a LongCE step divided by those of a CE step.

    Returns:
        Differences of accuracy by ``steps``, ``cpu_seconds`` and ``flops``. ``cpu_ratio`` is the CPU time of a
        LongCE step divided by that of a CE step.
    """
    costs = {
        "steps": (_column(cross_entropy, "step"), _column(longce, "step")),
        "cpu_seconds": (_column(cross_entropy, "cpu_seconds"), _column(longce, "cpu_seconds")),
        "flops": (_column(cross_entropy, "step"), flops_ratio * _column(longce, "step")),
    }
    at, of_ce = (int(np.flatnonzero(steps == step)[0]) for steps in reversed(costs["steps"]))
    gains = {}
    for name, (ce_cost, longce_cost) in costs.items():
        budget = min(longce_cost[at], ce_cost[-1])
        reached = np.interp(budget, longce_cost, _column(longce, "accuracy"))
        gains[name] = float(reached - np.interp(budget, ce_cost, _column(cross_entropy, "accuracy")))
    return {**gains, "cpu_ratio": longce[at]["cpu_seconds"] / cross_entropy[of_ce]["cpu_seconds"]}


def _column(curve: Sequence[Mapping[str, float]], name: str) -> NDArray[np.float64]:
    return np.array([entry[name] for entry in curve], dtype=np.float64)


def flops_ratio(settings: Miniature, windows: Windows | None = None) -> float:
    """Return FLOPs of a LongCE step, which also passes the windows forward, divided by those of a CE step.

    A training step counts as three forward passes of its sequences. Attention, which is cheaper per token in a short
    window, is left out, and so are savings in the last layer.
    """
    length = settings.fine_tuning.sequence_length
    windows = windows or Windows(settings.context_length, settings.stride)
    spans = short_context_windows([0, length], context_length=windows.context_length, stride=windows.stride)
    tokens = sum(window.stop - window.start for window in spans)
    return 1 + tokens / (3 * length)


# ----------------------------------------------------------------------------------------------------- C: Figures 3, 4b


def classification(results: Results) -> dict[str, Any]:
    """Measure how well LSD, and LSD with LCL, separate far answers from other tokens (Figures 3 and 4b)."""
    evaluator, masks, settings = results.evaluator, results.masks, results.settings
    # A near answer needs no long context and is answered by it all the same: it is neither right nor wrong.
    asked = masks.covered & ~masks.near
    rules = {
        "LSD": key_token_mask(evaluator.long, evaluator.short, alpha=settings.alpha, beta=-math.inf),
        "LSD and LCL": key_token_mask(evaluator.long, evaluator.short, alpha=settings.alpha, beta=settings.beta),
    }
    return {
        "evaluator_accuracy": results.last(results.plan.evaluator).accuracy,
        "alpha": settings.alpha,
        "beta": settings.beta,
        "tokens": int(asked.sum()),
        "answers": int((masks.far & asked).sum()),
        "rules": {name: classifier_scores(mask[asked], masks.far[asked]) for name, mask in rules.items()},
    }


def classifier_scores(predicted: Tensor, true: Tensor) -> dict[str, float]:
    """Score a binary classifier by torchmetrics; a ratio with an empty denominator is 0.

    Args:
        predicted: ``[N]`` bool predictions.
        true: ``[N]`` bool labels.

    Returns:
        ``precision``, ``recall``, ``f1``, ``accuracy`` and ``balanced_accuracy``, the mean recall of
        the two classes.
    """
    recall, specificity = (float(score(predicted, true)) for score in (binary_recall, binary_specificity))
    return {
        "precision": float(binary_precision(predicted, true)),
        "recall": recall,
        "f1": float(binary_f1_score(predicted, true)),
        "accuracy": float(binary_accuracy(predicted, true)),
        "balanced_accuracy": (recall + specificity) / 2,
    }


# ------------------------------------------------------------------------------------------------------- D: Tables 2, 7


def hyperparameters(results: Results) -> dict[str, Any]:
    """Return LongPPL's correlation by alpha and beta (Table 2), and LongCE by K and d (Table 7)."""
    return {
        "thresholds": [_seed_thresholds(results, seed) for seed in results.plan.seeds],
        "windows": [entry for seed in results.plan.seeds for entry in _seed_windows(results, seed)],
    }


def _seed_thresholds(results: Results, seed: SeedPlan) -> list[dict[str, Any]]:
    evaluator, settings = results.evaluator, results.settings
    runs = list(seed.family.values())
    accuracies = [results.last(run).accuracy for run in runs]
    tokens = [results.laboratory.tokens(run) for run in runs]
    grid = []
    for alpha in settings.alphas:
        for beta in settings.betas:
            key = results.masks.scored & key_token_mask(evaluator.long, evaluator.short, alpha=alpha, beta=beta)
            values = [float(long_perplexity(model.long, key)) for model in tokens]
            row = {"alpha": alpha, "beta": beta, "key_tokens": int(key.sum())}
            grid.append({**row, **correlation(values, accuracies)})
    return grid


def _seed_windows(results: Results, seed: SeedPlan) -> list[dict[str, Any]]:
    settings, rows = results.settings, results.settings.objectives.seeds[0]
    default = Windows(settings.context_length, settings.stride)
    step = max(settings.objectives.steps)
    of_ce = _at(results.laboratory.measurements(seed.objectives["CE", rows]), step)
    entries = [{"base": seed.base.name, "objective": "CE", "accuracy": of_ce.accuracy, "overhead": 0.0}]
    for windows, run in {default: seed.objectives["LongCE", rows], **seed.windows}.items():
        found = results.last(run)
        entries.append(
            {
                "base": seed.base.name,
                "objective": "LongCE",
                "context_length": windows.context_length,
                "stride": windows.stride,
                "default": windows == default,
                "accuracy": found.accuracy,
                "overhead": found.cpu_seconds / of_ce.cpu_seconds - 1,
                "flops_overhead": flops_ratio(settings, windows) - 1,
            }
        )
    return entries


# --------------------------------------------------------------------------------------------------- E: loss by context


def loss_by_context(results: Results) -> dict[str, Any]:
    """Return the loss of the same tokens by context length, and the power law fitted to it, by model.

    The curve is the one of Section 4 of Xiong et al. (2023), https://arxiv.org/abs/2309.16039.
    """
    contexts = results.settings.evaluation.contexts
    models = {"evaluator": results.plan.evaluator}
    for seed in results.plan.seeds:
        models |= {f"{seed.base.name.partition('/')[0]}, {name}": run for name, run in seed.family.items()}
    entries = []
    for name, run in models.items():
        report = results.last(run).report
        assert report is not None
        losses = report["loss_by_context"]
        entry = {"name": name, "rows": run.training and run.training.sequence_length, "loss": losses}
        fit = fit_power_law(torch.tensor(contexts), torch.tensor(losses))._asdict() if len(contexts) >= 3 else None
        entries.append({**entry, "gain": losses[0] - losses[-1], "fit": fit})
    return {"contexts": list(contexts), "models": entries}


# ------------------------------------------------------------------------------------------------ F: lost in the middle


def accuracy_by_depth(results: Results) -> dict[str, Any]:
    """Return the fraction of right answers by the depth of the fact (Liu et al., 2023)."""
    models = {"evaluator": [results.plan.evaluator]}
    for seed in results.plan.seeds:
        models.setdefault("base, extended", []).append(seed.start)
        longest = [run for run in seed.family.values() if run.training == _longest(seed)]
        models.setdefault("family, longest rows", []).extend(longest)
        for (objective, _), run in seed.objectives.items():
            models.setdefault(objective, []).append(run)
    step = max(results.settings.objectives.steps)
    shares = {}
    for name, runs in models.items():
        found = [_at(results.laboratory.measurements(run), step) for run in runs]
        shares[name] = np.mean([measurement.right for measurement in found], axis=0).tolist()
    return {
        "questions_per_depth": results.settings.evaluation.questions / results.settings.evaluation.depths,
        "models": shares,
    }


def _longest(seed: SeedPlan) -> Any:
    trained = [run.training for run in seed.family.values() if run.training is not None]
    return max(trained, key=lambda training: (training.sequence_length, -training.second_dialect))


def _at(measurements: list[Measurement], step: int | None) -> Measurement:
    """Return the measurement at a step, or the last one."""
    return next((m for m in measurements if m.step == step), measurements[-1])
