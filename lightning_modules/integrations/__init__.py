"""LongCE and LongPPL inside trainers of other libraries, which call a Hugging Face model as they always do."""

from lightning_modules.integrations.longce_forward import apply_longce, remove_longce
from lightning_modules.integrations.longppl_callback import LongPPLCallback

__all__ = ["LongPPLCallback", "apply_longce", "remove_longce"]
