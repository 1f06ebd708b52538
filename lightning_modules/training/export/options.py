"""What an export is to be like; importable without torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExportOptions:
    """The choices of an export.

    Args:
        adapters: ``merged`` into the weights, or ``kept`` apart, with the base model's config in ``base/``.
        dtype: Of the weights of a whole model: ``auto`` is that of `model.dtype`, to which merged adapters are rounded;
            ``float32`` rounds nothing, ``bfloat16`` halves the files.
        legacy_rope_keys: Write ``rope_theta`` and ``rope_scaling`` for transformers 4 beside ``rope_parameters``;
            refused where they would not make it right.
        eabf_as_abf: Export a model trained with EABF as plain ABF, which every reader computes: logits then differ
            beyond the original length.
    """

    adapters: Literal["merged", "kept"] = "merged"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    legacy_rope_keys: bool = False
    eabf_as_abf: bool = False

    def __post_init__(self) -> None:
        if self.kept and self.dtype != "auto":
            raise ValueError(f"`dtype: {self.dtype}` is for merged models: leave it out, adapters stay as trained.")

    @property
    def kept(self) -> bool:
        """Whether adapters stay apart."""
        return self.adapters == "kept"
