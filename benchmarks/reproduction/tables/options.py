"""Options of ``longce reproduce TABLE``; importable without torch."""

from dataclasses import dataclass
from typing import Any

from jsonargparse.typing import PositiveInt

from lightning_modules.models.loading.config import DType
from lightning_modules.scoring.config import CommandConfig

FIXED = {"evaluator", "alpha", "beta", "add_special_tokens", "evaluator_add_special_tokens"}
"""Settings of other commands that the tables set themselves."""

LISTS = {
    "models": ("+", "Names, hub ids, folders or NAME=PATH; by default the models of the table."),
    "evaluators": ("+", "Likewise; by default those of the table. Tables 1, 2 and 11 are of the first one."),
    "merge": ("*", "Measure nothing; also read the results in these folders."),
    "scores": (
        "+",
        "CSV files or results of lm-evaluation-harness, or folders of them, with benchmark scores.",
    ),
}
"""Options that take several words."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(CommandConfig):
    """Measurement settings.

    Args:
        documents: Number of documents.
        min_tokens: Shorter documents are skipped.
        max_tokens: Tokens kept of each document.
        gamma: Largest soft influence.
        dtype: Data type of the weights of all models; ``auto`` keeps the stored one.
    """

    evaluator: str = ""
    documents: PositiveInt = 50
    min_tokens: PositiveInt = 16384
    max_tokens: PositiveInt = 32767
    gamma: float = 5.0
    dtype: DType = "bfloat16"


def add_table_options(parser: Any) -> None:
    """Add the options of ``longce reproduce TABLE``, which are arguments of `reproduce_table`."""
    parser.prog = "longce reproduce"
    parser.description = "Measure a table of the paper again, ours beside theirs. `--list` lists the tables."
    parser.add_argument("table", type=str, help="Name of a table or figure, such as table5: see `--list`.")
    output = "Folder of results. Finished measurements are not repeated; failed ones are."
    parser.add_argument("--output", type=str, default="runs/reproduce", help=output)
    for name, (count, text) in LISTS.items():
        parser.add_argument(f"--{name}", nargs=count, type=str, help=text)
    run = "Train the models of the table and export them, do not print how."
    parser.add_argument("--run", action="store_true", help=run)
    options = (
        'Further options of longce fit for each training, such as --fit_options="-c configs/strategies/fsdp.yaml".'
    )
    parser.add_argument("--fit_options", type=str, default="", help=options)
    parser.add_class_arguments(MeasureOptions, skip=FIXED)
