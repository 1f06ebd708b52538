"""Settings of models; importable without torch."""

from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
