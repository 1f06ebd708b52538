"""Compare LongCE and its variants with cross entropy at equal CPU time, by recall from far context.

The language is the synthetic one of `RecallDataModule`.

Hypothesis, declared before any test run: of the three settings that recall best at equal CPU time on the tuning seeds,
and the best of those that score their tokens themselves, each with its own learning rate, at least one recalls more
than cross entropy with its own tuned learning rate on the test seeds (paired by seed: the same documents in the same
order; two-sided sign-flip test over all seeds, each of these at a level of 0.05 / 4).

A base model (2 layers, hidden size 64) learns sequences of 128 tokens until it recalls; each run continues it in
sequences of 512 tokens with a RoPE base of 4000. All runs of a comparison take the same CPU time: a step's cost is the
median over rounds in which every setting takes a step in turn, so that a busy machine slows all of them, and a run
takes as many steps as fit in what cross entropy takes for `--steps`. Lightning is left out, because its fixed costs
would be a large part of a step of this size; windows share a pass, as on an accelerator. The cost by operations, as
``longce plan`` counts them, is given beside it.

    OMP_NUM_THREADS=1 python benchmarks/equal_compute.py --output runs/equal_compute [--quick]

The result of each run is a file in the output folder; the same command resumes, and prints the tables.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from recall_lab import (
    CROSS_ENTROPY,
    LENGTH,
    ROWS,
    Examination,
    Run,
    Setting,
    batch_of,
    documents,
    long_model,
    new_model,
    trained_base,
    trained_evaluator,
    training_rows,
)
from torch import Tensor

from lightning_modules.commands.plan.flops import ce_step_flops, forward_flops, short_pass_flops
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.functional import key_token_mask
from lightning_modules.models.short_context import long_and_short
from lightning_modules.objectives import (
    CrossEntropy,
    Interpolated,
    LongCE,
    MutualInformation,
    Normalized,
    Scheduled,
    Sparse,
    StoredInfluence,
)
from lightning_modules.scoring.influence_transfer import compute_influence

LEARNING_RATES = (4e-3, 8e-3, 16e-3, 32e-3)
TUNING_SEEDS, TEST_SEEDS = (100, 101), tuple(range(8))


SETTINGS: dict[str, Setting] = {
    "CE": CROSS_ENTROPY,
    "LongCE, d=K/4": Setting(lambda _: LongCE(), stride=16),
    "LongCE": Setting(lambda _: LongCE()),
    "LongCE, K=128": Setting(lambda _: LongCE(), 128, 128),
    "LongCE, K=192, d=160": Setting(lambda _: LongCE(), 192, 160),
    "LongCE, quarter of the windows": Setting(lambda _: LongCE(), window_share=0.25),
    "LongCE, bfloat16 short pass": Setting(lambda _: LongCE(), short_dtype="bfloat16"),
    "LongCE, first third": Setting(lambda steps: Scheduled(LongCE(), stop=steps // 3)),
    "LongCE, warm-up": Setting(lambda steps: Scheduled(LongCE(), warmup=steps // 3)),
    "LongCE, K=128, gamma=20": Setting(lambda _: LongCE(20.0), 128, 128),
    "LongCE, K=128, normalized": Setting(lambda _: Normalized(LongCE()), 128, 128),
    "LongCE, K=128, half CE": Setting(lambda _: Interpolated(LongCE()), 128, 128),
    "dense, K=128, half CE": Setting(lambda _: Interpolated(MutualInformation("absolute")), 128, 128),
    "PPMI, K=128, half CE": Setting(lambda _: Interpolated(MutualInformation("positive")), 128, 128),
    "sparse, K=128": Setting(lambda _: Sparse(), 128, 128),
    "stored weights": Setting(lambda _: StoredInfluence(), counts_scoring=False),
    "stored weights, gamma=20": Setting(lambda _: StoredInfluence(20.0), gamma=20.0, counts_scoring=False),
    "stored weights, with their scoring": Setting(lambda _: StoredInfluence()),
    "stored weights of the base": Setting(lambda _: StoredInfluence(), scorer="base", counts_scoring=False),
}
QUICK = ("CE", "LongCE", "LongCE, K=128", "stored weights")


def stored_json(path: Path, make: Callable[[], Any]) -> Any:
    if not path.exists():
        path.with_suffix(".part").write_text(json.dumps(make(), indent=1))
        path.with_suffix(".part").rename(path)
    return json.loads(path.read_text())


def step_costs(base: dict[str, Tensor], names: tuple[str, ...], rounds: int) -> dict[str, float]:
    """Measure the median CPU seconds of a step with weights, by setting; in each round all take one in turn."""
    rows = training_rows(rounds, length=LENGTH, rows=ROWS, slot=16, seed=7_000)
    weights = torch.ones(ROWS, LENGTH)
    runs = {name: Run(long_model(base), SETTINGS[name], steps=3, learning_rate=1e-3, seed=0) for name in names}
    times: dict[str, list[float]] = {name: [] for name in [*runs, "scoring"]}
    for ids in rows:
        for name, run in runs.items():
            stored = weights if run.objective.uses_stored_influence else None
            weighed = [step for step in range(3) if run.objective.at_step(step).uses_short_context]
            times[name].append(run.step(batch_of(ids), max(weighed, default=0), stored))
        started = time.process_time()
        compute_influence(batch_of(ids), runs["CE"].backbone, context_length=64, stride=64, gamma=5.0)
        times["scoring"].append(time.process_time() - started)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def step_flops(shape: ModelShape) -> dict[str, float]:
    """Count the operations of a step with weights, by setting."""
    ce = ce_step_flops(shape, LENGTH, "none").total
    scoring = forward_flops(shape, LENGTH, LENGTH - 1).total + short_pass_flops(shape, LENGTH, 64, 64).total
    result = {"scoring": scoring * ROWS}
    for name, setting in SETTINGS.items():
        short = short_pass_flops(shape, LENGTH, setting.context_length, setting.stride).total * setting.window_share
        result[name] = ROWS * (ce + (short if setting.objective(3).uses_short_context else 0.0))
    return result


def steps_within(name: str, costs: dict[str, float], budget: float) -> int:
    """Return the optimizer steps that fit in a budget of seconds or operations; schedules skip some short passes."""
    setting = SETTINGS[name]
    extra = costs["scoring"] if setting.objective(3).uses_stored_influence and setting.counts_scoring else 0.0

    def cost(steps: int) -> float:
        objective = setting.objective(steps)
        plain = sum(isinstance(objective.at_step(step), CrossEntropy) for step in range(steps))
        return plain * min(costs[name], costs["CE"]) + (steps - plain) * costs[name] + steps * extra

    low, high = 3, 10 * math.ceil(budget / costs["CE"])
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low


class Comparison:
    """All runs of one base model in one folder."""

    def __init__(
        self, folder: Path, *, base_seed: int, ce_steps: int, count: int, names: tuple[str, ...], rounds: int
    ) -> None:
        self.folder, self.ce_steps = folder, ce_steps
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        self.base = trained_base(folder, base_seed)
        self.scorers = {
            "evaluator": trained_evaluator(folder, self.base, 400),
            "base": long_model(self.base).eval().requires_grad_(False),
        }
        self.costs = stored_json(folder / "costs.json", lambda: step_costs(self.base, names, rounds))
        self.flops = step_flops(ModelShape.of(new_model(LENGTH, 4000.0).config))
        self.exams = {stage: self._examination(seed, count) for stage, seed in (("tune", 901), ("test", 902))}

    def _examination(self, seed: int, count: int) -> Examination:
        ids = documents(count, length=LENGTH, slot=16, seed=seed)
        scored = min(64, count)
        pair = long_and_short(self.scorers["evaluator"], batch_of(ids[:scored]), context_length=64, stride=64)
        return Examination(ids, key_token_mask(*pair))

    def result(self, stage: str, name: str, learning_rate: float, seed: int) -> dict[str, Any]:
        """Return the result of a run, which is read if it exists."""
        key = name.replace(" ", "_").replace("/", "-").replace(",", "")
        path = self.folder / "runs" / f"{stage}-{key}-{learning_rate:g}-{seed}.json"
        return stored_json(path, lambda: self._train(stage, name, learning_rate, seed))

    def _train(self, stage: str, name: str, learning_rate: float, seed: int) -> dict[str, Any]:
        setting = SETTINGS[name]
        steps = steps_within(name, self.costs, self.ce_steps * self.costs["CE"])
        rows = stored_rows(seed, 2 * self.ce_steps)[:steps]
        run = Run(long_model(self.base), setting, steps=steps, learning_rate=learning_rate, seed=seed)
        seconds = 0.0
        for number, ids in enumerate(rows):
            batch, stored = batch_of(ids), None
            if run.objective.uses_stored_influence:
                stored = compute_influence(
                    batch, self.scorers[setting.scorer], context_length=64, stride=64, gamma=setting.gamma
                )
            seconds += run.step(batch, number, stored)
        outcome = self.exams[stage](run.backbone)
        print(f"{stage} {name}, lr {learning_rate:g}, seed {seed}: {steps} steps, {outcome['recall']:.3f}", flush=True)
        return {
            "setting": name,
            "learning_rate": learning_rate,
            "seed": seed,
            "steps": steps,
            "seconds": seconds,
        } | outcome


@cache
def stored_rows(seed: int, steps: int) -> Tensor:
    return training_rows(steps, length=LENGTH, rows=ROWS, slot=16, seed=seed)


# --------------------------------------------------------------------------------------------------------- statistics


def sign_flip_p(differences: list[float]) -> float:
    """Return the two-sided p of the mean difference under the exact sign-flip distribution."""
    observed = abs(math.fsum(differences)) - 1e-12
    flips = itertools.product((1, -1), repeat=len(differences))
    return statistics.mean(
        abs(math.fsum(s * d for s, d in zip(f, differences, strict=True))) >= observed for f in flips
    )


def t_test(differences: list[float]) -> tuple[float, float]:
    """Return the paired t and its two-sided p, by integrating the density of Student's distribution."""
    n = len(differences)
    t = statistics.mean(differences) / max(statistics.stdev(differences) / math.sqrt(n), 1e-12)
    scale = math.gamma(n / 2) / (math.sqrt((n - 1) * math.pi) * math.gamma((n - 1) / 2))
    x = torch.linspace(0, min(abs(t), 1e3), 100_001, dtype=torch.float64)
    inside = 2 * scale * torch.trapezoid((1 + x**2 / (n - 1)) ** (-n / 2), x)
    return t, max(0.0, 1 - float(inside))


