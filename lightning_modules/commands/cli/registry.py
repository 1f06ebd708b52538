"""The commands with options of their own, which are not those of ``longce fit``."""

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonargparse
from jsonargparse.typing import NonNegativeFloat, PositiveInt


def score_command(arguments: Sequence[str]) -> None:
    """Run ``longce score`` and print its table."""
    from lightning_modules.scoring.score import score, table  # a heavy import that the other commands do without

    parser = jsonargparse.ArgumentParser(prog="longce score", description=summary(score))
    parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
    parser.add_argument("files", nargs="+", type=str, help="UTF-8 text files, one document each.")
    parser.add_function_arguments(score, skip={"files"}, as_positional=False)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    options.pop("config", None)
    sys.stdout.write(table(score(**options)) + "\n")


def evaluate_command(arguments: Sequence[str]) -> None:
    """Run ``longce evaluate`` and print its table."""
    from lightning_modules.commands.evaluate import evaluate
    from lightning_modules.tasks.evaluation.config import EvaluationConfig

    parser = jsonargparse.ArgumentParser(prog="longce evaluate", description=summary(evaluate))
    parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
    parser.add_class_arguments(EvaluationConfig, skip={"tasks", "lengths", "depths"}, as_positional=False)
    names = "Names of tasks, groups and sets, import paths of your own tasks, and task files of lm-evaluation-harness."
    parser.add_argument("--tasks", nargs="+", type=str, default=["ruler_synthetic"], help=names)
    parser.add_argument(
        "--lengths", nargs="+", type=PositiveInt, default=[4096], help="Tokens of prompt and answer together."
    )
    depths = "How many evenly spaced depths of the answers, or which, from 0 (front) to 1 (end); drawn by default."
    parser.add_argument("--depths", nargs="+", type=NonNegativeFloat, help=depths)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    options.pop("config", None)
    match options["depths"]:
        case [count] if count > 1 and count.is_integer():
            options["depths"] = int(count)
    sys.stdout.write(evaluate(**options) + "\n")


def harness_command(arguments: Sequence[str]) -> None:
    """Run ``longce evaluate`` under its former name."""
    warnings.warn("`longce harness` is deprecated: use `longce evaluate`, which takes the same options.", stacklevel=2)
    evaluate_command(arguments)


def inspect_command(arguments: Sequence[str]) -> None:
    """Run ``longce inspect``, write its page and say where it is."""
    from lightning_modules.scoring.score import check_output, read_text
    from lightning_modules.visualization.page import inspect_document

    parser = jsonargparse.ArgumentParser(prog="longce inspect", description=summary(inspect_document))
    parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
    parser.add_argument("file", type=str, help="UTF-8 text file.")
    parser.add_argument("--output", type=str | None, help="The page; by default FILE.html in the working directory.")
    parser.add_function_arguments(inspect_document, skip={"text", "name"}, as_positional=False)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    options.pop("config", None)
    file, output = options.pop("file"), options.pop("output")
    output = f"{Path(file).name}.html" if output is None else output
    text = read_text(file)
    check_output(output)
    if Path(output).exists() and Path(output).samefile(file):
        raise ValueError(f"`output` '{output}' is the document, which the page would replace: name another file.")
    inspection = inspect_document(text, name=Path(file).name, **options)
    size = inspection.save(output).stat().st_size
    sys.stdout.write(f"{inspection.summary()}\n{output} ({size / 1e6:.1f} MB)\n")


def export_command(arguments: Sequence[str]) -> None:
    """Run ``longce export`` and say where the model is."""
    from lightning_modules.training.export import export_checkpoint

    parser = jsonargparse.ArgumentParser(prog="longce export", description=summary(export_checkpoint))
    parser.add_function_arguments(export_checkpoint, as_positional=True)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    sys.stdout.write(f"{export_checkpoint(**options)}\n")


def correlate_command(arguments: Sequence[str]) -> None:
    """Run ``longce correlate`` and print its table."""
    from lightning_modules.commands.correlate.command import correlate

    parser = jsonargparse.ArgumentParser(prog="longce correlate", description=summary(correlate))
    parser.add_argument("files", nargs="+", type=str, help="Result files, CSV files, or NAME=FILE.")
    parser.add_argument(
        "--metrics", nargs="+", type=str, help="Perplexities; by default those of `longce score` and of tables."
    )
    parser.add_argument(
        "--scores", nargs="+", type=str, help="Of benchmarks; by default averages, or all if there are none."
    )
    parser.add_function_arguments(correlate, skip={"files", "metrics", "scores"}, as_positional=False)
    sys.stdout.write(correlate(**parser.parse_args(list(arguments[1:])).as_dict()))


def select_command(arguments: Sequence[str]) -> None:
    """Run ``longce select`` and print its tables."""
    from lightning_modules.commands.select import select

    parser = jsonargparse.ArgumentParser(prog="longce select", description=summary(select))
    parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
    parser.add_argument("scores", type=str, help="Folder or fsspec URL of the scores.")
    parser.add_function_arguments(select, skip={"scores"}, as_positional=False)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    options.pop("config", None)
    sys.stdout.write(select(**options))


def reproduce_command(arguments: Sequence[str]) -> None:
    """Run ``longce reproduce miniature`` or ``longce reproduce TABLE``."""
    if arguments[1:2] != ["miniature"]:
        from benchmarks.reproduction.tables.command import reproduce_table_command

        reproduce_table_command(arguments)
        return
    from benchmarks.reproduction.miniature.command import reproduce_miniature

    parser = jsonargparse.ArgumentParser(prog="longce reproduce miniature", description=summary(reproduce_miniature))
    parser.add_function_arguments(reproduce_miniature)
    reproduce_miniature(**parser.parse_args(list(arguments[2:])).as_dict())


def summary(function: Callable[..., object]) -> str:
    """What a function does: the first paragraph of its docstring."""
    return (function.__doc__ or "").partition("\n\n")[0]
