"""Trained models as folders that transformers loads: merged or adapters apart, with a card that says what they are."""

from lightning_modules.export.checkpoint import FINGERPRINT, KEY, check_same_model, export_checkpoint, stored
from lightning_modules.export.facts import TrainingFacts, loading_facts, objective_facts, run_facts
from lightning_modules.export.folder import check_replaceable
from lightning_modules.export.model import check_export, export_model
from lightning_modules.export.options import Adapters, ExportDType, ExportOptions

__all__ = [
    "FINGERPRINT",
    "KEY",
    "Adapters",
    "ExportDType",
    "ExportOptions",
    "TrainingFacts",
    "check_export",
    "check_replaceable",
    "check_same_model",
    "export_checkpoint",
    "export_model",
    "loading_facts",
    "objective_facts",
    "run_facts",
    "stored",
]
