"""Select documents by their scores."""

from lightning_modules.commands.select.select import select

__all__ = ["select"]
