"""The paper's equations in pure torch: short windows, log-likelihoods, token weights, loss and metric."""

from lightning_modules.functional.alignment import (
    character_units,
    merge_spans,
    span_token_mask,
    transfer_influence,
    unit_spans,
)
from lightning_modules.functional.authors_alignment import merge_touching_spans, scan_token_mask
from lightning_modules.functional.equations import (
    key_token_mask,
    long_cross_entropy,
    long_perplexity,
    long_short_difference,
    soft_influence,
)
from lightning_modules.functional.log_likelihood import token_log_likelihood
from lightning_modules.functional.power_law import PowerLaw, fit_power_law
from lightning_modules.functional.token_weights import (
    excess_loss_weights,
    mutual_information,
    scale_to_mean_one,
    threshold_weights,
    top_fraction_weights,
)
from lightning_modules.functional.top_tokens import LikeliestTokens, greedy_targets, likeliest_tokens
from lightning_modules.functional.windows import ShortContext, ShortScores, Window, short_context_windows

__all__ = [
    "LikeliestTokens",
    "PowerLaw",
    "ShortContext",
    "ShortScores",
    "Window",
    "character_units",
    "excess_loss_weights",
    "fit_power_law",
    "greedy_targets",
    "key_token_mask",
    "likeliest_tokens",
    "long_cross_entropy",
    "long_perplexity",
    "long_short_difference",
    "merge_spans",
    "merge_touching_spans",
    "mutual_information",
    "scale_to_mean_one",
    "scan_token_mask",
    "short_context_windows",
    "soft_influence",
    "span_token_mask",
    "threshold_weights",
    "token_log_likelihood",
    "top_fraction_weights",
    "transfer_influence",
    "unit_spans",
]
