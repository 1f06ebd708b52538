"""LongCE and LongPPL inside trainers of other libraries, which call a Hugging Face model as they always do."""

from lightning_modules.integrations.longce_forward import apply_longce, remove_longce

__all__ = ["apply_longce", "remove_longce"]
