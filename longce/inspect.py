"""``longce inspect``: the key tokens of a document as an HTML page. It imports torch only to work."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_modules.scoring.config import InspectConfig
from lightning_modules.utilities.text_files import check_output, read_text
from longce.cli.measuring import (
    add_row_options,
    make_parser,
    parse_options,
    read_row,
    split_repeated,
)


def inspect_command(arguments: Sequence[str]) -> None:
    """Run ``longce inspect``, write its page and print the path."""
    description = "Show the key tokens of a document, and its likelihoods in long and short context, as an HTML page."
    description += " Several `--model`s are shown side by side."
    parser = make_parser("inspect", description, InspectConfig)
    parser.add_argument("file", type=str, help="UTF-8 text file, or a file of a corpus with `--row`.")
    add_row_options(parser, "Show this row")
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
