"""Key tokens to be looked at: a document as one self-contained HTML page, from the command line or in a notebook."""

from lightning_modules.visualization.page.document import inspect_document
from lightning_modules.visualization.page.page import Inspection, ModelScores

__all__ = ["Inspection", "ModelScores", "inspect_document"]
