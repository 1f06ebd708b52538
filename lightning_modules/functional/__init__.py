"""Pure torch: windows, influence, loss and metric as functions of the log-likelihoods of tokens."""

from lightning_modules.functional.alignment import merge_spans, span_token_mask, transfer_influence
from lightning_modules.functional.fused_long_cross_entropy import Weighing, WeightedLoss, fused_long_cross_entropy
from lightning_modules.functional.influence import (
    key_token_mask,
    long_short_difference,
    mutual_information,
    soft_influence,
    threshold_influence,
)
from lightning_modules.functional.likeliest_tokens import LikeliestTokens, likeliest_tokens
from lightning_modules.functional.log_likelihood import token_log_likelihood
from lightning_modules.functional.long_cross_entropy import long_cross_entropy
from lightning_modules.functional.long_perplexity import long_perplexity
from lightning_modules.functional.power_law import PowerLaw, fit_power_law
from lightning_modules.functional.windows import ShortContext, Window, short_context_windows

__all__ = [
    "LikeliestTokens",
    "PowerLaw",
    "ShortContext",
    "Weighing",
    "WeightedLoss",
    "Window",
    "fit_power_law",
    "fused_long_cross_entropy",
    "key_token_mask",
    "likeliest_tokens",
    "long_cross_entropy",
    "long_perplexity",
    "long_short_difference",
    "merge_spans",
    "mutual_information",
    "short_context_windows",
    "soft_influence",
    "span_token_mask",
    "threshold_influence",
    "token_log_likelihood",
    "transfer_influence",
]
