"""Recompute the verdicts of `docs/real.md` from the raw numbers in `benchmarks/results/real_*.json`, with numpy alone.

    python benchmarks/real_models/verdicts.py

It imports nothing of longce: ranks, intervals and tests are written down again.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "results"
Verdict = tuple[str, bool, str]
"""Claim, whether it holds, and the numbers."""


def judge_anatomy(numbers: dict[str, Any]) -> Iterator[Verdict]:
    """Yield the verdicts on the five hypotheses of ``anatomy``."""
    for name, found in numbers["evaluators"].items():
        kinds = found["kinds"]
        for kind in ("names", "numbers"):
            low, every = kinds[kind]["interval"][0], kinds[kind]["all"]
            text = f"{kinds[kind]['key']:.3f} of key tokens ({low:.3f} or more), {every:.3f} of all"
            yield f"1. {name}: key tokens are parts of {kind} more often", low > every, text
        far = found["history"]["only in the far context"]
        yield f"2. {name}: most are of words of the far context only", far["interval"][0] > 0.5, f"{far['key']:.3f}"
        for n, counter in found["counter"].items():
            text = f"recall {counter['recall']:.3f}, precision {counter['precision']:.3f}"
            insufficient = counter["recall"] < 0.5 or counter["precision"] < 0.5
            yield f"4. {name}: repeated {n}-grams do not replace it", insufficient, text
    values = [value for value in numbers["agreement"]["documents"].values() if not math.isnan(value)]
    yield "3. the evaluators agree", float(np.mean(values)) > 0.5, f"mean Jaccard index {np.mean(values):.3f}"
    other = np.nanmean(list(numbers["stability"]["the other evaluator"]["documents"].values()))
    for name, found in numbers["stability"].items():
        if name != "the other evaluator":
            own = np.nanmean(list(found["documents"].values()))
            yield f"5. {name} matters less than the evaluator", bool(own > other), f"{own:.3f} against {other:.3f}"


def judge_correlate(numbers: dict[str, Any]) -> Iterator[Verdict]:
    """Yield the verdicts on the five hypotheses of ``correlate``."""
    systems = numbers["systems"]
    accuracy = np.array([np.mean(system["right"]) for system in systems])
    perplexity = np.log([system["metrics"]["perplexity"] for system in systems])
    evaluators = [name for name, found in systems[0]["metrics"].items() if isinstance(found, dict)]
    small = [index for index, system in enumerate(systems) if system["model"] == systems[0]["model"]]
    for name in evaluators:
        longppl, bits = (
            np.log([system["metrics"][name][metric] for system in systems])
            for metric in ("longppl", "key_bits_per_byte")
        )
        everywhere = numbers["correlations"]["over all"][f"{name}: longppl"]["spearman"]
        value, high = _spearman(longppl, accuracy), everywhere["interval"][1]
        assert abs(value - everywhere["value"]) < 1e-9
        yield f"1. {name}: LongPPL predicts accuracy", high < -0.5, f"{value:.3f}, at most {high:.3f}"
        p = _williams(longppl, perplexity, accuracy)
        against = _spearman(perplexity, accuracy)
        yield f"2. {name}: better than perplexity", p < 0.05 and value < against, f"perplexity {against:.3f}, p {p:.4f}"
        within = numbers["correlations"]["within"][systems[0]["model"]][f"{name}: longppl"]
        own = _spearman(longppl[small], accuracy[small])
        assert abs(own - within["value"]) < 1e-9
        text = f"{own:.3f}, at most {within['interval'][1]:.3f}"
        yield f"3. {name}: within {systems[0]['model']}", within["interval"][1] < -0.5, text
        shared = _spearman(bits, accuracy)
        yield (
            f"4. {name}: key bits per byte predict as well",
            shared <= value + 0.05,
            f"{shared:.3f} against {value:.3f}",
        )
        few = numbers["correlations"]["twenty questions"]
        text = f"{few[f'{name}: longppl']:.3f} against {few['20 questions']:.3f}"
        yield f"5. {name}: more than 20 questions", abs(few[f"{name}: longppl"]) > abs(few["20 questions"]), text


def describe_measured(systems: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield rank correlations with accuracy over these systems, and their range without one of them; no verdicts."""
    accuracy = [np.mean(system["right"]) for system in systems]
    evaluators = [name for name, found in systems[0]["metrics"].items() if isinstance(found, dict)]
    values = {"perplexity": [system["metrics"]["perplexity"] for system in systems]}
    for name in evaluators:
        values[f"LongPPL by {name}"] = [system["metrics"][name]["longppl"] for system in systems]
    for name, numbers in values.items():
        without = [_spearman(np.delete(numbers, one), np.delete(accuracy, one)) for one in range(len(systems))]
        yield (
            f"{name}: Spearman {_spearman(numbers, accuracy):.3f} over {len(systems)} systems, {min(without):.3f} to"
            f" {max(without):.3f} without one of them"
        )


