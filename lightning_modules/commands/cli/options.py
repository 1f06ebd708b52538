"""Options of the commands that have functions of their own, as tables: help is printed without importing the functions.

A row is the name of an option, its type, its default and its help. A test compares the tables with the functions.
"""

from collections.abc import Sequence
from typing import Any, Literal

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
EVALUATOR: tuple[Row, ...] = (
    ("evaluator", str, REQUIRED, "Hub id or folder of the model that picks the key tokens; any tokenizer."),
    ("context_length", int, 4096, "Length K of the shortest short context, in the evaluator's tokens."),
    ("stride", int, 1024, "Number d of tokens that share one short window."),
    ("alpha", float, 2.0, "A key token's long-short difference exceeds it, in nats."),
    ("beta", float, -2.0, "A key token's long log-likelihood exceeds it, in nats."),
    ("max_tokens", int | None, None, "Tokens of each document to keep; all by default."),
    ("add_special_tokens", bool, False, "Whether the model's tokenizer adds its own."),
    ("evaluator_add_special_tokens", bool, True, "Whether the evaluator's tokenizer adds its own."),
    ("cache_dir", str | None, None, "Folder of the evaluator's stored scores; by default in $LONGCE_CACHE."),
    *MODEL,
)
SCORE: tuple[Row, ...] = (
    ("model", str, REQUIRED, "Hub id or folder of the model to evaluate."),
    *EVALUATOR,
    ("key_tokens", Literal["paper", "authors"], "paper", "How key tokens move between tokenizers: by Equation 9, or"
     " exactly as the authors' package does."),
    ("key_tokens_only", bool, False, "Spare tokens with a long log-likelihood of beta or less the short pass."),
    ("output", str | None, None, "JSON file to write the result to."),
)  # fmt: skip
INSPECT: tuple[Row, ...] = (
    *EVALUATOR,
    ("model", str | None, None, "Hub id or folder of a model to evaluate by the key tokens; any tokenizer."),
    ("alternatives", int, 5, "Likeliest tokens to show at each token; 0 spares the evaluator a second pass."),
)
EXPORT: tuple[Row, ...] = (
    ("adapters", Literal["merged", "kept"], "merged", "Into the weights, or apart with the base config in base/."),
    (
        "dtype",
        Literal["auto", "float32", "bfloat16", "float16"],
        "auto",
        "Of a whole model; auto: model.dtype.",
    ),
    ("legacy_rope_keys", bool, False, "Write rope_theta and rope_scaling for transformers 4 as well."),
    ("eabf_as_abf", bool, False, "Export EABF as plain ABF: logits differ beyond the original length."),
    ("tokenizer", str | None, None, "Hub id or folder; by default that of the training."),
    ("tokenizer_revision", str | None, None, "Branch, tag or commit of the tokenizer on the hub."),
)
SELECT: tuple[Row, ...] = (
    ("where", str | None, None, "Conditions on columns: key_token_ratio > 0.02 and tokens >= 32768."),
    ("top", float | None, None, "Take those with the largest rank_by: a fraction up to 1, or a number from 2."),
    ("rank_by", str, "benefit_mean", "Column that ranks documents, and whose means the weights are."),
    ("by", str, "file", "Column that names a document's source; folder for the folder of its file."),
    ("output", str | None, None, "File of the chosen ones: .txt for their keys, .parquet or .jsonl for documents."),
    ("files", str | list[str] | None, None, "The documents' files, if they are no longer where they were scored."),
    ("weights", str | None, None, "YAML file for the mean rank_by of each source, as data.weights of a mixture."),
)
CORRELATE: tuple[Row, ...] = (
    ("output", str, REQUIRED, "Folder for correlation.json, report.md, report.html and the figures."),
    ("log_axis", bool, False, "Draw perplexities on logarithmic axes."),
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


def make_parser(command: str, description: str, rows: Sequence[Row], *, config: bool = True) -> Any:
    """Return the parser of a command."""
    parser = jsonargparse.ArgumentParser(prog=f"longce {command}", description=description)
    if config:
        parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
    add_options(parser, rows)
    return parser
