"""What people look at: documents with their key tokens as text, tables and pictures, and curves over all documents."""

from lightning_modules.token_views.evaluation import EvaluationPanels, InspectedDocument
from lightning_modules.token_views.layout import custom_scalars
from lightning_modules.token_views.panels import draw_weights
from lightning_modules.token_views.scored_document import ScoredDocument
from lightning_modules.token_views.sums import PositionSums
from lightning_modules.token_views.weights import WeightSample

__all__ = [
    "EvaluationPanels",
    "InspectedDocument",
    "PositionSums",
    "ScoredDocument",
    "WeightSample",
    "custom_scalars",
    "draw_weights",
]