def judge_extend(numbers: dict[str, Any]) -> Iterator[Verdict]:
    """Yield which methods keep the far context, and whether LongPPL separates them more than perplexity."""
    for name, found in numbers["methods"].items():
        ratio, _, high = found["ranges"]["beyond 8k"]["longppl ratio"]
        if name != "none":
            yield (
                f"1. {name} keeps the far context",
                high is not None and high < 1,
                f"ratio {ratio:.3f}, at most {high}",
            )
    spread = {}
    for kind in ("longppl", "perplexity"):
        spread[kind] = np.std(
            [math.log(found["ranges"]["beyond 8k"][kind]) for found in numbers["methods"].values()], ddof=1
        )
    text = f"{spread['longppl']:.3f} against {spread['perplexity']:.3f}"
    yield "2. LongPPL separates the methods more", bool(spread["longppl"] >= 2 * spread["perplexity"]), text


def judge_fine_tune(numbers: dict[str, Any]) -> Iterator[Verdict]:
    """Yield the verdicts on the four hypotheses of ``fine_tune``, of which ``fine_tune_8k`` has all but the third."""
    own = "qwen2.5-coder-0.5b"  # has stored no weights
    if own not in numbers["rows"][0]["ratio"]:
        own = "gemma-3-270m"
    rows = {(row["start"], row["weighting"], row["budget"]): row["ratio"] for row in numbers["rows"]}
    hypotheses = {
        "LongCE": "1",
        "LongCE, half CE": "1",
        "stored by the evaluator": "3",
        "control: shuffled weights": "3",
    }
    for (start, name, budget), ratios in rows.items():
        if name == "CE":
            continue
        found = ratios[own]
        high = found["interval"][1]
        pays = high < 1 and max(found["by_seed"]) < 1
        number = "2" if budget == "time" else hypotheses[name]
        expected = not pays if name.startswith("control") else pays
        claim = f"{number}. {start}, {name}, {budget}: {'does not pay' if name.startswith('control') else 'pays'}"
        yield claim, expected, f"ratio {found['ratio']:.3f}, at most {high:.3f}, by seed {max(found['by_seed']):.3f}"
        harm = ratios["short"]["interval"][1]
        yield f"4. {start}, {name}, {budget}: short perplexity unharmed", harm < 1.01, f"at most {harm:.4f}"


def _spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    return float(np.corrcoef(_rank(x), _rank(y))[0, 1])


def _rank(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return ranks in which equal values share their mean."""
    values = np.asarray(values)
    return np.array([np.sum(values < each) + (np.sum(values == each) + 1) / 2 for each in values])


def _williams(first: np.ndarray, second: np.ndarray, score: np.ndarray) -> float:
    """Return the p-value of Williams' test of two dependent correlations, by numerical integration of Student's t."""
    a, b, c, n = _spearman(first, score), _spearman(second, score), _spearman(first, second), len(score)
    determinant = 1 - a * a - b * b - c * c + 2 * a * b * c
    variance = 2 * (n - 1) / (n - 3) * determinant + ((a + b) / 2) ** 2 * (1 - c) ** 3
    t, degrees = abs((a - b) * math.sqrt((n - 1) * (1 + c) / variance)), n - 3
    grid = np.linspace(0, t, 200_001)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    density = scale * (1 + grid**2 / degrees) ** (-(degrees + 1) / 2)
    return float(1 - 2 * np.trapezoid(density, grid))


def main() -> None:
    """Print the verdicts of all studies that have been run, and what an unfinished ``correlate`` has measured."""
    judges = {"anatomy": judge_anatomy, "correlate": judge_correlate, "extend": judge_extend}
    for name, judge in (judges | {"fine_tune": judge_fine_tune, "fine_tune_8k": judge_fine_tune}).items():
        file = FOLDER / f"real_{name}.json"
        if file.exists():
            print(name)
            for claim, holds, text in judge(json.loads(file.read_text())["numbers"]):
                print(f"  {'holds  ' if holds else 'REJECTED'} {claim}: {text}")
    kept = FOLDER / "real" / "correlate.json"
    if kept.exists() and not (FOLDER / "real_correlate.json").exists():
        systems = list(json.loads(kept.read_text()).values())
        first = [system for system in systems if system["model"] == systems[0]["model"]]
        print("correlate, unfinished: all models", *describe_measured(systems), sep="\n  ")
        print(f"correlate, unfinished: {first[0]['model']}", *describe_measured(first), sep="\n  ")


if __name__ == "__main__":
    main()
