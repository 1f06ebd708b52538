"""The recipes of the documentation, as modules."""

import importlib.util

from tests.support.pages import ROOT

FOLDER = ROOT / "docs" / "recipes"


def load_recipe(name):
    specification = importlib.util.spec_from_file_location(f"recipe_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
