"""Inspect the key tokens of a document on a self-contained HTML page, from the command line or in a notebook."""

from lightning_modules.visualization.page.document import inspect_document
from lightning_modules.visualization.page.page import Inspection, ModelScores

__all__ = ["Inspection", "ModelScores", "inspect_document"]
