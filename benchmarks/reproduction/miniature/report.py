"""The report of a reproduction: Markdown with figures beside it, HTML that needs no other file, and all numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from benchmarks.reproduction.miniature.measure import METRICS
from benchmarks.reproduction.miniature.plots import figures
from benchmarks.reproduction.miniature.verdicts import Outcome, Verdict, summarize
from lightning_modules.visualization import report
from lightning_modules.visualization.report import Block, Heading, Picture, Table, Tone

TITLE = "The paper in miniature"


def write_report(folder: Path, experiments: dict[str, Any], found: Sequence[Verdict], facts: dict[str, Any]) -> Path:
    """Write ``report.md``, ``report.html``, ``numbers.json`` and ``figures/*.svg``.

    Args:
        folder: Folder to write to.
        experiments: Numbers by letter.
        found: The verdicts on them.
        facts: Settings, versions, seeds and costs.

    Returns:
        The HTML file.
    """
    verdicts = [asdict(verdict) for verdict in found]
    blocks: list[Block] = [
        summarize(found),
        f"Models of {facts['parameters']:,} parameters, {facts['runs']} runs, {facts['seeds']} base seed(s),"
        f" {facts['cpu_seconds'] / 60:.1f} CPU minutes. The rules of the verdicts are in"
        f" `benchmarks/reproduction/miniature/verdicts.py`. {facts['corpus']}",
        Heading("Verdicts"),
        _verdict_table(found),
        *_correlations(experiments["A"]),
        *_objectives(experiments["B"]),
        Heading("C. LSD and LCL as classifiers of answers (Figures 3, 4b)"),
        f"{experiments['C']['answers']} far answers among {experiments['C']['tokens']:,} tokens that have a short"
        " context; answers within reach of it are left out. The evaluator answers"
        f" {experiments['C']['evaluator_accuracy']:.0%} of the questions.",
        _table({"rule": rule, **scores} for rule, scores in experiments["C"]["rules"].items()),
        Heading("D. Thresholds (Table 2) and windows (Table 7)"),
        _table({"seed": seed, **cell} for seed, grid in enumerate(experiments["D"]["thresholds"]) for cell in grid),
        _table(experiments["D"]["windows"]),
        *_loss_by_context(experiments["E"]),
        Heading("F. Lost in the middle"),
        "Share of right answers by the place of the answer, from the front of the document (1) to the nearest place"
        " beyond a short context.",
        _table(
            {"model": name, **dict(enumerate(shares, start=1))} for name, shares in experiments["F"]["models"].items()
        ),
        Heading("Versions"),
        _table({"package": name, "version": version} for name, version in facts["versions"].items()),
    ]
    numbers = {**facts, "verdicts": verdicts, "experiments": experiments}
    report.write_report(folder, TITLE, blocks, figures(experiments), numbers, name="numbers")
    return folder / "report.html"


def _verdict_table(found: Sequence[Verdict]) -> Table:
    """Return the verdict on each claim with its numbers, and the rule that decides."""
    rows = [
        [
            each.outcome,
            each.claim,
            each.numbers,
            each.rule,
            "" if each.rule_is_older else "made stricter after the first results",
            each.experiment,
        ]
        for each in found
    ]
    badges: dict[str, Tone] = dict(zip(get_args(Outcome), ("good", "bad", "open"), strict=True))
    return Table(("verdict", "claim", "numbers", "rule", "age of the rule", "experiment"), rows, badges, folded=False)


def _correlations(experiment: dict[str, Any]) -> list[Block]:
    seeds = list(enumerate(experiment["seeds"]))
    return [
        Heading("A. Which metric predicts how well a model recalls (Tables 1, 6, 9, 11; Figures 1, 2, 5)"),
        "Models differ in local quality, by the share of their training documents in the dialect that is evaluated"
        " (0, 0.5, 1), and in range, by the length of their rows. Extended ones have another RoPE base and no more"
        " training.",
        *(
            Picture(
                f"correlation-{metric}",
                f"Share of right answers against {METRICS[metric]}, a point per model. Numbers beside points: tokens"
                " per training row; paler points: other base seeds.",
            )
            for metric in ("perplexity", "longppl")
        ),
        "Correlation with accuracy over models, with 95% intervals.",
        _table(
            {"seed": number, "models": group, "metric": name, **seed["correlations"][group][metric]}
            for group in ("trained", "all")
            for metric, name in METRICS.items()
            for number, seed in seeds
        ),
        _table({"seed": number, **model} for number, seed in seeds for model in seed["models"]),
    ]


def _objectives(experiment: dict[str, Any]) -> list[Block]:
    pairs = experiment["pairs"]
    return [
        Heading("B. LongCE against CE (Table 3, Figure 7, Table 10)"),
        Picture("objectives-step", "Share of right answers by steps; thin lines are runs."),
        Picture("objectives-cpu_seconds", "Share of right answers by CPU time; thin lines are runs."),
        "Share of right answers by learning rate, on rows that are used for nothing else; each objective has its best.",
        _table(experiment["tuning"]),
        "Accuracy by step; then perplexities of the documents, and accuracy and perplexity in short ones. Both"
        " objectives see the same rows.",
        _table(
            {
                "base": pair["base"],
                "rows": pair["rows"],
                "objective": name,
                **{f"step {entry['step']}": entry["accuracy"] for entry in curve},
                **{METRICS[metric]: pair["metrics"][name][metric] for metric in ("perplexity", "longppl")},
                **{f"short {key}": value for key, value in pair["short"][name].items()},
            }
            for pair in pairs
            for name, curve in pair["curves"].items()
        ),
        "Accuracy of LongCE less that of CE at equal steps, CPU time and FLOPs, and the CPU time of a step by that of"
        f" CE; by FLOPs it is {experiment['flops_ratio']:.2f}.",
        _table({"base": pair["base"], "rows": pair["rows"], **pair["gain_at_equal"]} for pair in pairs),
    ]


def _loss_by_context(experiment: dict[str, Any]) -> list[Block]:
    return [
        Heading("E. Loss by context"),
        "Mean loss (nats) of the same last tokens of all documents, given that many tokens before them, and the fit"
        " L(c) = (a/c)^b + g. Where b is near 0 the curve is a logarithm, and a and g by themselves mean nothing.",
        Picture("contexts", "Loss by context and the fitted power law, of the evaluator and the first base seed."),
        _table(
            {
                "model": model["name"],
                **dict(zip(experiment["contexts"], model["loss"], strict=True)),
                **(model["fit"] or {}),
            }
            for model in experiment["models"]
        ),
    ]


def _table(rows: Iterable[Mapping[Any, Any]]) -> Table:
    """Return dictionaries as a table with the union of their keys as columns."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Table(
        ["why there is no correlation" if name == "undefined" else str(name).replace("_", " ") for name in columns],
        [[_cell(row.get(name)) for name in columns] for row in rows],
    )


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " to ".join(map(_cell, value))
    if isinstance(value, float):
        return "—" if math.isnan(value) else f"{value:.3g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
