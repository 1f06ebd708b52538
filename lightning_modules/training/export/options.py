"""What an export is to be like; importable without torch."""

from dataclasses import dataclass
from typing import Literal, get_args

Adapters = Literal["merged", "kept"]
ExportDType = Literal["auto", "float32", "bfloat16", "float16"]


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

    Raises:
        ValueError: If a value is unknown, or adapters would be converted to another type.
    """

    adapters: Adapters = "merged"  # into the weights, or `kept` apart, with the base model's config in `base/`
    dtype: ExportDType = "auto"  # of a whole model's weights; `auto`: `model.dtype`, to which adapters are rounded
    legacy_rope_keys: bool = False  # write the keys of transformers 4 beside `rope_parameters`, where that is right
    eabf_as_abf: bool = False  # export EABF as plain ABF: logits then differ beyond the original length

    def __post_init__(self) -> None:
        for name, known in (("adapters", get_args(Adapters)), ("dtype", get_args(ExportDType))):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` is '{getattr(self, name)}': set it to one of {', '.join(known)}.")
        if self.kept and self.dtype != "auto":
            raise ValueError(f"`dtype: {self.dtype}` is for merged models: leave it out, adapters stay as trained.")

    @property
    def kept(self) -> bool:
        """Whether adapters stay apart."""
        return self.adapters == "kept"
