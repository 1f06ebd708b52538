"""What people look at: documents with their key tokens as text, tables and pictures, and curves over all documents."""

from lightning_modules.visualization.tensorboard.evaluation import EvaluationPanels, InspectedDocument
from lightning_modules.visualization.tensorboard.layout import custom_scalars
from lightning_modules.visualization.tensorboard.panels import draw_weights
from lightning_modules.visualization.tensorboard.scored_document import ScoredDocument
from lightning_modules.visualization.tensorboard.sums import PositionSums
from lightning_modules.visualization.tensorboard.weights import WeightSample

__all__ = [
    "EvaluationPanels",
    "InspectedDocument",
    "PositionSums",
    "ScoredDocument",
    "WeightSample",
    "custom_scalars",
    "draw_weights",
]
