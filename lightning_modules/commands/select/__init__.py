"""Documents chosen by their scores: which pass, what they are worth by source, and as what they are written."""

from lightning_modules.commands.select.select import select

__all__ = ["select"]
