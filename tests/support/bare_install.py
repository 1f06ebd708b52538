"""Python as on a machine that has only the packages of `ROOTS` and what they require, which a GPU machine may be.

Other packages can neither be imported nor found.
"""

import os
import re
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOTS = ("torch", "transformers", "lightning", "peft", "torchmetrics")


def bare_environment(folder, roots=ROOTS):
    """Return the environment variables of a process, and of those it starts, that sees no other packages."""
    (folder / "sitecustomize.py").write_text(
        f"from tests.support import bare_install\nbare_install.restrict_imports({tuple(roots)!r})\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}


def required_distributions(roots=ROOTS):
    """Return the distributions of requirements such as ``torch`` or ``jsonargparse[signatures]``, and all of theirs."""
    seen = set()
    unread = [Requirement(root) for root in roots]
    while unread:
        requirement = unread.pop()
        key = _normalize(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        try:
            found = requires(requirement.name) or []
        except PackageNotFoundError:  # of another platform
            continue
        seen.add(key)
        extras = [{"extra": name} for name in (*key[1], "")]
        unread += [each for each in map(Requirement, found) if _applies(each, extras)]
    return {name for name, _ in seen}


def _applies(requirement, extras):
    return requirement.marker is None or any(map(requirement.marker.evaluate, extras))


def restrict_imports(roots=ROOTS):
    """Hide all packages that ``roots`` do not require, except our own modules, which are not installed as a package."""
    visible = required_distributions(roots)
    owners = {name: {_normalize(each) for each in owner} for name, owner in packages_distributions().items()}
    hidden = {name for name, owner in owners.items() if not owner & {"longce", *visible}}
    assert {"datasets", "pandas"} <= hidden

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
