"""All commands. Each checks its words first, and imports torch and the rest only to work."""

import argparse
import json
import sys
import warnings
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
from lightning_modules.commands.select_config import SelectConfig
from lightning_modules.scoring.config import InspectConfig, ScoreConfig
from lightning_modules.tasks.evaluation.config import EvaluationConfig
from lightning_modules.training.export.options import ExportOptions
from lightning_modules.utilities.files import writable_folder, write_atomically
from lightning_modules.utilities.text_files import check_output, read_text


def score_command(arguments: Sequence[str]) -> None:
    """Run ``longce score`` and print its table."""
    parser = _make_parser("score", "LongPPL and perplexity of a model on text files, by an evaluator.", ScoreConfig)
    parser.add_argument("files", nargs="+", type=str, help="UTF-8 text files, one document each.")
    options = _parse(parser, arguments)
    for file in options["files"]:
        read_text(file)
    from lightning_modules.scoring.score import score, table

    sys.stdout.write(table(score(**options)) + "\n")


def evaluate_command(arguments: Sequence[str]) -> None:
    """Run ``longce evaluate`` and print its table."""
    description = "Score a model on long-context tasks and tasks of lm-evaluation-harness."
    skip = ("tasks", "lengths", "depths")
    parser = _make_parser(arguments[0], description, EvaluationConfig, skip=skip)  # also by its former name
    names = "Names of tasks, groups and sets, import paths of your own tasks, and task files of lm-evaluation-harness."
    parser.add_argument("--tasks", nargs="+", type=str, default=["ruler_synthetic"], help=names)
    parser.add_argument(
        "--lengths", nargs="+", type=PositiveInt, default=[4096], help="Tokens of prompt and answer together."
    )
    depths = "How many evenly spaced depths of the answers, or which, from 0 (front) to 1 (end); drawn by default."
    parser.add_argument("--depths", nargs="+", type=NonNegativeFloat, help=depths)
    options = _parse(parser, arguments)
    match options["depths"]:
        case [count] if count > 1 and count.is_integer():
            options["depths"] = int(count)
    from lightning_modules.commands.evaluate import evaluate

    sys.stdout.write(evaluate(**options) + "\n")


def harness_command(arguments: Sequence[str]) -> None:
    """Run ``longce evaluate`` under its former name."""
    warnings.warn("`longce harness` is deprecated: use `longce evaluate`, which takes the same options.", stacklevel=2)
    evaluate_command(arguments)


def inspect_command(arguments: Sequence[str]) -> None:
    """Run ``longce inspect``, write its page and report where it is."""
    description = "A document as a page: its key tokens, and both contexts of each token."
    parser = _make_parser("inspect", description, InspectConfig)
    parser.add_argument("file", type=str, help="UTF-8 text file.")
    parser.add_argument("--output", type=str | None, help="The page; by default FILE.html in the working directory.")
    options = _parse(parser, arguments)
    file, output = options.pop("file"), options.pop("output")
    output = f"{Path(file).name}.html" if output is None else output
    text = read_text(file)
    check_output(output)
    if Path(output).exists() and Path(output).samefile(file):
        raise ValueError(f"`output` '{output}' is the document, which the page would replace: name another file.")
    from lightning_modules.visualization.page.document import inspect_document

    inspection = inspect_document(text, name=Path(file).name, **options)
    size = inspection.save(output).stat().st_size
    sys.stdout.write(f"{inspection.summary()}\n{output} ({size / 1e6:.1f} MB)\n")


def export_command(arguments: Sequence[str]) -> None:
    """Run ``longce export`` and report where the model is."""
    parser = _make_parser("export", "Export a checkpoint of `longce fit` for transformers.", ExportOptions)
    parser.add_argument("checkpoint", type=str, help="What `longce fit` wrote: a file, or a folder of FSDP2.")
    parser.add_argument("output_dir", type=str, help="Folder to write; an earlier export there is replaced.")
    parser.add_argument("--tokenizer", type=str | None, help="Hub id or folder; by default that of the training.")
    parser.add_argument("--tokenizer_revision", type=str | None, help="Branch, tag or commit of the tokenizer.")
    options = _parse(parser, arguments)
    from lightning_modules.training.export.checkpoint import export_checkpoint

    sys.stdout.write(f"{export_checkpoint(**options)}\n")


def correlate_command(arguments: Sequence[str]) -> None:
    """Run ``longce correlate`` and print its table."""
    description = "Correlate LongPPL and perplexity of many models with their benchmark scores."
    parser = _make_parser("correlate", description)
    parser.add_argument("files", nargs="+", type=str, help="Result files, CSV files, or NAME=FILE.")
    metrics = "Perplexities; by default those of `longce score` and of tables."
    parser.add_argument("--metrics", nargs="+", type=str, help=metrics)
    scores = "Benchmark scores; by default averages, or all if no file has averages."
    parser.add_argument("--scores", nargs="+", type=str, help=scores)
    output = "Folder for correlation.json, report.md, report.html and the figures."
    parser.add_argument("--output", type=str, required=True, help=output)
    parser.add_argument("--log_axis", type=bool, default=False, help="Draw perplexities on logarithmic axes.")
    options = _parse(parser, arguments)
    from lightning_modules.commands.correlate.command import correlate

    sys.stdout.write(correlate(**options))


