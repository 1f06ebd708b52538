"""Key tokens to be looked at: a document as one self-contained HTML page, from the command line or in a notebook."""

from lightning_modules.inspection.document import inspect_document
from lightning_modules.inspection.page import EvaluatedModel, Inspection

__all__ = ["EvaluatedModel", "Inspection", "inspect_document"]
