"""Options of ``longce compare``; importable without torch."""

import sys
from collections.abc import Sequence

from lightning_modules.commands.cli.errors import ConciseParser
from lightning_modules.utilities.text_files import check_output


def compare_command(arguments: Sequence[str]) -> None:
    """Run ``longce compare`` and print its tables."""
    description = "Compare runs of `longce fit`, or results of `longce score`."
    parser = ConciseParser(prog="longce compare", description=description)
    runs = "Folders of runs, or results of `longce score --output`; NAME=RUN names a run. The first is the baseline."
    parser.add_argument("runs", nargs="+", type=str, help=runs)
    parser.add_argument("--output", type=str | None, help="HTML page to write, which also has curves.")
    options = parser.parse_args(list(arguments[1:])).as_dict()
    if options["output"] is not None:
        check_output(options["output"])
    from lightning_modules.commands.compare.command import compare

    sys.stdout.write(compare(**options))
