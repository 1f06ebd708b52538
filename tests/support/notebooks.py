"""Runs notebooks without Jupyter."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "notebooks"


# What Jupyter does with the cells: the last expression of each is shown, as HTML if it can be.
RUNNER = """
import ast, json, sys
from pathlib import Path

names = {}
for number, cell in enumerate(json.loads(Path(sys.argv[1]).read_text())["cells"]):
    if cell["cell_type"] == "code":
        body = ast.parse("".join(cell["source"])).body
        shown = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        if shown is not None:
            value = eval(compile(ast.Expression(shown.value), f"cell {number}", "eval"), names)
            if hasattr(value, "_repr_html_"):
                Path("shown.html").write_text(value._repr_html_())
"""


def run(name, folder, **variables):
    """Run a notebook as a process of its own, as its readers do, and return what it printed."""
    (folder / "constitution.txt").write_text(
        (FOLDER / "constitution.txt").read_text(encoding="utf-8"), encoding="utf-8"
    )
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", RUNNER, str(FOLDER / f"{name}.ipynb")]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def key_tokens_of_models(output):
    """LongPPL and perplexity of the last table of `key_tokens`, by what the model sees."""
    found = re.findall(r"^(whole context|last \d+ tokens) +([\d.]+|nan) +([\d.]+)$", output, re.MULTILINE)
    return {name: (float(longppl), float(perplexity)) for name, longppl, perplexity in found}