def select_command(arguments: Sequence[str]) -> None:
    """Run ``longce select`` and print its tables."""
    parser = _make_parser("select", "Choose documents by the scores that `longce predict` has written.", SelectConfig)
    parser.add_argument("scores", type=str, help="Folder or fsspec URL of the scores.")
    options = _parse(parser, arguments)
    from lightning_modules.commands.select import select

    sys.stdout.write(select(**options))


def reproduce_command(arguments: Sequence[str]) -> None:
    """Run ``longce reproduce miniature`` or ``longce reproduce TABLE``."""
    if arguments[1:2] == ["miniature"]:
        description = "The paper's experiments with tiny models of a synthetic language, on one CPU thread."
        parser = _make_parser("reproduce miniature", description)
        output = "Folder of the models and of the report; what is there is not made again."
        parser.add_argument("--output", type=str, default="runs/miniature", help=output)
        seeds = "Base models, with random weights of their own, that all experiments begin with."
        parser.add_argument("--seeds", type=int, default=1, help=seeds)
        config = "YAML file of the experiments; by default configs/reproduce/miniature.yaml."
        parser.add_argument("--config", type=str | None, help=config)
        text = "Folder with train/*.txt and test/*.txt, for experiments on real text."
        parser.add_argument("--text", type=str | None, help=text)
        options = parser.parse_args(list(arguments[2:])).as_dict()
        from benchmarks.reproduction.miniature.command import reproduce_miniature

        reproduce_miniature(**options)
        return
    from benchmarks.reproduction.tables.options import add_table_options

    if "--list" not in arguments:
        check_options(arguments[1:], add_table_options)
    from benchmarks.reproduction.tables.command import reproduce_table_command

    reproduce_table_command(arguments)


def _make_parser(command: str, description: str, settings: type | None = None, *, skip: Sequence[str] = ()) -> Any:
    """Return the parser of a command, with an option for each field of its settings but those to ``skip``."""
    parser = jsonargparse.ArgumentParser(prog=f"longce {command}", description=description)
    if settings is not None:
        parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
        parser.add_class_arguments(settings, skip=set(skip), as_positional=False)
    return parser


def _parse(parser: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options in the words after a command, without the configs they came from."""
    options: dict[str, Any] = parser.parse_args(list(arguments[1:])).as_dict()
    options.pop("config", None)
    return options


def plan_command(arguments: Sequence[str]) -> None:
    """Run ``longce plan`` and print its report."""
    check_options(arguments[1:], add_plan_options)
    from lightning_modules.commands.cli.lightning_cli import PartCLI
    from lightning_modules.commands.plan.hardware import find_gpu
    from lightning_modules.commands.plan.plan import Planner
    from lightning_modules.commands.plan.report import report
    from lightning_modules.commands.plan.settings import read_experiment

    sys.argv[1:] = arguments[1:]
    cli = PartCLI(add_plan_options)
    options = cli.config
    gpu = find_gpu(options.gpu, tflops=options.gpu_tflops, memory=options.gpu_memory)
    if options.output is not None:
        if Path(options.output).is_dir():
            raise ValueError(f"`output` must be a file, and '{options.output}' is a folder.")
        writable_folder(Path(options.output).absolute().parent, remedy="Name another file by `--output`.")
    experiment = read_experiment(cli.make("model"), options)
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
    from lightning_modules.commands.cli.lightning_cli import PartCLI

    sys.argv[1:] = arguments[2:]
    cli = PartCLI(add_data_options)
    options = cli.config
    if options.get("data") is None:
        raise ValueError("There are no data to inspect: name a data module by `data`, as for `longce fit`.")
    module = cli.make("data")
    if not callable(getattr(module, "inspect", None)):
        raise ValueError(f"`data` has no packed training rows to inspect: {type(module).__name__}.")
    sys.stdout.write(
        module.inspect(options.rows or None, count=options.count, width=options.width, names=options.names)
    )


def influence_command(arguments: Sequence[str]) -> None:
    """Run ``longce influence``."""
    check_options(arguments[1:], add_influence_options)
    from lightning_modules.commands.cli.lightning_cli import InfluenceCLI

    sys.argv[1:] = arguments
    InfluenceCLI()


def quickstart_command(arguments: Sequence[str]) -> None:
    """Run ``longce quickstart``; further options go to each of its runs."""
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(
            "usage: longce quickstart [OPTIONS of longce fit]\n\nMake a corpus, train a tiny evaluator and fine-tune a"
            " tiny model with LongCE, all offline.\n"
        )
        return
    check_options(arguments[1:])
    from lightning_modules.commands.quickstart import quickstart

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
        parser.error(
            "a restarted `fit` would begin again: add `--ckpt_path last` to the command, and name the run's `version`."
        )
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
