"""Checks of log-likelihoods before they reach a cache, a metric or a page."""

import logging

from torch import Tensor

from lightning_modules.functional.checks import find_impossible

log = logging.getLogger(__name__)

_SHOWN = 40  # characters of a token in a message


def check_log_likelihood(
    log_likelihood: Tensor, *, model: str, dtype: str, document: str, text: str = "", offsets: Tensor | None = None
) -> None:
    """Raise a ``ValueError`` that names the first impossible one of a document's ``[T]`` log-likelihoods.

    ``offsets`` are the ``[T, 2]`` characters of the tokens in ``text``. Impossible are NaN, infinity, and values above
    0 by more than rounding.
    """
    wrong = find_impossible(log_likelihood)  # [T] bool
    if not wrong.any():
        return
    token = int(wrong.nonzero()[0])  # the first: later ones usually follow from it
    shown = "" if offsets is None else f" ({text[slice(*offsets[token].tolist())][:_SHOWN]!r})"
    raise ValueError(
        f"'{model}' gives {int(wrong.sum())} of {len(wrong)} tokens of '{document}' an impossible log-likelihood, first"
        f" token {token}{shown}: {float(log_likelihood[token])}. Its weights are damaged, or too large for its dtype"
        f" ({dtype}): set `dtype` to bfloat16 or float32, or use other weights."
    )


def warn_of_chance(log_likelihood: Tensor, scored: Tensor, model: str) -> None:
    """Warn if all scored tokens of a document are equally likely, as with weights that are all zero."""
    values = log_likelihood[scored]
    # Equal logits give each token log(1 / vocabulary); real text never does.
    if len(values) > 1 and bool((values.max() - values.min()) < 1e-6):
        log.warning(
            "'%s' predicts every token with the same probability, %.3g, like chance: its weights are probably zero.",
            model,
            float(values[0].exp()),
        )
