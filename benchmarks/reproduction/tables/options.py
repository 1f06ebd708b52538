"""Options of ``longce reproduce TABLE``; importable without torch."""

from dataclasses import dataclass
from typing import Any

from jsonargparse.typing import PositiveInt

from lightning_modules.models.config import DType
from lightning_modules.scoring.config import EvaluatorConfig

LISTS = {
    "models": ("+", "Names, hub ids, folders or NAME=PATH; by default the models of the table."),
    "evaluators": ("+", "Likewise; by default those of the table. Tables 1, 2 and 11 are of the first one."),
    "merge": ("*", "Measure nothing; read these folders of results, too."),
    "scores": ("+", "CSV or JSON files, or folders of them, with the benchmark scores of models or runs."),
}
"""Options that take several words."""


@dataclass(frozen=True)
class MeasureOptions:
    """How models are measured.

    Args:
        documents: Documents to measure on.
        min_tokens: Shorter documents are passed over.
        max_tokens: Tokens kept of each document.
        context_length: Length K of the shortest short context, in the evaluator's tokens.
        stride: Number d of tokens that share one short window.
        gamma: Largest soft influence.
        dtype: Type of the weights of all models; ``auto`` keeps the stored one.
        attn_implementation: Attention of all models, as in transformers; ``auto`` is flash attention where installed.
        device: Such as ``cuda:0`` or ``cpu``; ``auto`` is the first GPU, if there is one.
        cache_dir: Folder of the evaluators' stored scores; by default in ``$LONGCE_CACHE`` or ``~/.cache/longce``.
        trust_remote_code: Run code from the models' repositories; off unless you trust it.
    """

    documents: PositiveInt = 50
    min_tokens: PositiveInt = 16384
    max_tokens: PositiveInt = 32767
    context_length: PositiveInt = 4096
    stride: PositiveInt = 1024
    gamma: float = 5.0
    dtype: DType = "bfloat16"
    attn_implementation: str = "auto"
    device: str = "auto"
    cache_dir: str | None = None
    trust_remote_code: bool = False

    def evaluator_config(self, path: str) -> EvaluatorConfig:
        """Return the settings of an evaluator."""
        return EvaluatorConfig(
            path,
            self.context_length,
            self.stride,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            cache_dir=self.cache_dir,
            trust_remote_code=self.trust_remote_code,
        )


def add_table_options(parser: Any) -> None:
    """Add the options of ``longce reproduce TABLE``, which are arguments of `reproduce_table`."""
    parser.prog = "longce reproduce"
    parser.description = (
        "Measure a table of the paper again, ours beside theirs. `--list` lists the tables; `longce reproduce"
        " miniature` has options of its own."
    )
    parser.add_argument("table", type=str, help="table1 to table12, or table5-package.")
    output = "Folder of results; what is there is not measured again, what failed is tried again."
    parser.add_argument("--output", type=str, default="runs/reproduce", help=output)
    for name, (count, text) in LISTS.items():
        parser.add_argument(f"--{name}", nargs=count, type=str, help=text)
    run = "Train the models of the table and export them, do not print how."
    parser.add_argument("--run", action="store_true", help=run)
    options = 'Further options of longce fit for each training, such as "-c configs/strategies/fsdp.yaml".'
    parser.add_argument("--fit_options", type=str, default="", help=options)
    parser.add_class_arguments(MeasureOptions)
