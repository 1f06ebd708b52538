"""The commands with options of their own, which are not those of ``longce fit``."""

import sys
from collections.abc import Callable, Sequence

import jsonargparse


def score_command(arguments: Sequence[str]) -> None:
    """Run ``longce score`` and print its table."""
    from lightning_modules.score import score, table  # a heavy import that the other commands do without

    parser = jsonargparse.ArgumentParser(prog="longce score", description=summary(score))
    parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
    parser.add_argument("files", nargs="+", type=str, help="UTF-8 text files, one document each.")
    parser.add_function_arguments(score, skip={"files"}, as_positional=False)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    options.pop("config", None)
    sys.stdout.write(table(score(**options)) + "\n")


def export_command(arguments: Sequence[str]) -> None:
    """Run ``longce export`` and say where the model is."""
    from lightning_modules.export import export_checkpoint

    parser = jsonargparse.ArgumentParser(prog="longce export", description=summary(export_checkpoint))
    parser.add_function_arguments(export_checkpoint, as_positional=True)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    sys.stdout.write(f"{export_checkpoint(**options)}\n")


def select_command(arguments: Sequence[str]) -> None:
    """Run ``longce select`` and print its tables."""
    from lightning_modules.selection import select

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
        from lightning_modules.reproduction.tables_command import reproduce_table_command

        reproduce_table_command(arguments)
        return
    from lightning_modules.reproduction.miniature import reproduce_miniature

    parser = jsonargparse.ArgumentParser(prog="longce reproduce miniature", description=summary(reproduce_miniature))
    parser.add_function_arguments(reproduce_miniature)
    reproduce_miniature(**parser.parse_args(list(arguments[2:])).as_dict())


def summary(function: Callable[..., object]) -> str:
    """What a function does: the first paragraph of its docstring."""
    return (function.__doc__ or "").partition("\n\n")[0]
