"""Callbacks that watch a model while it is trained, validated or used.

Each is imported on first use, because some need packages that training alone does not: pyarrow, matplotlib.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callbacks.external_evaluator import ExternalEvaluator as ExternalEvaluator
    from callbacks.gamma_sweep import GammaSweep as GammaSweep
    from callbacks.huggingface_export import HuggingFaceExport as HuggingFaceExport
    from callbacks.key_token_inspector import KeyTokenInspector as KeyTokenInspector
    from callbacks.long_context_tasks import LongContextTasks as LongContextTasks
    from callbacks.step_checkpoint import StepCheckpoint as StepCheckpoint
    from callbacks.token_scores_writer import TokenScoresWriter as TokenScoresWriter

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
