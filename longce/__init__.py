"""Key-token long-context language modeling: measure with LongPPL, train with LongCE.

Everything that other programs use is here by its short name, and is imported on first use, because torch takes seconds:

    >>> import longce
    >>> longce.LongCE(gamma=5.0).gamma
    5.0
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.packing.sequences import collate_examples as collate_examples
    from lightning_modules.batch import PackedBatch as PackedBatch
    from lightning_modules.functional import key_token_mask as key_token_mask
    from lightning_modules.functional import long_cross_entropy as long_cross_entropy
    from lightning_modules.functional import long_perplexity as long_perplexity
    from lightning_modules.functional import soft_influence as soft_influence
    from lightning_modules.integrations import LongPPLCallback as LongPPLCallback
    from lightning_modules.integrations import apply_longce as apply_longce
    from lightning_modules.integrations import remove_longce as remove_longce
    from lightning_modules.long_context_lm import LongContextLM as LongContextLM
    from lightning_modules.metrics import LongPerplexity as LongPerplexity
    from lightning_modules.models.backbone import Backbone as Backbone
    from lightning_modules.models.short_context import ShortContextConfig as ShortContextConfig
    from lightning_modules.objectives import CrossEntropy as CrossEntropy
    from lightning_modules.objectives import LongCE as LongCE
    from lightning_modules.objectives import Objective as Objective
    from lightning_modules.scoring.config import EvaluatorConfig as EvaluatorConfig
    from lightning_modules.scoring.long_context_scorer import LongContextScorer as LongContextScorer
    from lightning_modules.scoring.records import Record as Record
    from lightning_modules.scoring.records import Sums as Sums
    from lightning_modules.scoring.records import read_records as read_records
    from lightning_modules.scoring.records import summarize as summarize
    from lightning_modules.scoring.records import write_records as write_records
    from lightning_modules.scoring.score import score as score
    from lightning_modules.scoring.scored_model import ScoredModel as ScoredModel
    from lightning_modules.scoring.scored_model import open_evaluator as open_evaluator
    from lightning_modules.scoring.token_scores import TokenScores as TokenScores

_MODULES = {
    "Backbone": "lightning_modules.models.backbone",
    "CrossEntropy": "lightning_modules.objectives",
    "EvaluatorConfig": "lightning_modules.scoring.config",
    "LongCE": "lightning_modules.objectives",
    "LongContextLM": "lightning_modules.long_context_lm",
    "LongContextScorer": "lightning_modules.scoring.long_context_scorer",
    "LongPPLCallback": "lightning_modules.integrations",
    "LongPerplexity": "lightning_modules.metrics",
    "Objective": "lightning_modules.objectives",
    "PackedBatch": "lightning_modules.batch",
    "Record": "lightning_modules.scoring.records",
    "ScoredModel": "lightning_modules.scoring.scored_model",
    "ShortContextConfig": "lightning_modules.models.short_context",
    "Sums": "lightning_modules.scoring.records",
    "TokenScores": "lightning_modules.scoring.token_scores",
    "apply_longce": "lightning_modules.integrations",
    "collate_examples": "datamodules.packing.sequences",
    "key_token_mask": "lightning_modules.functional",
    "long_cross_entropy": "lightning_modules.functional",
    "long_perplexity": "lightning_modules.functional",
    "open_evaluator": "lightning_modules.scoring.scored_model",
    "read_records": "lightning_modules.scoring.records",
    "remove_longce": "lightning_modules.integrations",
    "score": "lightning_modules.scoring.score",
    "soft_influence": "lightning_modules.functional",
    "summarize": "lightning_modules.scoring.records",
    "write_records": "lightning_modules.scoring.records",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'longce' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
