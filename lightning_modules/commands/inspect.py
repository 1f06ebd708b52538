"""``longce inspect``: the key tokens of a document as an HTML page. It imports torch only to work."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import NonNegativeInt

from lightning_modules.commands.cli.measuring import make_parser, parse_options, split_repeated
from lightning_modules.scoring.config import InspectConfig
from lightning_modules.utilities.text_files import check_output, read_text


def inspect_command(arguments: Sequence[str]) -> None:
    """Run ``longce inspect``, write its page and print the path."""
    description = "Show the key tokens of a document, and its likelihoods in long and short context, as an HTML page."
    description += " Several `--model`s are shown side by side."
    parser = make_parser("inspect", description, InspectConfig)
    parser.add_argument("file", type=str, help="UTF-8 text file, or a file of a corpus with `--row`.")
    parser.add_argument("--row", type=NonNegativeInt | None, help="Row of a .parquet file, or line of a .jsonl file.")
    parser.add_argument("--text_column", type=str, default="text", help="Column or field of the text, with `--row`.")
    parser.add_argument("--output", type=str | None, help="HTML file; by default FILE.html in the working directory.")
    arguments, others = split_repeated(arguments, "--model")
    options = parse_options(parser, arguments)
    file, row, column = (options.pop(name) for name in ("file", "row", "text_column"))
    name, text = (Path(file).name, read_text(file)) if row is None else read_row(file, row, column)
    output = options.pop("output") or f"{name}.html"
    check_output(output)
    if Path(output).exists() and Path(file).exists() and Path(output).samefile(file):
        raise ValueError(f"`output` '{output}' is the document itself: write the page to another file.")
    for model in [options["model"], *others]:
        InspectConfig(**{**options, "model": model}).check_names()
    from lightning_modules.visualization.page.document import inspect_document

    inspection = inspect_document(text, name=name, other_models=others, **options)
    sys.stdout.write(f"{inspection.summary()}\n{output} ({inspection.save(output).stat().st_size / 1e6:.1f} MB)\n")


def read_row(file: str, row: int, text_column: str) -> tuple[str, str]:
    """Return name and text of a row of a parquet file, or of a line of a JSON-lines file, from 0 as in scores.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the document does not exist or cannot be scored.
    """
    datamodules = importlib.import_module("datamodules")  # this package may not import it statically
    for ref, text in datamodules.DocumentCorpus(file, text_column=text_column).documents({Path(file).name: [row]}):
        if ref.error is not None or not text.strip():
            raise ValueError(f"Row {row} of '{file}' cannot be scored: {ref.error or 'it is only white space'}.")
        return f"{Path(file).name}-{row}", text
    raise ValueError(f"'{file}' has no row {row}: rows and lines count from 0, and blank lines are not documents.")
