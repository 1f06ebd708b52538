"""Options of the commands that read the configs of ``longce fit``, and their help without torch."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jsonargparse
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from lightning_modules.scoring.config import InfluenceConfig


def add_plan_options(parser: Any) -> None:
    """Add the options of ``longce plan``."""
    parser.prog = "longce plan"
    parser.description = "Estimate FLOPs, time and memory of a `longce fit` with these options, and what would fit."
    for name, kind, text in (
        ("gpu", str, "Name of the GPU, such as H200 or A100-80."),
        ("gpus", PositiveInt, "Number of GPUs; by default trainer.devices x num_nodes."),
        ("gpu_tflops", PositiveFloat, "Peak dense bfloat16 TFLOP/s of a GPU that is not in the list."),
        ("gpu_memory", PositiveFloat, "Memory of a GPU that is not in the list, in GiB."),
        ("measured", str, "JSON file of benchmarks/on_gpu.py; by default the newest of this GPU."),
        ("output", str, "JSON file for the estimates."),
    ):
        parser.add_argument(f"--{name}", type=kind | None, help=text)
    accept_saved_config(parser)


def add_data_options(parser: Any) -> None:
    """Add the options of ``longce data inspect``."""
    parser.prog = "longce data inspect"
    parser.description = "Show the packed sequences that `longce fit` with these options would train on, as text."
    rows = "Indices of the sequences to show, from 0."
    parser.add_argument("--rows", type=NonNegativeInt, nargs="+", default=[], help=rows)
    parser.add_argument("--count", type=NonNegativeInt, default=3, help="Number of first sequences to show.")
    parser.add_argument("--width", type=PositiveInt, default=400, help="Characters to show of each text.")
    names = "Show the names of documents, which reads the source up to the last document shown."
    parser.add_argument("--names", type=bool, default=False, help=names)
    accept_saved_config(parser)


def add_quickstart_options(parser: Any) -> None:
    """Describe ``longce quickstart``, which adds no options."""
    parser.prog = "longce quickstart"
    parser.description = "Generate a corpus, train a tiny evaluator and fine-tune a tiny model with LongCE, offline."


def add_influence_options(parser: Any) -> None:
    """Add the options of ``longce influence``, which are arguments of `InfluenceTrainer.influence`."""
    parser.prog = "longce influence"
    parser.description = (
        "Store LongCE token weights of an evaluator, or its losses for the objective Rho1, for all training sequences:"
        " training then needs no short-context pass."
    )
    parser.add_class_arguments(InfluenceConfig, as_positional=False)


def accept_saved_config(parser: Any) -> None:
    """Accept and ignore the keys of a run's saved config other than model, data and trainer."""
    for name in ("ckpt_path", "weights_only"):
        parser.add_argument(f"--{name}", type=Any, default=None, help=argparse.SUPPRESS)


def print_help(words: Sequence[str], add_options: Callable[[Any], None]) -> None:
    """Print the help of a command and exit, if its words ask for it."""
    if not {"-h", "--help"} & set(words):
        return
    parser = jsonargparse.ArgumentParser(
        epilog="This command also takes the configs and options of `longce fit`: see `longce fit --help`."
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML config of `longce fit`; may be repeated.")
    add_options(parser)
    parser.print_help()
    raise SystemExit(0)
