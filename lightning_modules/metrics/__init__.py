"""torchmetrics classes around the functional core."""

from lightning_modules.metrics.long_perplexity import LongPerplexity

__all__ = ["LongPerplexity"]
