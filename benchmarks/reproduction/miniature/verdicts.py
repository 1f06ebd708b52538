"""When a claim counts as reproduced: by thresholds and margins that were fixed before any result was looked at.

Two rules came later, and are stricter: the budget of "equal training time" and "equal FLOPs" was cut to cross entropy's
last step after the first base seed; and what LongCE gains became testable with three base seeds only when the results
of single ones were seen to contradict each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["reproduced", "not reproduced", "not testable at this size"]

STRONG = -0.8
"""Largest Spearman correlation that counts as strong; perplexities fall as accuracy rises."""

CLEARLY_WEAKER = 0.3
"""By how much a correlation must be nearer to zero than LongPPL's to count as clearly weaker."""

WEAKER = 0.1
"""The same for variants of LongPPL, which the paper finds a little weaker."""

LEAST_RANGE = 0.2
"""Difference of accuracy between the best and the worst model without which a correlation over models means nothing."""

LEAST_BASES = 3
"""Base models without which nothing is said of LongCE against CE: pairs of one base are not independent."""

LEAST_GAIN = 0.02
"""Least difference of accuracy that counts as a gain."""

SAME_PERPLEXITY = 1.05
"""Largest ratio of perplexities that counts as none."""

LEAST_PRECISION, LEAST_PRECISION_GAIN = 0.75, 0.3
LEAST_R_SQUARED = 0.9
LEAST_LOSS_GAIN = 0.02  # nats: what no context lowers cannot follow a power law of it
MIDDLE_LOSS = 0.05
"""Least difference of accuracy between the worse end and the middle that counts as lost in the middle."""


@dataclass(frozen=True)
class Verdict:
    """What became of a claim.

    Attributes:
        experiment: Letter of the experiment.
        claim: What the paper says, and where.
        rule: When it counts as reproduced.
        outcome: Whether it is.
        numbers: What that was decided by.
    """

    experiment: str
    claim: str
    rule: str
    outcome: Outcome
    numbers: str


def verdicts(experiments: dict[str, Any]) -> list[Verdict]:
    """The verdict on each claim, in the order of the experiments.

    Args:
        experiments: What `benchmarks.reproduction.miniature.experiments.run_experiments` gives.
    """
    rules: dict[str, Callable[[Any], list[Verdict]]] = {
        "A": _correlations,
        "B": _objectives,
        "C": _classification,
        "D": _hyperparameters,
        "E": _loss_by_context,
        "F": _accuracy_by_depth,
    }
    return [verdict for letter, rule in rules.items() if letter in experiments for verdict in rule(experiments[letter])]


def _outcome(holds: bool, *, testable: bool = True) -> Outcome:
    if not testable:
        return "not testable at this size"
    return "reproduced" if holds else "not reproduced"


def mean_spearman(experiment: dict[str, Any], metric: str, group: str = "trained") -> float:
    """Mean over base seeds of a metric's Spearman correlation; NaN if one of them has none."""
    values = [seed["correlations"][group][metric].get("spearman", math.nan) for seed in experiment["seeds"]]
    return sum(values) / len(values)


def _correlations(experiment: dict[str, Any]) -> list[Verdict]:
    accuracies = [
        [model["accuracy"] for model in seed["models"] if model["group"] == "trained"] for seed in experiment["seeds"]
    ]
    testable = all(max(seed) - min(seed) >= LEAST_RANGE for seed in accuracies)
    longppl = mean_spearman(experiment, "longppl")

    def verdict(claim: str, metric: str, margin: float, *, against: str = "longppl", strong: bool = False) -> Verdict:
        best, other = mean_spearman(experiment, against), mean_spearman(experiment, metric)
        holds = abs(best) - abs(other) >= margin and (not strong or best <= STRONG)
        rule = f"|Spearman| lower by {margin} or more" + (f", and the former at most {STRONG}" if strong else "")
        known = not math.isnan(best + other)
        return Verdict(
            "A", claim, rule, _outcome(holds, testable=testable and known), f"Spearman {best:.2f} and {other:.2f}"
        )

    return [
        Verdict(
            "A",
            "LongPPL correlates strongly with long-context ability (Fig. 1, 5)",
            f"Spearman at most {STRONG}",
            _outcome(longppl <= STRONG, testable=testable and not math.isnan(longppl)),
            f"Spearman {longppl:.2f}",
        ),
        verdict("PPL does not correlate where LongPPL does (Table 1)", "perplexity", CLEARLY_WEAKER, strong=True),
        verdict(
            "PPL of answers correlates, PPL of other tokens does not (Fig. 2, Table 9)",
            "perplexity_others",
            CLEARLY_WEAKER,
            against="perplexity_answers",
            strong=True,
        ),
        verdict("Soft influence makes a weaker metric (Table 1)", "longppl_soft", WEAKER),
        verdict("Without the LCL condition it is weaker", "longppl_without_lcl", WEAKER),
        verdict("A model that evaluates itself says less (Table 6)", "longppl_self", WEAKER),
        verdict("Recurring N-grams do not explain it (Table 11)", "perplexity_ngrams", CLEARLY_WEAKER),
    ]


