"""Scores of a document's last tokens in several context lengths, to see how far back its dependencies reach."""

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import Window
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.short_context import score_windows


@dataclass(frozen=True)
class ContextLengths:
    r"""Context lengths in which the same tokens of a document are scored.

    These are its last ``w`` of ``n`` tokens. For context length ``c``, with ``P = n - w``, one forward pass over
    ``x_{P-c} .. x_{n-1}`` scores them, with positions from 0: token ``x_{P+i}`` sees exactly the ``c + i`` tokens
    before it. This is a sliding window with K = ``c`` and d = ``w`` (Appendix A.1 of Fang et al., 2025,
    https://arxiv.org/abs/2410.23771). Only context lengths ``c <= P`` fit into a document; ``c = P`` is the whole
    document.

    Args:
        contexts: Ascending context lengths c, in tokens.
        window: Number w of tokens to score in every context length.
    """

    contexts: tuple[int, ...]
    window: int

    def __post_init__(self) -> None:
        if any(longer <= shorter for shorter, longer in pairwise([0, *self.contexts])):
            raise ValueError(f"`contexts` must be ascending lengths above 0, got {list(self.contexts)}.")

    def log_likelihood(self, backbone: Scorer, batch: PackedBatch, long: Tensor) -> list[dict[int, Tensor]]:
        """Score the last tokens of each document in each context length that fits into it.

        Takes a ``[B, T]`` batch with one document per sequence and its ``[B, T]`` long log-likelihoods. Returns ``[w]``
        log-likelihoods in nats by context length, for each document.
        """
        scores: list[dict[int, Tensor]] = [{} for _ in batch["document_boundaries"]]  # by row
        windows: dict[int, list[tuple[int, Window]]] = {context: [] for context in self.contexts}  # with their rows
        for row, boundaries in enumerate(batch["document_boundaries"]):
            stop = boundaries[-1]
            start = stop - self.window  # P, the first scored token
            for context in self.contexts:
                if context == start:  # the whole document, which has been scored already
                    scores[row][context] = long[row, start:stop]
                elif context < start:
                    windows[context].append((row, Window(start - context, start, stop)))
        # One context length at a time, because windows of one length share forward passes.
        for equal_windows in windows.values():
            for group, log_likelihood in score_windows(backbone, batch, equal_windows):
                for of_window, (row, window) in zip(log_likelihood, group, strict=True):
                    context = window.scored - window.start  # c: tokens before the first scored one
                    scores[row][context] = of_window[context:]  # [w]
        return [dict(sorted(by_context.items())) for by_context in scores]
