"""Parsers of the commands, made without importing what they run: of classes of settings, or of tables of options.

A row of a table is the name of an option, its type, its default and its help. A test compares tables and functions.
"""

from collections.abc import Sequence
from typing import Any

import jsonargparse
from jsonargparse.typing import PositiveInt

from lightning_modules.models.config import DType

REQUIRED: Any = object()

Row = tuple[str, Any, Any, str]

MODEL: tuple[Row, ...] = (
    ("dtype", DType, "auto", "Type of the weights; auto: as stored."),
    ("attn_implementation", str, "auto", "As in transformers; auto: flash attention where it is installed."),
    ("device", str, "auto", "Such as cuda:0 or cpu; auto: the GPU of this process, if there is one."),
    ("trust_remote_code", bool, False, "Run code from the model's repository."),
)
MINIATURE: tuple[Row, ...] = (
    ("output", str, "runs/miniature", "Folder of the models and of the report; what is there is not made again."),
    ("seeds", int, 1, "Base models, with random weights of their own, that all experiments begin with."),
    ("config", str | None, None, "YAML file of the experiments; by default configs/reproduce/miniature.yaml."),
    ("text", str | None, None, "Folder with train/*.txt and test/*.txt, for experiments on real text."),
)
TABLES: tuple[Row, ...] = (
    ("output", str, "runs/reproduce", "Folder of results; what is there is not measured again."),
    ("fit_options", str, "", "Further options of longce fit for each training."),
    ("documents", PositiveInt, 50, "Documents to measure on."),
    ("min_tokens", PositiveInt, 16384, "Shorter documents are left out."),
    ("max_tokens", PositiveInt, 32767, "Tokens kept of each document."),
    ("context_length", PositiveInt, 4096, "Length K of the shortest short context, in the evaluator's tokens."),
    ("stride", PositiveInt, 1024, "Number d of tokens that share one short window."),
    ("gamma", float, 5.0, "Largest soft influence."),
    ("cache_dir", str | None, None, "Folder of the evaluators' stored scores; by default in $LONGCE_CACHE."),
    (*MODEL[0][:2], "bfloat16", "Weights of all models; auto: as stored."),
    *MODEL[1:],
)
TABLE_LISTS = {
    "models": "Names, hub ids, folders or NAME=PATH; by default the models of the table.",
    "evaluators": "Likewise; by default those of the table. Tables 1, 2 and 11 are of the first one.",
    "merge": "Measure nothing; read these folders of results as well.",
    "scores": "CSV or JSON files, or folders of them, with the benchmark scores of models or runs.",
}
"""Options of ``longce reproduce TABLE`` that take several words."""


def add_options(parser: Any, rows: Sequence[Row]) -> None:
    """Add the options of a table to a parser."""
    for name, kind, default, text in rows:
        settings = {"required": True} if default is REQUIRED else {"default": default}
        parser.add_argument(f"--{name}", type=kind, help=text, **settings)


def make_parser(command: str, description: str, settings: type | None = None, *, skip: Sequence[str] = ()) -> Any:
    """Return the parser of a command.

    Args:
        command: Its name.
        description: What it does, in a sentence.
        settings: Class of its settings, whose fields become options; they can stand in a YAML file, too.
        skip: Fields that the command adds itself.
    """
    parser = jsonargparse.ArgumentParser(prog=f"longce {command}", description=description)
    if settings is not None:
        parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
        parser.add_class_arguments(settings, skip=set(skip), as_positional=False)
    return parser