def _objectives(experiment: dict[str, Any]) -> list[Verdict]:
    pairs = experiment["pairs"]
    testable = len({pair["base"] for pair in pairs}) >= LEAST_BASES

    def gain(claim: str, key: str) -> Verdict:
        gains = [pair["gain_at_equal"][key] for pair in pairs]
        mean = _mean(gains)
        holds = mean >= LEAST_GAIN and sum(value > 0 for value in gains) >= 0.8 * len(gains)
        numbers = f"{100 * mean:+.1f} points ({100 * min(gains):+.1f} to {100 * max(gains):+.1f}, {len(gains)} pairs)"
        rule = (
            f"mean gain of {100 * LEAST_GAIN:.0f} points or more, and above 0 in 80 % of the pairs;"
            f" testable with {LEAST_BASES} base seeds"
        )
        return Verdict("B", claim, rule, _outcome(holds, testable=testable), numbers)

    accuracy = _mean([pair["short"]["LongCE"]["accuracy"] - pair["short"]["CE"]["accuracy"] for pair in pairs])
    ratio = _mean([pair["short"]["LongCE"]["perplexity"] / pair["short"]["CE"]["perplexity"] for pair in pairs])
    return [
        gain("LongCE is ahead of CE at equal steps (Table 3)", "steps"),
        gain("LongCE is ahead of CE at equal training time (Fig. 7)", "cpu_seconds"),
        gain("LongCE is ahead of CE at equal FLOPs", "flops"),
        Verdict(
            "B",
            "LongCE costs nothing in short contexts (Table 10)",
            f"accuracy within {100 * LEAST_GAIN:.0f} points of CE's, or above, and perplexity at most"
            f" {SAME_PERPLEXITY} times CE's",
            _outcome(accuracy >= -LEAST_GAIN and ratio <= SAME_PERPLEXITY, testable=testable),
            f"{100 * accuracy:+.1f} points, {ratio:.3f} times",
        ),
    ]


def _classification(experiment: dict[str, Any]) -> list[Verdict]:
    lsd, both = experiment["rules"]["LSD"], experiment["rules"]["LSD and LCL"]
    testable = experiment["answers"] >= 30
    precise = both["precision"] >= LEAST_PRECISION and both["precision"] - lsd["precision"] >= LEAST_PRECISION_GAIN
    return [
        Verdict(
            "C",
            "LSD tells answers from other tokens (Fig. 3, 4b)",
            "balanced accuracy of 0.8 or more (a guess has 0.5)",
            _outcome(lsd["balanced_accuracy"] >= 0.8, testable=testable),
            f"balanced accuracy {lsd['balanced_accuracy']:.3f}",
        ),
        Verdict(
            "C",
            "The LCL condition sorts out what is hard in any context (Fig. 4b)",
            f"precision of {LEAST_PRECISION} or more, and {LEAST_PRECISION_GAIN} above that of LSD alone",
            _outcome(precise, testable=testable),
            f"precision {both['precision']:.3f} and {lsd['precision']:.3f}, recall {both['recall']:.3f}",
        ),
    ]


