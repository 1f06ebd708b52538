"""Decide which claims are reproduced, by thresholds and margins fixed before any result was seen.

The rules of LongCE's gain are later, and stricter. After the first base seed, the budget of "equal training time" and
"equal FLOPs" was cut to the last step of cross entropy. When single base seeds contradicted each other, the gain became
testable with three base seeds only. When it was found that LongCE's weights act as a larger learning rate, each
objective got its own, and the gain an interval; before, a mean of 2 points and 80% of the pairs above 0 were enough.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from lightning_modules.utilities.statistics import weighted_mean_interval

Outcome = Literal["reproduced", "not reproduced", "not testable at this size"]

STRONG = -0.8
"""Largest Spearman correlation that counts as strong; perplexities fall as accuracy rises."""

CLEARLY_WEAKER = 0.3
"""By how much a correlation must be nearer to zero than LongPPL's to count as clearly weaker."""

WEAKER = 0.1
"""The same for variants of LongPPL, which the paper finds a little weaker."""

MIN_RANGE = 0.2
"""Difference of accuracy between the best and the worst model without which a correlation over models means nothing."""

MIN_BASES = 3
"""Base models without which nothing is said of LongCE against CE: pairs of one base are not independent."""

MIN_GAIN = 0.02
"""Least difference of accuracy that counts as a gain."""

SAME_PERPLEXITY = 1.05
"""Largest ratio of perplexities that counts as none."""

MIN_PRECISION, MIN_PRECISION_GAIN = 0.75, 0.3
MIN_R_SQUARED = 0.9
MIN_LOSS_GAIN = 0.02  # nats: what no context lowers cannot follow a power law of it
_UNKNOWN = re.compile(r"[+-]?nan\b")
MIDDLE_LOSS = 0.05
"""Least difference of accuracy between the worse end and the middle that counts as lost in the middle."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim.

    Attributes:
        experiment: Letter of the experiment.
        claim: The claim and its place in the paper.
        rule: Condition under which it is reproduced.
        rule_is_older: Whether the rule is older than all results, and was not made stricter since.
        outcome: Whether it is reproduced.
        numbers: The numbers that decide it.
    """

    experiment: str
    claim: str
    rule: str
    rule_is_older: bool
    outcome: Outcome
    numbers: str


@dataclass(frozen=True)
class _Finding:
    """A claim, its rule and numbers, and whether it holds."""

    claim: str
    rule: str
    holds: bool
    numbers: str
    testable: bool = True
    rule_is_older: bool = True

    @property
    def outcome(self) -> Outcome:
        if not self.testable:
            return "not testable at this size"
        return "reproduced" if self.holds else "not reproduced"


def verdicts(experiments: dict[str, Any]) -> list[Verdict]:
    """Return the verdict on each claim, in the order of the experiments.

    Args:
        experiments: Result of `benchmarks.reproduction.miniature.experiments.run_experiments`.
    """
    rules: dict[str, Callable[[Any], Iterator[_Finding]]] = {
        "A": _correlations,
        "B": _objectives,
        "C": _classification,
        "D": _hyperparameters,
        "E": _loss_by_context,
        "F": _accuracy_by_depth,
    }
    return [
        Verdict(letter, found.claim, found.rule, found.rule_is_older, found.outcome, _UNKNOWN.sub("—", found.numbers))
        for letter, rule in rules.items()
        if letter in experiments
        for found in rule(experiments[letter])
    ]


def summarize(found: Sequence[Verdict]) -> str:
    """Return how many claims are reproduced, and which rules are younger than some results."""
    counts = Counter(verdict.outcome for verdict in found)
    younger = [verdict.claim for verdict in found if not verdict.rule_is_older]
    text = f"{counts['reproduced']} of {len(found)} claims are reproduced"
    text += "".join(f", {counts[outcome]} {outcome}" for outcome in get_args(Outcome)[1:] if counts[outcome])
    stricter = f" The rules of {len(younger)} claims became stricter after the first results." if younger else ""
    return f"{text}.{stricter}"


def mean_spearman(experiment: dict[str, Any], metric: str) -> float:
    """Return the mean over base seeds of a metric's Spearman correlation; NaN if one is missing."""
    return _mean([seed["correlations"]["trained"][metric].get("spearman", math.nan) for seed in experiment["seeds"]])


