"""``longce correlate``: correlate perplexities with benchmark scores."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from lightning_modules.commands.correlate.correlation import Interval
from lightning_modules.commands.correlate.models import choose_names, join
from lightning_modules.commands.correlate.pairs import Pair, correlations
from lightning_modules.commands.correlate.plots import scatter
from lightning_modules.commands.correlate.result_files import read_results
from lightning_modules.utilities.files import writable_folder
from lightning_modules.visualization.report import Block, Heading, Picture, Table, as_text_table, write_report

TITLE = "Perplexities and benchmark scores"


def correlate(
    files: Sequence[str],
    output: str,
    *,
    metrics: Sequence[str] | None = None,
    scores: Sequence[str] | None = None,
    log_axis: bool = False,
) -> str:
    """Correlate LongPPL and perplexity of many models with their benchmark scores.

    Args:
        files: JSON of ``longce score --output``, folders of ``longce evaluate``, and CSV files
            (``model,longppl,perplexity,LongBench``); NAME=FILE gives the model of a file another name. Models are
            joined by name, or by the last part of it.
        output: Folder for ``correlation.json``, ``report.md``, ``report.html`` and the figures.
        metrics: Perplexities, such as ``longppl``; by default all of them.
        scores: Benchmark scores, such as ``RULER``; by default averages, or all without any.
        log_axis: Draw perplexities on logarithmic axes.

    Returns:
        A table of the correlations with 95 % bootstrap intervals over models, and which models are left out, and why.

    Raises:
        ValueError: If a file cannot be read, a name is unknown, two files contradict each other, or no pair of
            perplexity and score has at least three models.
    """
    models = join(read_results(files))
    chosen, against = choose_names(metrics, models, "metrics"), choose_names(scores, models, "scores")
    pairs = correlations(models.values, chosen, against)
    folder = writable_folder(Path(output).expanduser(), remedy="Name another one by `--output`.")
    names = _file_names(against)
    pictures = {
        names[score]: scatter([pair for pair in pairs if pair.score == score], models.values, log_axis=log_axis)
        for score in against
    }
    table = Table(_HEAD, [_row(pair) for pair in pairs])
    numbers = {"pairs": [pair._asdict() for pair in pairs], "values": models.values, "files": list(files)}
    blocks = _blocks(table, pairs, models.values, chosen, names)
    write_report(folder, TITLE, blocks, pictures, numbers, name="correlation")
    printed = [as_text_table(table, left=range(len(_HEAD))), *_left_out(pairs), f"Report: {folder / 'report.html'}"]
    return "\n".join(printed) + "\n"


_HEAD = ("score", "metric", "models", "Pearson [95 %]", "Spearman [95 %]")


def _row(pair: Pair) -> tuple[str, ...]:
    results = (
        _with_interval(pair.pearson, pair.pearson_interval),
        _with_interval(pair.spearman, pair.spearman_interval),
    )
    return (pair.score, pair.metric, str(len(pair.models)), *((pair.undefined, "") if pair.undefined else results))


def _with_interval(value: float, interval: Interval | None) -> str:
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _left_out(pairs: Sequence[Pair]) -> list[str]:
    """Write a sentence for each model that is left out, with all reasons."""
    reasons: dict[str, dict[str, None]] = defaultdict(dict)
    for pair in pairs:
        for model, reason in pair.left_out.items():
            reasons[model] |= dict.fromkeys(reason.split(", "))
    return [f"Left out where it lacks a value: {model}: {', '.join(found)}." for model, found in reasons.items()]


def _blocks(
    table: Table,
    pairs: Sequence[Pair],
    values: dict[str, dict[str, float]],
    metrics: Sequence[str],
    pictures: dict[str, str],
) -> list[Block]:
    names = [*metrics, *pictures]
    numbers = [
        (model, *(f"{entry[name]:.4g}" if name in entry else "" for name in names)) for model, entry in values.items()
    ]
    return [
        "Correlations over models, with 95 % intervals of a bootstrap over models: they show how far a number depends"
        " on the choice of models. Models of one family are not independent draws, so the true uncertainty is"
        " larger. A lower perplexity should go with a higher score, so the best is -1.",
        table,
        *_left_out(pairs),
        *(Picture(name, f"{score} against each perplexity, one point per model.") for score, name in pictures.items()),
        Heading("Values"),
        Table(("model", *names), numbers),
    ]


def _file_names(scores: Sequence[str]) -> dict[str, str]:
    """Name the figure of each score, without characters that file systems refuse."""
    names: dict[str, str] = {}
    for score in scores:
        stem = name = re.sub(r"[^\w.-]+", "_", score)
        while name in names.values():
            name = f"{stem}-{len(names)}"
        names[score] = name
    return names
