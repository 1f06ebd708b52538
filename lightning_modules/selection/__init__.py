"""Select documents by their scores."""

from lightning_modules.selection.select import select

__all__ = ["select"]
