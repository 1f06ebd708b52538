"""The commands with options of their own, which are not those of ``longce fit``."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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


def inspect_command(arguments: Sequence[str]) -> None:
    """Run ``longce inspect``, write its page and say where it is."""
    from lightning_modules.inspection import inspect_document
    from lightning_modules.score import check_output, read_text

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
    inspection = inspect_document(text, name=Path(file).name, **options)
    size = inspection.save(output).stat().st_size
    sys.stdout.write(f"{inspection.summary()}\n{output} ({size / 1e6:.1f} MB)\n")


def export_command(arguments: Sequence[str]) -> None:
    """Run ``longce export`` and say where the model is."""
    from lightning_modules.export import export_checkpoint

    parser = jsonargparse.ArgumentParser(prog="longce export", description=summary(export_checkpoint))
    parser.add_function_arguments(export_checkpoint, as_positional=True)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    sys.stdout.write(f"{export_checkpoint(**options)}\n")


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
