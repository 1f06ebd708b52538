"""Trained models as folders that transformers loads: merged or adapters apart, with a model card."""

from lightning_modules.training.export.checkpoint import export_checkpoint
from lightning_modules.training.export.facts import ExportOptions, TrainingFacts
from lightning_modules.training.export.model import check_export, export_model

__all__ = ["ExportOptions", "TrainingFacts", "check_export", "export_checkpoint", "export_model"]