def _correlations(experiment: dict[str, Any]) -> Iterator[_Finding]:
    accuracies = [
        [model["accuracy"] for model in seed["models"] if model["group"] == "trained"] for seed in experiment["seeds"]
    ]
    testable = all(max(seed) - min(seed) >= MIN_RANGE for seed in accuracies)

    def weaker(claim: str, metric: str, margin: float, *, than: str = "longppl", strong: bool = False) -> _Finding:
        best, other = mean_spearman(experiment, than), mean_spearman(experiment, metric)
        holds = abs(best) - abs(other) >= margin and (not strong or best <= STRONG)
        rule = f"|Spearman| lower by {margin} or more" + (f", and the former at most {STRONG}" if strong else "")
        known = not math.isnan(best + other)
        return _Finding(claim, rule, holds, f"Spearman {best:.2f} and {other:.2f}", testable and known)

    longppl = mean_spearman(experiment, "longppl")
    yield _Finding(
        "LongPPL correlates strongly with long-context ability (Fig. 1, 5)",
        f"Spearman at most {STRONG}",
        longppl <= STRONG,
        f"Spearman {longppl:.2f}",
        testable and not math.isnan(longppl),
    )
    yield weaker("PPL does not correlate where LongPPL does (Table 1)", "perplexity", CLEARLY_WEAKER, strong=True)
    yield weaker(
        "PPL of answers correlates, PPL of other tokens does not (Fig. 2, Table 9)",
        "perplexity_others",
        CLEARLY_WEAKER,
        than="perplexity_answers",
        strong=True,
    )
    yield weaker("Soft influence makes a weaker metric (Table 1)", "longppl_soft", WEAKER)
    yield weaker("Without the LCL condition it is weaker", "longppl_without_lcl", WEAKER)
    yield weaker("A model that evaluates itself is less informative (Table 6)", "longppl_self", WEAKER)
    yield weaker("Recurring N-grams do not explain it (Table 11)", "perplexity_ngrams", CLEARLY_WEAKER)


def _objectives(experiment: dict[str, Any]) -> Iterator[_Finding]:
    pairs = experiment["pairs"]
    testable = len({pair["base"] for pair in pairs}) >= MIN_BASES
    budgets = {
        "steps": "equal steps (Table 3)",
        "cpu_seconds": "equal training time (Fig. 7)",
        "flops": "equal FLOPs",
    }
    for key, budget in budgets.items():
        gains = [pair["gain_at_equal"][key] for pair in pairs]
        interval = weighted_mean_interval(np.asarray(gains), np.ones(len(gains)))
        shown = "" if interval is None else f" ({100 * interval[0]:+.1f} to {100 * interval[1]:+.1f})"
        yield _Finding(
            f"LongCE is ahead of CE at {budget}",
            "95% interval of the gain above 0 (Student's t over pairs), each objective with its best learning rate;"
            f" testable with {MIN_BASES} base seeds",
            interval is not None and interval[0] > 0,
            f"{100 * _mean(gains):+.1f} points{shown}, {len(gains)} pairs",
            testable and interval is not None,
            rule_is_older=False,
        )
    accuracy = _mean([pair["short"]["LongCE"]["accuracy"] - pair["short"]["CE"]["accuracy"] for pair in pairs])
    ratio = _mean([pair["short"]["LongCE"]["perplexity"] / pair["short"]["CE"]["perplexity"] for pair in pairs])
    yield _Finding(
        "LongCE costs nothing in short contexts (Table 10)",
        f"accuracy within {100 * MIN_GAIN:.0f} points of CE's, or above, and perplexity at most"
        f" {SAME_PERPLEXITY} times CE's; testable with {MIN_BASES} base seeds",
        accuracy >= -MIN_GAIN and ratio <= SAME_PERPLEXITY,
        f"{100 * accuracy:+.1f} points, {ratio:.3f} times",
        testable,
        rule_is_older=False,
    )


