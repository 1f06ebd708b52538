"""Runs notebooks without Jupyter."""

import ast
import contextlib
import json
import os
import re
from pathlib import Path
from unittest import mock

import matplotlib

from tests.support import forks

FOLDER = Path(__file__).parents[2] / "notebooks"


def run_cells(path):
    """Do what Jupyter does with the cells: the last expression of each is shown, as HTML if it can be."""
    matplotlib.use("Agg")
    names = {}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"])).body
            shown = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
            if shown is not None:
                value = eval(compile(ast.Expression(shown.value), f"cell {number}", "eval"), names)
                if hasattr(value, "_repr_html_"):
                    Path("shown.html").write_text(value._repr_html_())


def run(name, folder, **variables):
    """Run a notebook as a process of its own, as its readers do, and return what it printed."""
    (folder / "constitution.txt").write_text(
        (FOLDER / "constitution.txt").read_text(encoding="utf-8"), encoding="utf-8"
    )
    out, err = folder / "out.txt", folder / "err.txt"
    with mock.patch.dict(os.environ, variables), contextlib.chdir(folder):
        process = forks.start(run_cells, FOLDER / f"{name}.ipynb", out=out, err=err)
    process.join()
    assert process.exitcode == 0, err.read_text()[-2000:]
    return out.read_text()


def key_tokens_of_models(output):
    """LongPPL and perplexity of the last table of `key_tokens`, by what the model sees."""
    found = re.findall(r"^(whole context|last \d+ tokens) +([\d.]+|nan) +([\d.]+)$", output, re.MULTILINE)
    return {name: (float(longppl), float(perplexity)) for name, longppl, perplexity in found}