# -------------------------------------------------------------------------------------------------------------- report


def tune(comparison: Comparison, names: tuple[str, ...], finalists: int = 4) -> dict[str, list[Any]]:
    """Return learning rate, mean recall and number of tuning seeds by setting.

    First, with one seed: the two middle learning rates and the neighbor of the better one; all rates for cross entropy.
    Then, with the other seeds: the best two rates of cross entropy, of the best settings, and of the two best settings
    that score their tokens themselves.
    """
    first, *others = TUNING_SEEDS
    recall = {}
    for name in names:
        middle = LEARNING_RATES if name == "CE" else LEARNING_RATES[1:-1]
        recall[name] = {lr: comparison.result("tune", name, lr, first)["recall"] for lr in middle}
        best_so_far = LEARNING_RATES.index(max(recall[name], key=recall[name].__getitem__))
        for lr in LEARNING_RATES[max(best_so_far - 1, 0) : best_so_far + 2]:
            recall[name][lr] = comparison.result("tune", name, lr, first)["recall"]
    best = {name: [max(by_lr, key=by_lr.__getitem__), max(by_lr.values()), 1] for name, by_lr in recall.items()}
    rivals = sorted((name for name in names if name != "CE"), key=lambda name: -best[name][1])
    own = [name for name in rivals if not SETTINGS[name].objective(3).uses_stored_influence][:2]
    for name in dict.fromkeys(("CE", *rivals[:finalists], *own)):
        means = {}
        for lr in sorted(recall[name], key=recall[name].__getitem__)[-2:]:
            more = [comparison.result("tune", name, lr, seed)["recall"] for seed in others]
            means[lr] = statistics.mean([recall[name][lr], *more])
        lr = max(means, key=means.__getitem__)
        best[name] = [lr, means[lr], len(TUNING_SEEDS)]
    return best


