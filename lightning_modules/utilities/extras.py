"""Extras of the installation, which only some commands need."""

import re

EXTRAS = {
    "datasets": "corpora",
    "duckdb": "corpora",
    "httpx2": "serve",
    "matplotlib": "reports",
    "pandas": "reports",
    "pyarrow": "corpora",
    "scipy": "reports",
}
"""The extra that has a package. pandas is in `corpora` as well, whose commands miss another package first."""


def name_missing_extra(message: str) -> str | None:
    """Return which extra to install if the message of an error reports a missing package of one, or None."""
    found = re.search(r"No module named '(\w+)", message)
    if found is None or found[1] not in EXTRAS:
        return None
    extra = EXTRAS[found[1]]
    install = f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"the package {found[1]} is missing: install the extra `{extra}` ({install})."
