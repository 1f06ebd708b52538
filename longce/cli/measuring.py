"""Commands that measure models and compare results. Each parses its arguments first, and imports torch only to work."""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from lightning_modules.scoring.config import ScoreConfig
from lightning_modules.tasks.evaluation.config import EvaluationConfig
from lightning_modules.utilities.text_files import check_output, read_text
from longce.cli.errors import ConciseParser

_ROWS = (".jsonl", ".json", ".parquet", ".gz", ".zst")  # endings of files with several texts
_SHOWN_NAMES = 5  # of documents, in a warning
_FLAGS = ("--chat_template", "--fewshot_as_multiturn", "--log_samples")

_log = logging.getLogger(__name__)


def score_command(arguments: Sequence[str]) -> None:
    """Run ``longce score`` and print its table."""
    description = "Compute LongPPL and perplexity of a model on text files, with the key tokens of an evaluator."
    description += " With several `--model`s or `--context_extension`s, they are compared with the first one."
    parser = make_parser("score", description, ScoreConfig)
    parser.add_argument("files", nargs="+", type=str, help="UTF-8 text files, and .jsonl or .parquet files of texts.")
    add_row_options(parser, "Score only this row")
    arguments, others = split_repeated(arguments, "--model")
    arguments, extensions = split_repeated(arguments, "--context_extension")
    options = parse_options(parser, arguments)
    files = options.pop("files")
    row = options.pop("row")
    column = options.pop("text_column")
    if row is not None or any(file.endswith(_ROWS) for file in files):
        files = read_texts(files, row, column)
    else:
        for file in files:
            read_text(file, may_be_blank=len(files) > 1)
    ScoreConfig(**options).check_names(others)
    if extensions:
        options["other_extensions"] = [yaml.safe_load(extension) for extension in extensions]
    from longce.models import score_models

    for part in score_models([options.pop("model"), *others], files=files, **options):
        sys.stdout.write(f"{part}\n")
        sys.stdout.flush()


def add_row_options(parser: Any, purpose: str) -> None:
    """Add the options that choose a document in a file of a corpus."""
    row = f"{purpose} of a .parquet file, or line of a .jsonl file, from 0."
    parser.add_argument("--row", type=NonNegativeInt | None, help=row)
    column = "Column or field of the text in .parquet and .jsonl files; dots reach into nested fields."
    parser.add_argument("--text_column", type=str, default="text", help=column)


def read_texts(files: Sequence[str], row: int | None, text_column: str) -> dict[str, str]:
    """Return the texts of files by name: of each row, or of one row of each; those without text are skipped.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a document does not exist or cannot be scored.
    """
    texts: dict[str, str] = {}
    blank: list[str] = []
    for file in files:
        for name, text in read_file(file, row, text_column):
            if name in texts:
                raise ValueError(f"'{file}' is given twice, or has the name of another file: score them one by one.")
            if text.strip():
                texts[name] = text
            else:
                blank.append(name)
    if not texts:
        raise ValueError(f"All documents of {', '.join(files)} are empty or only white space: pass files with text.")
    if blank:
        shown = ", ".join(blank[:_SHOWN_NAMES])
        _log.warning("Skipped %d documents that are empty or only white space: %s", len(blank), shown)
    return texts


def read_file(file: str, row: int | None, text_column: str) -> Iterable[tuple[str, str]]:
    """Return names and texts of the documents of a file; of a file of rows, only of one row if it is given."""
    if row is not None:
        return [read_row(file, row, text_column)]
    if file.endswith(_ROWS):
        return read_rows(file, text_column)
    return [(file, read_text(file, may_be_blank=True))]


def read_rows(file: str, text_column: str, row: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield name and text of the rows of a parquet file, or of the lines of a JSON-lines file, or of one of them.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If a row cannot be read.
    """
    from datamodules.sources.corpus import CorpusColumns, find_corpus  # imports torch

    corpus = find_corpus([file], CorpusColumns(text_column, None, ()), check=False)
    for part in corpus.parts:
        for ref, text in corpus.read(part, lambda number: row is None or number == row):
            if ref.error is not None:
                reason = ref.error.removeprefix(f"{file}:{ref.row}: ").rstrip(".")
                raise ValueError(f"Row {ref.row} of '{file}' cannot be scored: {reason}.")
            yield f"{Path(file).name}-{ref.row}", text


def read_row(file: str, row: int, text_column: str) -> tuple[str, str]:
    """Return name and text of a row of a parquet file, or of a line of a JSON-lines file, from 0 as in scores.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the document does not exist or cannot be scored.
    """
    for name, text in read_rows(file, text_column, row):
        if not text.strip():
            raise ValueError(f"Row {row} of '{file}' cannot be scored: it is only white space.")
        return name, text
    raise ValueError(f"'{file}' has no row {row}: rows and lines count from 0, and blank lines are not documents.")


def evaluate_command(arguments: Sequence[str]) -> None:
    """Run ``longce evaluate`` and print its table."""
    description = "Evaluate a model on long-context tasks and tasks of lm-evaluation-harness."
    description += " With several `--model`s or `--context_extension`s, each has a folder in `output`, and they are"
    description += " compared with the first one."
    skip = ("tasks", "lengths", "depths")
    parser = make_parser("evaluate", description, EvaluationConfig, skip=skip)
    names = "Names of tasks, groups and sets, RULER's tasks with options such as 'vt(hops=8,chains=2)', import paths of"
    names += " your own tasks, and task files of lm-evaluation-harness."
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