def _hyperparameters(experiment: dict[str, Any]) -> list[Verdict]:
    cells = [cell.get("spearman", math.nan) for grid in experiment["thresholds"] for cell in grid]
    share = sum(value <= STRONG for value in cells) / len(cells)
    found = [
        Verdict(
            "D",
            "LongPPL hardly depends on alpha and beta (Table 2)",
            f"Spearman at most {STRONG} in 75 % of the grid",
            _outcome(share >= 0.75, testable=not all(math.isnan(value) for value in cells)),
            f"{100 * share:.0f} % of {len(cells)} cells",
        )
    ]
    longce = [entry for entry in experiment["windows"] if entry["objective"] == "LongCE"]
    others = {(e["context_length"], e["stride"]) for e in longce if not e["default"]}
    if not others:
        return found

    def mean(key: str, sizes: tuple[int, int] | None) -> float:
        chosen = [
            e[key] for e in longce if (e["default"] if sizes is None else (e["context_length"], e["stride"]) == sizes)
        ]
        return _mean(chosen)

    cheapest = min(others, key=lambda sizes: mean("flops_overhead", sizes))
    saved = mean("overhead", None) - mean("overhead", cheapest)
    lost = mean("accuracy", None) - mean("accuracy", cheapest)
    return [
        *found,
        Verdict(
            "D",
            "Other K and d make LongCE cheaper at almost no loss (Table 7)",
            "the cheapest by FLOPs takes less CPU time than the default and loses"
            f" {100 * LEAST_GAIN:.0f} points at most",
            _outcome(saved > 0 and lost <= LEAST_GAIN),
            f"K={cheapest[0]}, d={cheapest[1]}: overhead {100 * mean('overhead', cheapest):.0f} % instead of"
            f" {100 * mean('overhead', None):.0f} %, {-100 * lost:+.1f} points",
        ),
    ]


def _loss_by_context(experiment: dict[str, Any]) -> list[Verdict]:
    models = [model for model in experiment["models"] if model["name"] != "evaluator"]
    longest = max(model["rows"] for model in models)
    shortest = min(model["rows"] for model in models)
    of_long = [model for model in models if model["rows"] == longest]
    fitted = [model["fit"]["r_squared"] for model in of_long if model["fit"] is not None]
    gain = _mean([model["gain"] for model in of_long])
    gain_of_short = _mean([model["gain"] for model in models if model["rows"] == shortest])
    return [
        Verdict(
            "E",
            "Loss falls with context by a power law (Xiong et al., 2023, Fig. 1)",
            f"R² of {LEAST_R_SQUARED} or more for each model of the longest rows; testable if context gains them"
            f" {LEAST_LOSS_GAIN} nats",
            _outcome(
                bool(fitted) and min(fitted) >= LEAST_R_SQUARED, testable=bool(fitted) and gain >= LEAST_LOSS_GAIN
            ),
            f"R² from {min(fitted, default=math.nan):.3f} to {max(fitted, default=math.nan):.3f}, {gain:.3f} nats",
        ),
        Verdict(
            "E",
            "Who was trained on longer rows gains more from context (Xiong et al., 2023)",
            f"{LEAST_LOSS_GAIN} nats more, on average",
            _outcome(gain - gain_of_short >= LEAST_LOSS_GAIN, testable=longest > shortest),
            f"{gain:.3f} nats after rows of {longest}, {gain_of_short:.3f} after rows of {shortest}",
        ),
    ]


def _accuracy_by_depth(experiment: dict[str, Any]) -> list[Verdict]:
    shares = experiment["models"]["CE"]
    middle = len(shares) // 2
    loss = min(shares[0], shares[-1]) - shares[middle]
    return [
        Verdict(
            "F",
            "What stands in the middle is found less often than at either end (Liu et al., 2023)",
            f"{100 * MIDDLE_LOSS:.0f} points less than at the worse end, after CE",
            _outcome(loss >= MIDDLE_LOSS, testable=len(shares) >= 3 and experiment["questions_per_depth"] >= 30),
            ", ".join(f"{100 * share:.0f}" for share in shares) + " % from the front to the end of what is far",
        )
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
