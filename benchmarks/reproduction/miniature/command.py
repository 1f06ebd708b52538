"""``longce reproduce miniature``: train and measure what is missing, then write the report."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from benchmarks.reproduction.miniature.experiments import run_experiments
from benchmarks.reproduction.miniature.plan import Plan, Results, best_rates, make_plan
from benchmarks.reproduction.miniature.report import write_report
from benchmarks.reproduction.miniature.settings import read_settings
from benchmarks.reproduction.miniature.training import Laboratory, Run
from benchmarks.reproduction.miniature.verdicts import Verdict, summarize, verdicts
from lightning_modules.utilities.files import writable_folder
from lightning_modules.utilities.locks import exclusive

PACKAGES = ("longce", "torch", "lightning", "transformers", "numpy", "scipy", "matplotlib")


def reproduce_miniature(
    output: str = "runs/miniature", seeds: int = 1, config: str | None = None, text: str | None = None
) -> Path:
    """Run the paper's experiments with tiny models of a synthetic language on one CPU thread, and write a report.

    Finished runs are not repeated: to resume, or to add seeds, give the same folder.

    Args:
        output: Folder of the models and of the report.
        seeds: Number of base models that all experiments start from, each with its own random weights.
        config: YAML file that declares the experiments; by default ``configs/reproduce/miniature.yaml``.
        text: Folder with ``train/*.txt`` and ``test/*.txt``, for experiments on real text
            (``configs/reproduce/haystack.yaml``).

    Returns:
        The report, an HTML file.

    Raises:
        ValueError: If the config declares something that cannot be run, or the folder cannot be written to.
    """
    settings = read_settings(config, text)
    plan = make_plan(settings, seeds)  # to find what cannot be run before anything is trained
    folder = writable_folder(Path(output), remedy="Choose another folder with `--output`.")
    torch.set_num_threads(1)  # the matrices are tiny: threads would wait for each other
    laboratory = Laboratory(settings, folder / "runs")
    with exclusive(folder / "runs"):
        if plan.tuning:
            _make(laboratory, [plan.seeds[0].base, *plan.tuning.values()])
            plan = make_plan(settings, seeds, best_rates(laboratory, plan))
        _make(laboratory, plan.runs)
    experiments = run_experiments(Results(laboratory, plan))
    found = verdicts(experiments)
    report = write_report(folder, experiments, found, _facts(laboratory, plan, seeds))
    sys.stdout.write(f"{table(found)}\n\nReport: {report}\n")
    return report


def table(found: list[Verdict]) -> str:
    """Format the verdicts as text."""
    width = max(len(verdict.outcome) for verdict in found)
    lines = [f"{v.experiment}  {v.outcome:<{width}}  {v.claim}: {v.numbers}" for v in found]
    return "\n".join([*lines, "", summarize(found)])


def _make(laboratory: Laboratory, runs: Sequence[Run]) -> None:
    bar = tqdm([run for run in runs if not laboratory.is_done(run)], unit="run", disable=None)
    for run in bar:
        bar.set_description(run.name)
        try:
            laboratory.make(run)
        except SystemExit as error:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from error


def _facts(laboratory: Laboratory, plan: Plan, seeds: int) -> dict[str, Any]:
    stored = [json.loads((laboratory.path(run) / "run.json").read_text()) for run in plan.runs]
    return {
        "settings": asdict(laboratory.settings),
        "seeds": seeds,
        "runs": len(plan.runs),
        "corpus": laboratory.corpus.remark,
        "parameters": _parameters(laboratory.path(plan.evaluator) / "model" / "model.safetensors"),
        "cpu_seconds": sum(run["cpu_seconds"] for run in stored),
        "cpu_seconds_by_run": {run["name"]: run["cpu_seconds"] for run in stored},
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in PACKAGES}},
    }


def _parameters(weights: Path) -> int:
    with safe_open(weights, framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118, no mapping
