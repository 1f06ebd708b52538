"""Options of the commands that read the configs of ``longce fit``, checked and explained before torch is imported."""

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jsonargparse
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

_COMMON = "config help print_config seed_everything trainer model data ckpt_path weights_only verbose return_predictions"


def add_plan_options(parser: Any) -> None:
    """Add the options of ``longce plan``."""
    parser.prog = "longce plan"
    parser.description = "What a run of `longce fit` with these options, and scoring, would take on given GPUs."
    parser.add_argument("--gpu", type=str | None, help="Name of the card, such as H200 or A100-80.")
    parser.add_argument("--gpus", type=PositiveInt | None, help="How many; by default trainer.devices x num_nodes.")
    parser.add_argument("--gpu_tflops", type=PositiveFloat | None, help="Peak dense bfloat16 rate of another card.")
    parser.add_argument("--gpu_memory", type=PositiveFloat | None, help="Memory of another card, GiB.")
    parser.add_argument(
        "--evaluator",
        type=str | None,
        help="Hub id, folder or config.json of the evaluator; by default that of the callback ExternalEvaluator.",
    )
    parser.add_argument("--price_per_gpu_hour", type=NonNegativeFloat | None, help="In any currency.")
    parser.add_argument("--output", type=str | None, help="JSON file to write the numbers to.")
    accept_saved_config(parser)


def add_data_options(parser: Any) -> None:
    """Add the options of ``longce data inspect``."""
    parser.prog = "longce data inspect"
    parser.description = "The rows that `longce fit` with these options would train on, as text."
    parser.add_argument("--rows", type=NonNegativeInt, nargs="+", help="Numbers of the rows to show, from 0.")
    parser.add_argument("--count", type=NonNegativeInt, default=3, help="First rows to show, if not by `--rows`.")
    parser.add_argument("--width", type=PositiveInt, default=400, help="Characters to show of each text.")
    parser.add_argument(
        "--names", type=bool, default=False, help="Name documents; the source is read up to the last one shown."
    )
    accept_saved_config(parser)


def accept_saved_config(parser: Any) -> None:
    """Accept and ignore what the saved config of a run holds in addition to model, data and trainer."""
    for name in ("ckpt_path", "weights_only"):
        parser.add_argument(f"--{name}", type=Any, default=None, help=argparse.SUPPRESS)
