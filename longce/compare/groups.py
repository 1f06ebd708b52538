"""Runs that differ in their seed, compared as a group."""

import difflib
from collections.abc import Sequence

import numpy as np
import pandas as pd

from lightning_modules.utilities.statistics import RUNS, UNITS, corpus_mean, seed_variance
from longce.compare.runs import Cell, ComparedRun


def group_runs(runs: Sequence[ComparedRun], settings: Sequence[str]) -> list[ComparedRun]:
    """Return a run for each group of runs with equal values of these settings, in the order of the first ones.

    The numbers of a document are means over the runs of a group: geometric means, but of bits arithmetic ones. Only the
    last evaluation of each run counts, and the documents that all runs of a group have.

    Raises:
        ValueError: If no run has a setting, or if there is only one group.
    """
    known = set().union(*(run.config for run in runs))
    for setting in settings:
        if setting not in known:
            near = difflib.get_close_matches(setting, sorted(known), n=3) or sorted(known)[:10]
            raise ValueError(f"`group_by`: no run has the setting '{setting}', only {', '.join(near)}.")
    members: dict[tuple[str, ...], list[ComparedRun]] = {}
    for run in runs:
        values = tuple(run.config.get(setting, "absent") for setting in settings)
        members.setdefault(values, []).append(run)
    if len(members) < 2:
        raise ValueError(f"`group_by`: all runs have the same {' and '.join(settings)}: choose another setting.")
    return [_average(_name_group(settings, values, len(own)), own) for values, own in members.items()]


def _name_group(settings: Sequence[str], values: Sequence[str], runs: int) -> str:
    """Return a name such as ``LongCE, stride 512 (3 runs)``; class names are shown without the setting."""
    parts = []
    for setting, value in zip(settings, values, strict=True):
        module, _, name = value.rpartition(".")
        is_class = module.replace(".", "").replace("_", "").isalpha()
        if is_class:
            parts.append(name)
        else:
            _, _, option = setting.rpartition(".")
            parts.append(f"{option} {value}")
    noun = "run" if runs == 1 else "runs"
    return f"{', '.join(parts)} ({runs} {noun})"


def _average(name: str, runs: Sequence[ComparedRun]) -> ComparedRun:
    evaluations: dict[Cell, dict[int, pd.DataFrame]] = {}
    first = runs[0]
    for cell in first.evaluations:
        if all(cell in run.evaluations for run in runs):
            steps, tables = zip(*(run.last(cell) for run in runs), strict=True)
            evaluations[cell] = {max(steps): average_documents(tables)}
    scalars: dict[str, dict[int, float]] = {}
    for key in first.scalars:
        logged = [run.scalars[key] for run in runs if run.scalars.get(key)]
        if logged:
            final = [values[max(values)] for values in logged]
            last_step = max(map(max, logged))
            scalars[key] = {last_step: float(np.mean(final))}
    config = dict(first.config)
    for run in runs[1:]:
        config = {key: value for key, value in config.items() if run.config.get(key) == value}
    return ComparedRun(name, evaluations, config, scalars)


def average_documents(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return means over runs, for the documents that all runs have with equal numbers of tokens and bytes.

    Constant columns say how many runs there are, and how much the numbers of all documents vary between them.
    """
    first, *others = tables
    shared = first.index
    for other in others:
        shared = shared.intersection(other.index)
    columns = list(dict.fromkeys(UNITS.values()))
    units = first.loc[shared, columns].fillna(-1)  # units that are unknown in all tables are equal
    same = np.ones(len(shared), dtype=np.bool_)
    for other in others:
        same &= (other.loc[shared, columns].fillna(-1) == units).all(axis=1).to_numpy()
    kept = [table.loc[shared[same]] for table in tables]
    averaged = kept[0].copy()
    for kind in UNITS:
        values = np.stack([table[kind].to_numpy(dtype=np.float64) for table in kept])  # [runs, documents]
        if kind.endswith("bits_per_byte"):
            averaged[kind] = values.mean(axis=0)
        else:
            averaged[kind] = np.exp(np.log(values).mean(axis=0))
        averaged[seed_variance(kind)] = _variance_of_mean([corpus_mean(table, kind) for table in kept])
    averaged[RUNS] = len(tables)
    return averaged


def _variance_of_mean(numbers: Sequence[float]) -> float:
    """Return the variance of the mean logarithm of a number over runs; 0 for a single run."""
    if len(numbers) < 2:
        return 0.0
    return float(np.log(numbers).var(ddof=1)) / len(numbers)
