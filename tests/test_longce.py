"""The package that other programs import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import longce

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", longce.__all__)
def test_each_name_is_that_of_its_module_for_programs_and_for_type_checkers(name):
    value = getattr(longce, name)
    assert value is getattr(sys.modules[longce._MODULES[name]], name)
    tree = ast.parse((ROOT / "longce" / "__init__.py").read_text())
    (checked,) = [node.body for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in checked for alias in node.names}
    assert typed == longce._MODULES
    assert name in dir(longce)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'scorer'"):
        _ = longce.scorer


@pytest.mark.slow
def test_the_import_is_cheap_and_the_package_is_the_command(tmp_path):
    code = "import sys, longce; print(*({'torch', 'transformers', 'lightning'} & set(sys.modules)))"
    run = {"capture_output": True, "text": True, "cwd": tmp_path, "check": True}
    assert subprocess.run([sys.executable, "-c", code], **run).stdout.strip() == ""
    done = subprocess.run([sys.executable, "-m", "longce", "--version"], **run)
    assert done.stdout.startswith("longce ")
