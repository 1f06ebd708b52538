"""Numbers of different dtype, precision or attention, which are not compared with each other."""

from collections.abc import Mapping, Sequence

from lightning_modules.commands.compare.runs import ComparedRun
from lightning_modules.models.loading.provenance import Numerics, describe_difference, describe_unknown


def separate_numerics(runs: Sequence[ComparedRun]) -> tuple[list[ComparedRun], list[str]]:
    """Return runs whose evaluations have the model's numerics in their names if these differ, and sentences about it.

    Evaluations are compared by their names.
    """
    found = list(dict.fromkeys(each for run in runs for each in run.numerics.values()))
    unknown = [run.name for run in runs if not all(each.is_known for each in run.numerics.values())]
    sentences = describe_unknown(unknown)
    if len(found) < 2:
        return [_rename(run, {cell: split_numerics(cell)[0] for cell in run.evaluations}) for run in runs], sentences
    groups: dict[Numerics, list[str]] = {each: [] for each in found}
    for run in runs:
        for numerics in run.numerics.values():
            groups[numerics].append(run.name)
    return list(runs), [*sentences, describe_difference(groups)]


def split_numerics(cell: str) -> tuple[str, str]:
    """Return the name of an evaluation without the model's numerics, and these.

    Example:
        >>> split_numerics("books, alpha 1 [float32, 32-true, sdpa]")
        ('books, alpha 1', 'float32, 32-true, sdpa')
    """
    name, _, numerics = cell.partition(" [")
    return name, numerics.removesuffix("]")


def _rename(run: ComparedRun, names: Mapping[str, str]) -> ComparedRun:
    evaluations = {names[cell]: steps for cell, steps in run.evaluations.items()}
    return run._replace(evaluations=evaluations, numerics={names[cell]: each for cell, each in run.numerics.items()})
