"""Callbacks that watch a model while it is trained, validated or used."""

from callbacks.document_scores_writer import DocumentScoresWriter
from callbacks.external_evaluator import ExternalEvaluator
from callbacks.huggingface_export import HuggingFaceExport
from callbacks.key_token_inspector import KeyTokenInspector
from callbacks.long_context_tasks import LMEvaluationHarness, LongContextTasks
from callbacks.step_checkpoint import StepCheckpoint
from callbacks.token_scores_writer import TokenScoresWriter

__all__ = [
    "DocumentScoresWriter",
    "ExternalEvaluator",
    "HuggingFaceExport",
    "KeyTokenInspector",
    "LMEvaluationHarness",
    "LongContextTasks",
    "StepCheckpoint",
    "TokenScoresWriter",
]
