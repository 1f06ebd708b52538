"""TensorBoard panels: documents with their key tokens as text and tables, and figures over all documents."""

from lightning_modules.visualization.tensorboard.panels import (
    CUSTOM_SCALARS,
    EvaluationPanels,
    InspectedDocument,
    draw_weights,
)
from lightning_modules.visualization.tensorboard.scored_document import ScoredDocument
from lightning_modules.visualization.tensorboard.sums import PositionSums, WeightSample

__all__ = [
    "CUSTOM_SCALARS",
    "EvaluationPanels",
    "InspectedDocument",
    "PositionSums",
    "ScoredDocument",
    "WeightSample",
    "draw_weights",
]
