"""Options of an export."""

from dataclasses import dataclass
from typing import Literal, get_args

Adapters = Literal["merged", "kept"]
ExportDType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export, described at `export_checkpoint`.

    Raises:
        ValueError: If a value is unknown, or adapters would be converted to another type.
    """

    adapters: Adapters = "merged"
    dtype: ExportDType = "auto"
    legacy_rope_keys: bool = False
    eabf_as_abf: bool = False

    def __post_init__(self) -> None:
        for name, known in (("adapters", get_args(Adapters)), ("dtype", get_args(ExportDType))):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` is '{getattr(self, name)}': set it to one of {', '.join(known)}.")
        if self.adapters == "kept" and self.dtype != "auto":
            raise ValueError(f"`dtype: {self.dtype}` is for merged models: leave it out, adapters stay as trained.")

    @property
    def kept(self) -> bool:
        """Whether adapters stay apart."""
        return self.adapters == "kept"
