"""Inspect the key tokens of a document on a self-contained HTML page, from the command line or in a notebook."""

import warnings
from typing import Any

from lightning_modules.visualization.page.document import inspect_document
from lightning_modules.visualization.page.page import Inspection, ModelScores

__all__ = ["Inspection", "ModelScores", "inspect_document"]


def __getattr__(name: str) -> Any:
    """Return `ModelScores` by its former name, with a warning."""
    if name != "EvaluatedModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("`EvaluatedModel` is now called `ModelScores`: the old name will be removed.", stacklevel=2)
    return ModelScores
