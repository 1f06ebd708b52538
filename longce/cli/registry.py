"""All commands of `longce`. Each parses its arguments first, and imports torch only to work."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt

from lightning_modules.export.options import ExportOptions
from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.text_files import check_output
from longce.cli.experiment_options import (
    accept_saved_config,
    add_data_options,
    add_influence_options,
    add_plan_options,
    add_quickstart_options,
    print_help,
)
from longce.cli.measuring import (
    compare_command,
    correlate_command,
    evaluate_command,
    make_parser,
    parse_options,
    score_command,
)
from longce.corpus.config import CorpusConfig
from longce.corpus.select.config import SelectConfig
from longce.inspect import inspect_command

_CORPUS_USAGE = """\
usage: longce corpus score FILES .. --model MODEL --output FOLDER [OPTIONS]
       longce corpus select SCORES .. [OPTIONS]

`longce corpus score --help` and `longce corpus select --help` list the options.
"""


def export_command(arguments: Sequence[str]) -> None:
    """Run ``longce export`` and print the path of the model."""
    description = "Convert a checkpoint of `longce fit`, or a GGUF file, into a folder that transformers loads."
    parser = make_parser("export", description, ExportOptions)
    checkpoint = "Checkpoint of `longce fit`: a file, a folder with the shards of FSDP2, or the folder of a run, whose"
    checkpoint += " newest one is used. Or a GGUF file."
    parser.add_argument("checkpoint", type=str, help=checkpoint)
    parser.add_argument("output_dir", type=str, help="Folder to write; an earlier export there is replaced.")
    tokenizer = "Hub id or local folder of a tokenizer; by default the tokenizer of the training run."
    parser.add_argument("--tokenizer", type=str | None, help=tokenizer)
    parser.add_argument("--tokenizer_revision", type=str | None, help="Branch, tag or commit of the tokenizer.")
    options = parse_options(parser, arguments)
    from lightning_modules.export.checkpoint import export_checkpoint

    sys.stdout.write(f"{export_checkpoint(**options)}\n")


def corpus_command(arguments: Sequence[str]) -> None:
    """Run ``longce corpus score`` or ``longce corpus select``."""
    parts = {"score": _corpus_score_command, "select": _corpus_select_command}
    part = arguments[1] if len(arguments) > 1 else ""
    if part in ("-h", "--help"):
        sys.stdout.write(_CORPUS_USAGE)
        sys.exit(0)
    if part not in parts:
        raise ValueError(f"`longce corpus` has the subcommands `score` and `select`, got '{part}'.")
    parts[part](arguments[1:])


def _corpus_score_command(arguments: Sequence[str]) -> None:
    description = "Score the documents of a corpus for long-range dependence into parquet files, with one model."
    parser = make_parser("corpus score", description, CorpusConfig, skip=("columns", "contexts"))
    files = "Parquet, JSON-lines and text files, folders and patterns, or fsspec URLs."
    parser.add_argument("files", type=str, nargs="+", help=files)
    columns = "Further columns to copy to the scores. Values of JSON lines become text."
    parser.add_argument("--columns", type=str, nargs="+", default=[], help=columns)
    contexts = "Ascending context lengths in tokens, in which the last `stride` tokens of each document are scored too."
    parser.add_argument("--contexts", type=PositiveInt, nargs="+", default=[], help=contexts)
    options = parse_options(parser, arguments)
    documents = options.pop("files")
    config = CorpusConfig(**options)
    config.check_names()
    from longce.corpus.score import score_corpus

    sys.stdout.write(score_corpus(documents, config) + "\n")


def _corpus_select_command(arguments: Sequence[str]) -> None:
    description = "Select documents by scores in parquet files, such as those of `longce corpus score`."
    parser = make_parser("corpus select", description, SelectConfig)
    parser.add_argument("scores", type=str, nargs="+", help="Parquet files, folders and patterns, or fsspec URLs.")
    options = parse_options(parser, arguments)
    from longce.corpus.select.command import select

    sys.stdout.write(select(**options))


def reproduce_command(arguments: Sequence[str]) -> None:
    """Run ``longce reproduce TABLE``."""
    try:
        from benchmarks.reproduction.tables.options import add_table_options
    except ModuleNotFoundError as error:
        # Not installed, or a package of the user's has this name.
        if error.name is None or error.name.partition(".")[0] != "benchmarks":
            raise
        raise ValueError(
            "`longce reproduce` needs the benchmarks, which are not installed: run it in a clone of the repository."
        ) from None

    print_help(arguments, add_table_options)
    from benchmarks.reproduction.tables.command import reproduce_table_command

    reproduce_table_command(arguments)


def plan_command(arguments: Sequence[str]) -> None:
    """Run ``longce plan`` and print its report."""
    print_help(arguments, add_plan_options)
    from longce.cli.lightning_cli import LongceCLI
    from longce.plan.hardware import find_gpu
    from longce.plan.plan import make_planner
    from longce.plan.report import report

    sys.argv[1:] = arguments[1:]
    cli = LongceCLI(add_plan_options, run=False)
    options = cli.config
    gpu = find_gpu(options.gpu, tflops=options.gpu_tflops, memory=options.gpu_memory)
    if options.output is not None:
        check_output(options.output)
    plan = make_planner(cli.make("model"), options, gpu).plan()
    sys.stdout.write(report(plan) + "\n")
    if options.output is not None:
        write_atomically(Path(options.output), (json.dumps(plan, indent=2, default=str) + "\n").encode())


def data_command(arguments: Sequence[str]) -> None:
    """Run ``longce data inspect`` and print its report."""
    if arguments[1:2] in (["-h"], ["--help"]):
        arguments = ["data", "inspect", "--help"]
    if arguments[1:2] != ["inspect"]:
        raise ValueError(
            "`longce data` has one subcommand: use `longce data inspect`, with the options of `longce fit`."
        )
    print_help(arguments, add_data_options)
    from longce.cli.lightning_cli import LongceCLI

    sys.argv[1:] = arguments[2:]
    cli = LongceCLI(add_data_options, run=False)
    options = cli.config
    module: Any = None
    given = "nothing"
    if options.get("data") is not None:
        module = cli.make("data")
        given = type(module).__name__
    if not callable(getattr(module, "inspect", None)):
        raise ValueError(
            "`longce data inspect` needs packed training sequences: set `data` to a module that has them, as for"
            f" `longce fit`, instead of {given}."
        )
    sys.stdout.write(
        module.inspect(options.rows or None, count=options.count, width=options.width, names=options.names)
    )


def influence_command(arguments: Sequence[str]) -> None:
    """Run ``longce influence``."""
    print_help(arguments, add_influence_options)
    from longce.cli.lightning_cli import LongceCLI
    from longce.influence import InfluenceTrainer

    sys.argv[1:] = arguments
    LongceCLI(accept_saved_config, trainer_class=InfluenceTrainer)


def quickstart_command(arguments: Sequence[str]) -> None:
    """Run ``longce quickstart``, and pass its options to each of its runs."""
    print_help(arguments, add_quickstart_options)
    from longce.quickstart import quickstart

    quickstart(arguments[1:])


def run_experiment(arguments: Sequence[str]) -> Any:
    """Run ``longce fit``, ``validate``, ``test`` or ``predict``."""
    from longce.cli.lightning_cli import LongceCLI

    sys.argv[1:] = arguments
    return LongceCLI()


COMMANDS: dict[str, Callable[[Sequence[str]], object]] = {
    "plan": plan_command,
    "score": score_command,
    "inspect": inspect_command,
    "evaluate": evaluate_command,
    "influence": influence_command,
    "corpus": corpus_command,
    "export": export_command,
    "compare": compare_command,
    "correlate": correlate_command,
    "data": data_command,
    "quickstart": quickstart_command,
    "reproduce": reproduce_command,
    **dict.fromkeys(("fit", "validate", "test", "predict"), run_experiment),
}
