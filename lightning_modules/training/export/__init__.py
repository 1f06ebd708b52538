"""Trained models as folders that transformers loads: merged or adapters apart, with a model card."""

from lightning_modules.training.export.checkpoint import (
    FINGERPRINT,
    KEY,
    check_resumable,
    check_same_model,
    check_same_weights,
    export_checkpoint,
    stored,
)
from lightning_modules.training.export.facts import (
    TrainingFacts,
    loaded_tokenizer,
    loading_facts,
    made_tokenizer,
    objective_facts,
    run_facts,
)
from lightning_modules.training.export.folder import check_replaceable
from lightning_modules.training.export.model import check_export, export_model
from lightning_modules.training.export.options import Adapters, ExportDType, ExportOptions

__all__ = [
    "FINGERPRINT",
    "KEY",
    "Adapters",
    "ExportDType",
    "ExportOptions",
    "TrainingFacts",
    "check_export",
    "check_replaceable",
    "check_resumable",
    "check_same_model",
    "check_same_weights",
    "export_checkpoint",
    "export_model",
    "loaded_tokenizer",
    "loading_facts",
    "made_tokenizer",
    "objective_facts",
    "run_facts",
    "stored",
]
