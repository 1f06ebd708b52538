"""The same default for the same argument, wherever it is taken: those of the paper."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MINIATURE = {ROOT / "benchmarks/reproduction/miniature/settings.py"}  # of models with a tenth of the context
PAPER = {"context_length": 4096, "stride": 1024, "alpha": 2.0, "beta": -2.0, "gamma": 5.0}


@cache
def defaults():
    """Name, value and place of every argument and field that has a number as its default."""
    return list(_defaults())


def _defaults():
    for package in ("lightning_modules", "datamodules", "callbacks"):
        for file in set((ROOT / package).rglob("*.py")) - MINIATURE:
            for node in ast.walk(ast.parse(file.read_text())):
                for name, value in [*_arguments(node), *_fields(node)]:
                    try:
                        number = ast.literal_eval(value)
                    except ValueError:
                        continue
                    if isinstance(number, int | float):
                        yield name, number, f"{file.relative_to(ROOT)}:{value.lineno}"


def _arguments(node):
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    positional = [*node.args.posonlyargs, *node.args.args]
    pairs = zip(reversed(positional), reversed(node.args.defaults), strict=False)
    pairs = [*pairs, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return [(argument.arg, value) for argument, value in pairs if value is not None]


def _fields(node):
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [(each.target.id, each.value) for each in body if isinstance(each, ast.AnnAssign) and each.value is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_defaults_are_those_of_the_paper(name):
    found = [(value, place) for argument, value, place in defaults() if argument == name]
    assert len(found) > 2
    assert [place for value, place in found if value != PAPER[name]] == []
