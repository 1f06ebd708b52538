"""Extras of the installation, which only some commands need."""

import importlib.util
import re

EXTRAS = {
    "datasets": "corpora",
    "duckdb": "corpora",
    "httpx2": "serve",
    "matplotlib": "reports",
    "pandas": "reports",
    "ray": "ray",
    "scipy": "reports",
}
"""Extra that contains each package. `corpora` also has pandas, but its commands fail on duckdb first."""


def name_missing_extra(message: str) -> str | None:
    """Return the extra to install if a message reports the failed import of a package, or None."""
    found = re.search(r"No module named '(\w+)'", message)
    if found is None or found[1] not in EXTRAS or importlib.util.find_spec(found[1]) is not None:
        return None
    extra = EXTRAS[found[1]]
    install = f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"the package {found[1]} is missing: install the extra `{extra}` ({install})."
