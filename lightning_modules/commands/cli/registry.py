"""All commands. Each checks its words first, and imports torch and the rest only to work."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from lightning_modules.commands.cli.experiment_options import (
    add_data_options,
    add_influence_options,
    add_plan_options,
    check_options,
)
from lightning_modules.utilities.files import writable_folder, write_atomically


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
    from lightning_modules.tasks.questions.registry import GROUPS

    parser = jsonargparse.ArgumentParser(prog="longce evaluate", description=summary(evaluate))
    parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
    parser.add_function_arguments(evaluate, skip={"tasks", "lengths", "depths"}, as_positional=False)
    groups = ", ".join(GROUPS)
    names = f"Names of tasks or of groups ({groups}), or import paths of tasks of your own."
    parser.add_argument("--tasks", nargs="+", type=str, default=["ruler_synthetic"], help=names)
    parser.add_argument(
        "--lengths", nargs="+", type=PositiveInt, default=[4096], help="Tokens of prompt and answer together."
    )
    depths = "How many evenly spaced depths answers stand at, or which, from 0 (front) to 1 (end); drawn by default."
    parser.add_argument("--depths", nargs="+", type=NonNegativeFloat, help=depths)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    options.pop("config", None)
    match options["depths"]:
        case [count] if count > 1 and count.is_integer():
            options["depths"] = int(count)
    sys.stdout.write(evaluate(**options) + "\n")


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


def harness_command(arguments: Sequence[str]) -> None:
    """Run ``longce harness`` and print its table."""
    from lightning_modules.commands.harness import harness
    from lightning_modules.tasks.harness.results import table

    parser = jsonargparse.ArgumentParser(prog="longce harness", description=summary(harness))
    parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
    parser.add_argument("--tasks", nargs="+", type=str, required=True, help="Tasks, groups, task files and sets.")
    parser.add_argument("--lengths", nargs="+", type=PositiveInt, default=[4096], help="Of RULER's prompts, tokens.")
    parser.add_function_arguments(harness, skip={"tasks", "lengths"}, as_positional=False)
    options = parser.parse_args(list(arguments[1:])).as_dict()
    options.pop("config", None)
    sys.stdout.write(table(harness(**options)) + "\n")


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


def plan_command(arguments: Sequence[str]) -> None:
    """Run ``longce plan`` and print its report."""
    check_options(arguments[1:], add_plan_options)
    from lightning_modules.commands.cli.lightning_cli import PlanCLI
    from lightning_modules.commands.plan.hardware import find_gpu
    from lightning_modules.commands.plan.plan import Planner
    from lightning_modules.commands.plan.report import report
    from lightning_modules.commands.plan.settings import read_experiment

    sys.argv[1:] = arguments[1:]
    options = PlanCLI().config
    gpu = find_gpu(options.gpu, tflops=options.gpu_tflops, memory=options.gpu_memory)
    if options.output is not None:
        if Path(options.output).is_dir():
            raise ValueError(f"`output` must be a file, and '{options.output}' is a folder.")
        writable_folder(Path(options.output).parent, remedy="Name another file by `--output`.")
    experiment = read_experiment(options, gpus=options.gpus, evaluator=options.evaluator)
    plan = Planner(experiment, gpu, options.price_per_gpu_hour).plan()
    sys.stdout.write(report(plan) + "\n")
    if options.output is not None:
        write_atomically(Path(options.output), (json.dumps(plan, indent=2) + "\n").encode())


def data_command(arguments: Sequence[str]) -> None:
    """Run ``longce data inspect`` and print its report."""
    if arguments[1:2] in (["-h"], ["--help"]):
        arguments = ["data", "inspect", "--help"]
    if arguments[1:2] != ["inspect"]:
        raise ValueError("`longce data` has one command: `longce data inspect`, with the options of `longce fit`.")
    check_options(arguments[2:], add_data_options)
    from lightning_modules.commands.cli.lightning_cli import DataCLI

    sys.argv[1:] = arguments[2:]
    cli = DataCLI()
    if not callable(getattr(cli.datamodule, "inspect", None)):
        raise ValueError(f"`data` has no packed training rows to inspect: {type(cli.datamodule).__name__}.")
    options = cli.config
    sys.stdout.write(
        cli.datamodule.inspect(options.rows, count=options.count, width=options.width, names=options.names)
    )


def influence_command(arguments: Sequence[str]) -> None:
    """Run ``longce influence``."""
    check_options(arguments[1:], add_influence_options)
    from lightning_modules.commands.cli.lightning_cli import InfluenceCLI

    sys.argv[1:] = arguments
    InfluenceCLI()


def quickstart_command(arguments: Sequence[str]) -> None:
    """Run ``longce quickstart``; further options go to each of its runs."""
    from lightning_modules.commands.quickstart import quickstart

    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(f"usage: longce quickstart [OPTIONS of longce fit]\n\n{summary(quickstart)}\n")
        return
    check_options(arguments[1:])
    quickstart(run_experiment, arguments[1:])


def run_experiment(arguments: Sequence[str]) -> Any:
    """Run ``longce fit``, ``validate``, ``test`` or ``predict``."""
    check_options(arguments[1:])
    from lightning_modules.commands.cli.lightning_cli import LongceCLI

    sys.argv[1:] = arguments
    return LongceCLI()


def launch_command(arguments: Sequence[str]) -> None:
    """Run ``longce launch`` and exit with the status of the command it starts."""
    parser = argparse.ArgumentParser(
        prog="longce launch",
        usage="longce launch --nproc_per_node N [OPTIONS] -- COMMAND ..",
        description="Run a command of longce in several processes, restart them after a crash, and stop them together."
        " On SIGTERM, SIGINT, SIGHUP and SIGUSR1 all processes save and stop.",
    )
    parser.add_argument("--nproc_per_node", type=PositiveInt, required=True, help="processes on this machine")
    parser.add_argument("--nnodes", type=PositiveInt, default=1, help="machines, each with this command (default: 1)")
    parser.add_argument("--rdzv_endpoint", metavar="HOST:PORT", help="where several machines meet")
    parser.add_argument("--max_restarts", type=NonNegativeInt, default=0, help="restarts after a crash (default: 0)")
    parser.add_argument(
        "--shutdown_timeout",
        type=PositiveInt,
        default=300,
        help="seconds from a signal to SIGKILL: an optimizer step and a checkpoint must fit in (default: 300)",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ..", help="such as: -- fit -c FILE")
    options = parser.parse_args(list(arguments[1:]))
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words or words[0] not in COMMANDS or words[0] == "launch":
        parser.error(f"after `--` comes a command of longce and its options, got {words[:1]}.")
    if options.nnodes > 1 and options.rdzv_endpoint is None:
        parser.error("several machines need `--rdzv_endpoint HOST:PORT`, the same on each.")
    if options.max_restarts and words[0] == "fit" and not any(word.startswith("--ckpt_path") for word in words):
        parser.error("a restarted `fit` would begin again: add `--ckpt_path last`, and name the run's `version`.")
    from lightning_modules.commands.launch import launch

    sys.exit(launch(words, options))


COMMANDS: dict[str, Callable[[Sequence[str]], object]] = {
    "plan": plan_command,
    "score": score_command,
    "inspect": inspect_command,
    "evaluate": evaluate_command,
    "influence": influence_command,
    "select": select_command,
    "export": export_command,
    "harness": harness_command,
    "correlate": correlate_command,
    "data": data_command,
    "quickstart": quickstart_command,
    "reproduce": reproduce_command,
    "launch": launch_command,
    **dict.fromkeys(("fit", "validate", "test", "predict"), run_experiment),
}
