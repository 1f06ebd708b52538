"""Callbacks that watch a model while it is trained, validated or used.

Each is imported on first use, because some need packages that training alone does not: pyarrow, matplotlib.
"""

import importlib
from typing import Any

_MODULES = {
    "ExternalEvaluator": "external_evaluator",
    "GammaSweep": "gamma_sweep",
    "HuggingFaceExport": "huggingface_export",
    "KeyTokenInspector": "key_token_inspector",
    "LongContextTasks": "long_context_tasks",
    "StepCheckpoint": "step_checkpoint",
    "TokenScoresWriter": "token_scores_writer",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"callbacks.{_MODULES[name]}"), name)
