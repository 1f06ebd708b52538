"""Numbers of different dtype, precision or attention, which are not compared with each other."""

from collections.abc import Sequence

from lightning_modules.models.loading.provenance import Numerics, describe_difference, describe_unknown
from longce.compare.runs import ComparedRun


def separate_numerics(runs: Sequence[ComparedRun]) -> tuple[list[ComparedRun], list[str]]:
    """Return runs whose cells have the model's numerics only if these differ, and sentences about it."""
    found = list(dict.fromkeys(each for run in runs for each in run.numerics.values()))
    unknown = [run.name for run in runs if not all(each.is_known for each in run.numerics.values())]
    sentences = describe_unknown(unknown)
    if len(found) < 2:
        return [_without_numerics(run) for run in runs], sentences
    groups: dict[Numerics, list[str]] = {each: [] for each in found}
    for run in runs:
        for numerics in run.numerics.values():
            groups[numerics].append(run.name)
    return list(runs), [*sentences, describe_difference(groups)]


def _without_numerics(run: ComparedRun) -> ComparedRun:
    return run._replace(
        evaluations={cell._replace(numerics=""): steps for cell, steps in run.evaluations.items()},
        numerics={cell._replace(numerics=""): each for cell, each in run.numerics.items()},
    )
