"""Python as on a machine that has only the packages of `ROOTS` and what they require, which a GPU machine may be.

Other packages can neither be imported nor found.
"""

import os
import re
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOTS = ("torch", "transformers", "lightning", "peft", "torchmetrics")


def bare_environment(folder):
    """Return the environment variables of a process, and of those it starts, that sees no other packages."""
    (folder / "sitecustomize.py").write_text(
        "from tests.support import bare_install\nbare_install.restrict_imports()\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}


def required_distributions():
    """Return the distributions of `ROOTS` and all that they require without extras."""
    names, unread = set(), list(ROOTS)
    while unread:
        if (name := _normalize(unread.pop())) in names:
            continue
        try:
            requirements = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        names.add(name)
        unread += [re.match(r"[\w.-]+", each)[0] for each in requirements if "extra ==" not in each]
    return names


def restrict_imports():
    """Hide all packages that `ROOTS` do not require, except our own modules, which are not installed as a package."""
    visible = required_distributions()
    owners = {name: {_normalize(each) for each in owner} for name, owner in packages_distributions().items()}
    hidden = {name for name, owner in owners.items() if not owner & {"longce", *visible}}
    assert {"jsonargparse", "datasets", "pandas"} <= hidden

    class VisiblePackages(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if path is None and name in hidden:  # setuptools has copies of some
                path = [folder for folder in sys.path if folder.endswith("_vendor")]
            return super().find_spec(name, path, target)

        @classmethod
        def find_distributions(cls, *args):
            return (each for each in super().find_distributions(*args) if _normalize(each.name) in visible)

    sys.meta_path[sys.meta_path.index(PathFinder)] = VisiblePackages


def _normalize(name):
    return re.sub(r"[-_.]+", "-", name).lower()
