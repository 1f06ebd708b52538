"""The report of a reproduction: Markdown with figures beside it, HTML that needs no other file, and all numbers."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.reproduction.miniature.plots import figures
from benchmarks.reproduction.miniature.results import METRICS
from benchmarks.reproduction.miniature.verdicts import Verdict, mean_spearman
from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.plain_json import plain
from lightning_modules.visualization.report import Block, Heading, Picture, Table, as_html, as_markdown

TITLE = "The paper in miniature"


def write_report(folder: Path, experiments: dict[str, Any], found: Sequence[Verdict], facts: dict[str, Any]) -> Path:
    """Write ``report.md``, ``report.html``, ``numbers.json`` and ``figures/*.svg``.

    Args:
        folder: Where to.
        experiments: Numbers by letter.
        found: The verdicts on them.
        facts: Settings, versions, seeds and costs; ``cpu_seconds``, ``seeds`` and ``corpus`` are told in the text.

    Returns:
        The HTML file.
    """
    pictures = figures(experiments)
    blocks = _blocks(experiments, found, facts)
    for name, svg in pictures.items():
        write_atomically(folder / "figures" / f"{name}.svg", svg.encode())
    numbers = {**facts, "verdicts": [asdict(verdict) for verdict in found], "experiments": experiments}
    write_atomically(folder / "numbers.json", (json.dumps(plain(numbers), indent=1) + "\n").encode())
    write_atomically(folder / "report.md", as_markdown(TITLE, blocks).encode())
    write_atomically(folder / "report.html", as_html(TITLE, blocks, pictures).encode())
    return folder / "report.html"


# -------------------------------------------------------------------------------------------------------------- content


def _blocks(experiments: dict[str, Any], found: Sequence[Verdict], facts: dict[str, Any]) -> list[Block]:
    seeds, seconds = facts["seeds"], facts["cpu_seconds"]
    blocks: list[Block] = [
        f"Models of {facts['parameters']:,} parameters, {facts['runs']} runs, {seeds} base seed{'s' * (seeds != 1)},"
        f" {seconds / 60:.1f} CPU minutes. The rules of the verdicts stand in `reproduction/verdicts.py` and were"
        f" written before the results. {facts['corpus']}",
        Heading("Verdicts"),
        Table(
            ("", "claim", "rule", "numbers", "verdict"),
            [(v.experiment, v.claim, v.rule, v.numbers, v.outcome) for v in found],
        ),
    ]
    sections = {
        "A": _correlations,
        "B": _objectives,
        "C": _classification,
        "D": _hyperparameters,
        "E": _loss_by_context,
        "F": _accuracy_by_depth,
    }
    for letter, section in sections.items():
        if letter in experiments:
            blocks += section(experiments[letter])
    versions = [(name, str(version)) for name, version in facts["versions"].items()]
    return [*blocks, Heading("Versions"), Table(("package", "version"), versions)]


def _correlations(experiment: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = [
        Heading("A. Which metric tells how well a model recalls (Tables 1, 6, 9, 11; Figures 1, 2, 5)"),
        "Models differ in local quality, by the share of their training documents in the dialect that is evaluated"
        " (0, 0.5, 1), and in range, by the length of their rows. Extended ones have another RoPE base and no more"
        " training.",
        Picture("correlation", "Share of right answers against PPL and LongPPL, a point per model."),
    ]
    for group, title in (("trained", "the models of the family"), ("all", "these and their RoPE extensions")):
        rows = []
        for metric, name in METRICS.items():
            entries = [seed["correlations"][group][metric] for seed in experiment["seeds"]]
            defined = [entry for entry in entries if "spearman" in entry]
            pearsons = [entry["pearson"] for entry in defined]
            cells = (
                f"{mean_spearman(experiment, metric, group):.2f}",
                "; ".join(_interval(entry["spearman"], entry["spearman_interval"]) for entry in defined) or "undefined",
                f"{sum(pearsons) / len(pearsons):.2f}" if pearsons else "undefined",
            )
            rows.append((name, *cells))
        blocks += [
            f"Correlation with accuracy over {title}; by base seed with bootstrap intervals (95 %) over models.",
            Table(("metric", "Spearman, mean", "by base seed", "Pearson, mean"), rows),
        ]
    names = ["accuracy", *METRICS]
    rows = [
        (f"{number}", model["name"], *(f"{model[name]:.3g}" for name in names))
        for number, seed in enumerate(experiment["seeds"])
        for model in seed["models"]
    ]
    return [*blocks, Table(("seed", "model", "accuracy", *METRICS.values()), rows)]


def _interval(value: float, interval: Sequence[float]) -> str:
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _objectives(experiment: dict[str, Any]) -> list[Block]:
    pairs = experiment["pairs"]
    steps = [entry["step"] for entry in pairs[0]["curves"]["LongCE"]]
    rows = []
    for pair in pairs:
        for name, curve in pair["curves"].items():
            at = {entry["step"]: entry["accuracy"] for entry in curve}
            short, metrics = pair["short"][name], pair["metrics"][name]
            rows.append(
                (
                    f"{pair['base']}, rows {pair['rows']}",
                    name,
                    *(f"{100 * at[step]:.1f}" for step in steps),
                    f"{metrics['perplexity']:.1f}",
                    f"{metrics['longppl']:.2f}",
                    f"{100 * short['accuracy']:.1f}",
                    f"{short['perplexity']:.1f}",
                )
            )
    gains = [
        (
            f"{pair['base']}, rows {pair['rows']}",
            *(f"{100 * pair['gain_at_equal'][key]:+.1f}" for key in ("steps", "cpu_seconds", "flops")),
            f"{pair['gain_at_equal']['cpu_ratio']:.2f}",
        )
        for pair in pairs
    ]
    return [
        Heading("B. LongCE against CE (Table 3, Figure 7, Table 10)"),
        Picture("objectives", "Share of right answers by steps and by CPU time."),
        "Accuracy (%) by step, and after the last of these steps perplexities of the documents, and accuracy and"
        " perplexity in short ones. Both objectives see the same rows.",
        Table(("", "objective", *map(str, steps), "PPL", "LongPPL", "short accuracy", "short PPL"), rows),
        f"LongCE less CE in points, and the CPU time of a step by that of CE; by FLOPs it is"
        f" {experiment['flops_ratio']:.2f}.",
        Table(("", "equal steps", "equal CPU time", "equal FLOPs", "time per step"), gains),
    ]


def _classification(experiment: dict[str, Any]) -> list[Block]:
    names = ("precision", "recall", "f1", "accuracy", "balanced_accuracy")
    rows = [(rule, *(f"{scores[name]:.3f}" for name in names)) for rule, scores in experiment["rules"].items()]
    return [
        Heading("C. LSD and LCL as classifiers of answers (Figures 3, 4b)"),
        f"{experiment['answers']} far answers among {experiment['tokens']:,} tokens that have a short context; answers"
        f" within reach of it are left out. The evaluator answers {100 * experiment['evaluator_accuracy']:.0f} % of the"
        " questions.",
        Table(("rule", *(name.replace("_", " ") for name in names)), rows),
        Picture("tokens", "Long-short difference and long-context likelihood by class of token."),
    ]


def _hyperparameters(experiment: dict[str, Any]) -> list[Block]:
    cells: dict[tuple[float, float], list[str]] = {}
    for grid in experiment["thresholds"]:
        for cell in grid:
            value = f"{cell['spearman']:.2f}" if "spearman" in cell else "undefined"
            cells.setdefault((cell["alpha"], cell["beta"]), []).append(value)
    counts = {(cell["alpha"], cell["beta"]): cell["key_tokens"] for cell in experiment["thresholds"][0]}
    thresholds = [(f"{a:g}", f"{b:g}", str(counts[a, b]), "; ".join(values)) for (a, b), values in cells.items()]
    windows = [
        (
            entry["base"],
            entry["objective"],
            str(entry.get("context_length", "")),
            str(entry.get("stride", "")),
            f"{100 * entry['accuracy']:.1f}",
            f"{100 * entry['overhead']:+.0f} %",
            f"{100 * entry.get('flops_overhead', 0.0):+.0f} %",
        )
        for entry in experiment["windows"]
    ]
    return [
        Heading("D. Thresholds (Table 2) and windows (Table 7)"),
        Table(("alpha", "beta", "key tokens", "Spearman by base seed"), thresholds),
        Table(("", "objective", "K", "d", "accuracy", "CPU time above CE", "FLOPs above CE"), windows),
    ]


def _loss_by_context(experiment: dict[str, Any]) -> list[Block]:
    rows = []
    for model in experiment["models"]:
        fit = model["fit"] or dict.fromkeys(("a", "b", "g", "r_squared"), math.nan)
        fitted = (f"{fit[name]:.3g}" for name in ("a", "b", "g", "r_squared"))
        rows.append((model["name"], *(f"{loss:.3f}" for loss in model["loss"]), *fitted))
    return [
        Heading("E. Loss by context"),
        "Mean loss (nats) of the same last tokens of all documents, given so many tokens before them, and the fit"
        " L(c) = (a/c)^b + g. Where b is near 0 the curve is a logarithm, and a and g by themselves say nothing.",
        Picture("contexts", "Loss by context and the fitted power law, of the evaluator and the first base seed."),
        Table(("model", *(f"{context}" for context in experiment["contexts"]), "a", "b", "g", "R²"), rows),
    ]


def _accuracy_by_depth(experiment: dict[str, Any]) -> list[Block]:
    depths = range(1, len(experiment["models"]["CE"]) + 1)
    rows = [(name, *(f"{100 * share:.1f}" for share in shares)) for name, shares in experiment["models"].items()]
    return [
        Heading("F. Lost in the middle"),
        "Right answers (%) by where the answer was given, from the front of the document (1) to the nearest place that"
        " is beyond a short context.",
        Picture("depths", "Share of right answers by the place of the answer."),
        Table(("model", *map(str, depths)), rows),
    ]
