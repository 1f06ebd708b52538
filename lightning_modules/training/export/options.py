"""Options of an export; importable without torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Args:
        adapters: ``merged`` into the weights, or ``kept`` separate, with the base model's config in ``base/``.
        dtype: Type of the weights of a full model. ``auto`` is `model.dtype`, to which merged adapters are rounded;
            ``float32`` does not round; ``bfloat16`` halves the file size.
        legacy_rope_keys: Also write ``rope_theta`` and ``rope_scaling`` for transformers 4; an error if these keys
            cannot express the model's RoPE.
        eabf_as_abf: Export a model trained with EABF as plain ABF, which other libraries support: logits then differ
            beyond the original context length.
    """

    adapters: Literal["merged", "kept"] = "merged"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    legacy_rope_keys: bool = False
    eabf_as_abf: bool = False

    def __post_init__(self) -> None:
        if self.kept and self.dtype != "auto":
            raise ValueError(
                f"`dtype: {self.dtype}` applies to merged models only, because adapters keep their dtype: remove it."
            )

    @property
    def kept(self) -> bool:
        """Return whether adapters are kept separate."""
        return self.adapters == "kept"
