"""Options of the commands that read the configs of ``longce fit``, explained and checked before torch is imported."""

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jsonargparse
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lightning_modules.scoring.config import InfluenceConfig

_COMMON = (
    *("config", "help", "print_config", "seed_everything", "trainer", "model", "data", "ckpt_path", "weights_only"),
    *("verbose", "return_predictions"),
)
"""Options of ``longce fit``, ``validate``, ``test`` and ``predict``, without their second parts."""


def add_plan_options(parser: Any) -> None:
    """Add the options of ``longce plan``."""
    parser.prog = "longce plan"
    parser.description = "What a run of `longce fit` with these options, and scoring, would take on given GPUs."
    for name, kind, text in (
        ("gpu", str, "Name of the card, such as H200 or A100-80."),
        ("gpus", PositiveInt, "How many; by default trainer.devices x num_nodes."),
        ("gpu_tflops", PositiveFloat, "Peak dense bfloat16 rate of another card."),
        ("gpu_memory", PositiveFloat, "Memory of another card, GiB."),
        ("evaluator", str, "Hub id, folder or config.json; by default that of ExternalEvaluator."),
        ("price_per_gpu_hour", NonNegativeFloat, "In any currency."),
        ("output", str, "JSON file to write the numbers to."),
    ):
        parser.add_argument(f"--{name}", type=kind | None, help=text)
    accept_saved_config(parser)


def add_data_options(parser: Any) -> None:
    """Add the options of ``longce data inspect``."""
    parser.prog = "longce data inspect"
    parser.description = "The rows that `longce fit` with these options would train on, as text."
    parser.add_argument(
        "--rows", type=NonNegativeInt, nargs="+", default=[], help="Numbers of the rows to show, from 0."
    )
    parser.add_argument("--count", type=NonNegativeInt, default=3, help="First rows to show, if not by `--rows`.")
    parser.add_argument("--width", type=PositiveInt, default=400, help="Characters to show of each text.")
    names = "Name documents; the source is read up to the last one shown."
    parser.add_argument("--names", type=bool, default=False, help=names)
    accept_saved_config(parser)


def add_influence_options(parser: Any) -> None:
    """Add the options of ``longce influence``, which are arguments of `InfluenceTrainer.influence`."""
    parser.prog = "longce influence"
    parser.description = "LongCE weights of the training rows by an evaluator, so that training makes no short pass."
    parser.add_class_arguments(InfluenceConfig, as_positional=False)


def accept_saved_config(parser: Any) -> None:
    """Accept and ignore what the saved config of a run holds in addition to model, data and trainer."""
    for name in ("ckpt_path", "weights_only"):
        parser.add_argument(f"--{name}", type=Any, default=None, help=argparse.SUPPRESS)


def check_options(words: Sequence[str], add_options: Callable[[Any], None] | None = None) -> None:
    """Print the help of a command, or refuse an option that it does not have and name the one that may be meant.

    The commands of LightningCLI print their own help, and have no ``add_options``.
    """
    parser = jsonargparse.ArgumentParser(
        epilog="It takes the configs and options of `longce fit` as well: see `longce fit --help`."
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file of `longce fit`; may be repeated.")
    if add_options is not None:
        add_options(parser)
        if {"-h", "--help"} & set(words):
            parser.print_help()
            raise SystemExit(0)
    known = sorted({*_COMMON, *parser.get_defaults().as_dict()})
    for word in words:
        option, _, _ = word.partition("=")
        name = option.removeprefix("--").partition(".")[0].removesuffix("+")
        if option.startswith("--") and not any(other.startswith(name) for other in known):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean `--{close[0]}`?" if close else f" There are: {', '.join(known)}."
            raise ValueError(f"There is no option `{option}`.{hint}")
