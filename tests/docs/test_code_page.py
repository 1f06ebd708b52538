"""The page that leads through the code: each name is defined in the file that the page cites."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "code.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
STEPS = [row for row in ROWS if len(row) == 3 and re.fullmatch(r"(`[\w/]+\.py`(, )?)+", row[2])]


def definitions(path):
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("row", STEPS, ids=lambda row: row[1])
def test_names_are_defined_in_the_files_that_are_cited(row):
    files = re.findall(r"`([\w/]+\.py)`", row[2])
    known = set().union(*map(definitions, files))
    assert set(re.findall(r"`(\w+)`", row[1])) <= known


def test_the_step_of_the_page_is_the_step_of_the_module():
    step = re.search(r"```py\n(.*?)```", PAGE, re.DOTALL)[1]
    source = (ROOT / "lightning_modules" / "long_context_lm.py").read_text()
    body = source[source.index("def training_step") :]
    assert all(line in body for line in step.splitlines())
    assert len(STEPS) > 12


def test_all_rooms_are_there():
    rooms = {f"lightning_modules/{path.name}" for path in (ROOT / "lightning_modules").iterdir() if path.is_dir()}
    assert {room for room in rooms if "__pycache__" not in room} <= set(re.findall(r"`(lightning_modules/\w+)/`", PAGE))