def _classification(experiment: dict[str, Any]) -> Iterator[_Finding]:
    lsd, both = experiment["rules"]["LSD"], experiment["rules"]["LSD and LCL"]
    testable = experiment["answers"] >= 30
    yield _Finding(
        "LSD tells answers from other tokens (Fig. 3, 4b)",
        "balanced accuracy of 0.8 or more (a guess has 0.5)",
        lsd["balanced_accuracy"] >= 0.8,
        f"balanced accuracy {lsd['balanced_accuracy']:.3f}",
        testable,
    )
    yield _Finding(
        "The LCL condition removes tokens that are hard in any context (Fig. 4b)",
        f"precision of {MIN_PRECISION} or more, and {MIN_PRECISION_GAIN} above that of LSD alone",
        both["precision"] >= MIN_PRECISION and both["precision"] - lsd["precision"] >= MIN_PRECISION_GAIN,
        f"precision {both['precision']:.3f} and {lsd['precision']:.3f}, recall {both['recall']:.3f}",
        testable,
    )


def _hyperparameters(experiment: dict[str, Any]) -> Iterator[_Finding]:
    cells = [cell.get("spearman", math.nan) for grid in experiment["thresholds"] for cell in grid]
    share = sum(value <= STRONG for value in cells) / len(cells)
    yield _Finding(
        "LongPPL hardly depends on alpha and beta (Table 2)",
        f"Spearman at most {STRONG} in 75 % of the grid",
        share >= 0.75,
        f"{100 * share:.0f} % of {len(cells)} cells",
        not all(math.isnan(value) for value in cells),
    )
    default: list[dict[str, Any]] = []
    others: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for entry in (entry for entry in experiment["windows"] if entry["objective"] == "LongCE"):
        sizes = entry["context_length"], entry["stride"]
        (default if entry["default"] else others.setdefault(sizes, [])).append(entry)
    if not others:
        return

    def mean(entries: list[dict[str, Any]], key: str) -> float:
        return _mean([entry[key] for entry in entries])

    sizes, cheapest = min(others.items(), key=lambda item: mean(item[1], "flops_overhead"))
    lost = mean(default, "accuracy") - mean(cheapest, "accuracy")
    yield _Finding(
        "Other K and d make LongCE cheaper at almost no loss (Table 7)",
        f"the cheapest by FLOPs takes less CPU time than the default and loses {100 * MIN_GAIN:.0f} points at most",
        mean(cheapest, "overhead") < mean(default, "overhead") and lost <= MIN_GAIN,
        f"K={sizes[0]}, d={sizes[1]}: overhead {100 * mean(cheapest, 'overhead'):.0f} % instead of"
        f" {100 * mean(default, 'overhead'):.0f} %, {-100 * lost:+.1f} points",
    )


def _loss_by_context(experiment: dict[str, Any]) -> Iterator[_Finding]:
    models = [model for model in experiment["models"] if model["name"] != "evaluator"]
    longest, shortest = (find(model["rows"] for model in models) for find in (max, min))
    of_long = [model for model in models if model["rows"] == longest]
    fitted = [model["fit"]["r_squared"] for model in of_long if model["fit"] is not None]
    gain = _mean([model["gain"] for model in of_long])
    gain_of_short = _mean([model["gain"] for model in models if model["rows"] == shortest])
    yield _Finding(
        "Loss falls with context by a power law (Xiong et al., 2023, Fig. 1)",
        f"R² of {MIN_R_SQUARED} or more for each model of the longest rows; testable if context gains them"
        f" {MIN_LOSS_GAIN} nats",
        bool(fitted) and min(fitted) >= MIN_R_SQUARED,
        f"R² from {min(fitted, default=math.nan):.3f} to {max(fitted, default=math.nan):.3f}, {gain:.3f} nats",
        bool(fitted) and gain >= MIN_LOSS_GAIN,
    )
    yield _Finding(
        "Who was trained on longer rows gains more from context (Xiong et al., 2023)",
        f"{MIN_LOSS_GAIN} nats more, on average",
        gain - gain_of_short >= MIN_LOSS_GAIN,
        f"{gain:.3f} nats after rows of {longest}, {gain_of_short:.3f} after rows of {shortest}",
        longest > shortest,
    )


def _accuracy_by_depth(experiment: dict[str, Any]) -> Iterator[_Finding]:
    shares = experiment["models"]["CE"]
    yield _Finding(
        "Facts in the middle are found less often than at either end (Liu et al., 2023)",
        f"{100 * MIDDLE_LOSS:.0f} points less than at the worse end, after CE",
        min(shares[0], shares[-1]) - shares[len(shares) // 2] >= MIDDLE_LOSS,
        ", ".join(f"{100 * share:.0f}" for share in shares) + " % from the front to the end of the far part",
        len(shares) >= 3 and experiment["questions_per_depth"] >= 30,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
