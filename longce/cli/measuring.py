"""Commands that measure models and compare results. Each parses its arguments first, and imports torch only to work."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from lightning_modules.scoring.config import ScoreConfig
from lightning_modules.tasks.evaluation.config import EvaluationConfig
from lightning_modules.utilities.text_files import check_output, read_text
from longce.cli.errors import ConciseParser

_FLAGS = ("--chat_template", "--fewshot_as_multiturn", "--log_samples")


def score_command(arguments: Sequence[str]) -> None:
    """Run ``longce score`` and print its table."""
    description = "Compute LongPPL and perplexity of a model on text files, with the key tokens of an evaluator."
    description += " With several `--model`s or `--context_extension`s, they are compared with the first one."
    parser = make_parser("score", description, ScoreConfig)
    parser.add_argument("files", nargs="+", type=str, help="UTF-8 text files, or files of a corpus with `--row`.")
    add_row_options(parser)
    arguments, others = split_repeated(arguments, "--model")
    arguments, extensions = split_repeated(arguments, "--context_extension")
    options = parse_options(parser, arguments)
    row = options.pop("row")
    column = options.pop("text_column")
    if row is not None:
        options["files"] = read_rows(options["files"], row, column)
    else:
        for file in options["files"]:
            read_text(file, may_be_blank=len(options["files"]) > 1)
    files = options.pop("files")
    ScoreConfig(**options).check_names(others)
    if extensions:
        options["other_extensions"] = [yaml.safe_load(extension) for extension in extensions]
    from longce.models import score_models

    for part in score_models([options.pop("model"), *others], files=files, **options):
        sys.stdout.write(f"{part}\n")
        sys.stdout.flush()


def add_row_options(parser: Any) -> None:
    """Add the options that choose a document in a file of a corpus."""
    parser.add_argument("--row", type=NonNegativeInt | None, help="Row of a .parquet file, or line of a .jsonl file.")
    parser.add_argument("--text_column", type=str, default="text", help="Column or field of the text, with `--row`.")


def read_rows(files: Sequence[str], row: int, text_column: str) -> dict[str, str]:
    """Read the same row of each file; return the texts by name. For the errors see `read_row`."""
    texts: dict[str, str] = {}
    for file in files:
        name, text = read_row(file, row, text_column)
        if name in texts:
            raise ValueError(f"'{file}' has the name of another file: score them one by one.")
        texts[name] = text
    return texts


def read_row(file: str, row: int, text_column: str) -> tuple[str, str]:
    """Return name and text of a row of a parquet file, or of a line of a JSON-lines file, from 0 as in scores.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the document does not exist or cannot be scored.
    """
    from datamodules.sources.corpus import CorpusColumns, read_documents  # imports torch

    columns = CorpusColumns(text_column, None, ())
    for ref, text in read_documents([file], columns, {Path(file).name: [row]}):
        if ref.error is not None or not text.strip():
            reason = (ref.error or "it is only white space").rstrip(".")
            raise ValueError(f"Row {row} of '{file}' cannot be scored: {reason}.")
        return f"{Path(file).name}-{row}", text
    raise ValueError(f"'{file}' has no row {row}: rows and lines count from 0, and blank lines are not documents.")


def evaluate_command(arguments: Sequence[str]) -> None:
    """Run ``longce evaluate`` and print its table."""
    description = "Evaluate a model on long-context tasks and tasks of lm-evaluation-harness."
    description += " With several `--model`s or `--context_extension`s, each has a folder in `output`, and they are"
    description += " compared with the first one."
    skip = ("tasks", "lengths", "depths")
    parser = make_parser("evaluate", description, EvaluationConfig, skip=skip)
    names = "Names of tasks, groups and sets, import paths of your own tasks, and task files of lm-evaluation-harness."
    parser.add_argument("--tasks", nargs="+", type=str, default=["ruler_synthetic"], help=names)
    lengths = "Lengths of prompt and answer together, in tokens."
    parser.add_argument("--lengths", nargs="+", type=PositiveInt, default=[4096], help=lengths)
    depths = "Number of evenly spaced answer depths, or the depths, from 0 (front) to 1 (end); random by default."
    parser.add_argument("--depths", nargs="+", type=NonNegativeFloat, help=depths)
    arguments, others = split_repeated(_read_flags(arguments), "--model")
    arguments, extensions = split_repeated(arguments, "--context_extension")
    options = parse_options(parser, arguments)
    depths = options["depths"]
    if depths is not None and len(depths) == 1 and depths[0] > 1 and depths[0].is_integer():
        options["depths"] = int(depths[0])  # a number of depths
    EvaluationConfig(**options).check_names(others)
    if extensions:
        options["other_extensions"] = [yaml.safe_load(extension) for extension in extensions]
    from longce.models import evaluate_models

    sys.stdout.write(evaluate_models([options.pop("model"), *others], **options) + "\n")


def split_repeated(arguments: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """Split arguments into those with the first value of an option only, and its other values.

    >>> split_repeated(["a.txt", "--model", "x", "--model=y", "--row", "3", "--model", "z"], "--model")
    (['a.txt', '--model', 'x', '--row', '3'], ['y', 'z'])
    """
    kept: list[str] = []
    values: list[str] = []
    unread = list(arguments)
    is_first = True
    while unread:
        word = unread.pop(0)
        name, equals, value = word.partition("=")
        if name != option:
            kept.append(word)
            continue
        if not equals:
            if not unread:  # the parser reports the missing value
                kept.append(word)
                break
            value = unread.pop(0)
        if is_first:
            kept += [option, value]
        else:
            values.append(value)
        is_first = False
    return kept, values


def _read_flags(arguments: Sequence[str]) -> list[str]:
    """Return arguments in our spelling, given that of lm-evaluation-harness, whose flags have no value."""
    words: list[str] = []
    for word, following in pairwise([*arguments, "--"]):
        option = word.replace("--apply_chat_template", "--chat_template")
        words.append(option)
        if option in _FLAGS and following.startswith("-"):
            words.append("true")
    return words


def compare_command(arguments: Sequence[str]) -> None:
    """Run ``longce compare`` and print its tables."""
    description = "Compare runs of `longce fit`, records of `longce score`, or results of `longce evaluate`."
    parser = make_parser("compare", description)
    runs = "Folders of runs or of `longce evaluate`, or records of `longce score`; NAME=RUN names a run."
    runs += " The first is the baseline."
    parser.add_argument("runs", nargs="+", type=str, help=runs)
    parser.add_argument("--output", type=str | None, help="HTML page to write, which also has curves.")
    groups = "Settings such as `model.objective`: runs with equal values differ in their seeds, and are one group."
    parser.add_argument("--group_by", nargs="+", type=str, help=groups)
    options = parse_options(parser, arguments)
    if options["output"] is not None:
        check_output(options["output"])
    from longce.compare.command import compare

    sys.stdout.write(compare(**options))


def correlate_command(arguments: Sequence[str]) -> None:
    """Run ``longce correlate`` and print its table."""
    description = "Correlate LongPPL and perplexity of many models with their benchmark scores."
    parser = make_parser("correlate", description)
    files = "Records of `longce score`, results of `longce evaluate`, CSV files, or NAME=FILE to name the model."
    parser.add_argument("files", nargs="+", type=str, help=files)
    metrics = "Names of perplexities; by default those of `longce score` and of the CSV files."
    parser.add_argument("--metrics", nargs="+", type=str, help=metrics)
    scores = "Names of benchmark scores; by default the averages, or all scores if no file has averages."
    parser.add_argument("--scores", nargs="+", type=str, help=scores)
    output = "Folder for correlation.json, report.md, report.html and the figures."
    parser.add_argument("--output", type=str, required=True, help=output)
    options = parse_options(parser, arguments)
    from longce.correlate.command import correlate

    sys.stdout.write(correlate(**options))


def make_parser(command: str, description: str, settings: type | None = None, *, skip: Sequence[str] = ()) -> Any:
    """Return the parser of a command, with an option for each field of its settings except those in ``skip``."""
    parser = ConciseParser(prog=f"longce {command}", description=description)
    if settings is not None:
        parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
        parser.add_class_arguments(settings, skip=set(skip), as_positional=False)
    return parser


def parse_options(parser: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments after the command's name; the result does not contain the config files."""
    options: dict[str, Any] = parser.parse_args(list(arguments[1:])).as_dict()
    options.pop("config", None)
    return options
