"""Run a script as on a machine that has only the packages of `ROOTS` and what they require.

    python -m tests.support.bare_install SCRIPT [ARGUMENT ..]

A GPU machine may have no more than these. Other packages can neither be imported nor found.
"""

import re
import runpy
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

ROOTS = ("torch", "transformers", "lightning", "peft", "torchmetrics")


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
    """Hide all packages that `ROOTS` do not require, except our own."""
    visible = {"longce", *required_distributions()}
    owners = {name: {_normalize(each) for each in owner} for name, owner in packages_distributions().items()}
    hidden = {name for name, owner in owners.items() if not owner & visible}
    assert {"jsonargparse", "datasets", "pandas"} <= hidden

    class VisiblePackages(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

        @classmethod
        def find_distributions(cls, *args):
            return (each for each in super().find_distributions(*args) if _normalize(each.name) in visible)

    sys.meta_path[sys.meta_path.index(PathFinder)] = VisiblePackages


def _normalize(name):
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    restrict_imports()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
