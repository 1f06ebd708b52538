"""Options of an export; importable without torch."""

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Args:
        adapters: ``merged`` into the weights, or ``kept`` separate, with the base model's config in ``base/``.
        dtype: Type of the weights of a full model. ``auto`` is `model.dtype`, to which merged adapters are rounded;
            ``float32`` does not round; ``bfloat16`` halves the file size.
        eabf_as_abf: Export a model trained with EABF as plain ABF, which other libraries support: logits then differ
            beyond the original context length.
        push_to_hub: Repository of the Hugging Face hub, ``organization/name``, to which the folder is uploaded; weights
            of an earlier export there are removed. The token is that of ``hf auth login`` or ``HF_TOKEN``.
        private: Create the repository as a private one, and refuse to upload to one that is public.
    """

    adapters: Literal["merged", "kept"] = "merged"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    eabf_as_abf: bool = False
    push_to_hub: str | None = None
    private: bool = True

    def __post_init__(self) -> None:
        if self.kept and self.dtype != "auto":
            raise ValueError(
                f"`dtype: {self.dtype}` applies to merged models only, because adapters keep their dtype: remove it."
            )
        if self.push_to_hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push_to_hub):
            raise ValueError(f"`push_to_hub: {self.push_to_hub}` must be `organization/name` or `user/name`.")

    @property
    def kept(self) -> bool:
        """Return whether adapters are kept separate."""
        return self.adapters == "kept"