def tuning_table(comparison: Comparison, best: dict[str, list[Any]]) -> None:
    costs, flops = comparison.costs, comparison.flops
    print("\n| setting | step: CPU | step: operations | steps at equal CPU | best lr | far recall | tuning seeds |")
    print("|---|---|---|---|---|---|---|")
    for name, (lr, recall, seeds) in best.items():
        steps = steps_within(name, costs, comparison.ce_steps * costs["CE"])
        ratio, operations = costs[name] / costs["CE"], flops[name] / flops["CE"]
        print(f"| {name} | {ratio:.2f} | {operations:.2f} | {steps} | {lr:g} | {recall:.1%} | {seeds} |")


def test_table(comparison: Comparison, best: dict[str, list[Any]], seeds: tuple[int, ...]) -> None:
    """Print cross entropy and the settings that were best in tuning, on the test seeds, with paired tests."""
    ranked = sorted((name for name in best if name != "CE"), key=lambda name: (-best[name][2], -best[name][1]))
    own = next((name for name in ranked if not SETTINGS[name].objective(3).uses_stored_influence), None)
    rivals = dict.fromkeys([*ranked[:3], *([] if own is None else [own])])
    runs = {name: [comparison.result("test", name, best[name][0], seed) for seed in seeds] for name in ("CE", *rivals)}
    print(
        f"\n| setting ({len(seeds)} seeds, lr) | steps | CPU s | operations / CE | recall | PPL | LongPPL | - CE | p |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, results in runs.items():
        mean = {key: statistics.mean(r[key] for r in results) for key in ("seconds", "recall", "perplexity", "longppl")}
        spread = statistics.stdev(r["recall"] for r in results)
        steps = results[0]["steps"]
        operations = steps * comparison.flops[name] / (runs["CE"][0]["steps"] * comparison.flops["CE"])
        end = ""
        if name != "CE":
            pairs = zip(results, runs["CE"], strict=True)
            differences = [ours["recall"] - ce["recall"] for ours, ce in pairs]
            t, p = t_test(differences)
            wins = sum(d > 0 for d in differences)
            end = (
                f" {100 * statistics.mean(differences):+.1f} ({100 * min(differences):+.1f} .."
                f" {100 * max(differences):+.1f}, {wins} of {len(seeds)} above 0)"
                f" | {sign_flip_p(differences):.3f} (t = {t:.2f}, p = {p:.3f})"
            )
        print(
            f"| {name} ({best[name][0]:g}) | {steps} | {mean['seconds']:.1f} | {operations:.2f}"
            f" | {mean['recall']:.1%} +- {spread:.1%} | {mean['perplexity']:.1f} | {mean['longppl']:.2f}"
            f" |{end or ' | '} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/equal_compute"))
    parser.add_argument("--steps", type=int, default=150, help="of cross entropy, whose CPU time the others get")
    parser.add_argument("--documents", type=int, default=500, help="that recall is measured on")
    parser.add_argument("--base-seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="four settings, fewer and shorter runs: about 3 minutes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names, seeds = tuple(SETTINGS), TEST_SEEDS
    if options.quick:
        names, seeds = QUICK, TEST_SEEDS[:5]
        options.steps, options.documents = min(options.steps, 40), min(options.documents, 100)
    folder = (
        options.output
        / f"{'quick-' if options.quick else ''}base{options.base_seed}-{options.steps}-{options.documents}"
    )
    comparison = Comparison(
        folder,
        base_seed=options.base_seed,
        ce_steps=options.steps,
        count=options.documents,
        names=names,
        rounds=14,
    )
    best = tune(comparison, names)
    tuning_table(comparison, best)
    test_table(comparison, best, seeds)


if __name__ == "__main__":
    main()
