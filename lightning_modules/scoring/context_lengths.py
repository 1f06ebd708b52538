"""How far back a document's dependencies reach: the same last tokens in longer and longer contexts."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from jsonargparse.typing import PositiveInt
from torch import Tensor

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import Window
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.short_context import score_windows

LONGEST = 2**20
"""Largest rung of a ladder that ends where the model does, for a model that names no length."""


@dataclass(frozen=True)
class ContextLadder:
    r"""The rungs of a context ladder, which all score the same tokens.

    The scoring window of a document of ``n`` tokens is its last ``w``. With ``P = n - w``, the rung of context length
    ``c`` is one pass over the tokens ``x_{P-c} .. x_{n-1}``, with positions from 0 on, of which the predictions of
    the last ``w`` are kept: token ``x_{P+i}`` sees exactly the ``c + i`` tokens before it, so that a rung is a window
    of the sliding definition (Appendix A.1 of Fang et al., 2025, https://arxiv.org/abs/2410.23771) of K = ``c`` and
    d = ``w``. A document has the rungs with ``c <= P``. Where ``c = P``, the rung is the pass over the whole document.

    Args:
        contexts: Context lengths in tokens, ascending; ``auto`` for the powers of two times the model's
            ``context_length``, as far as the model's positions reach.
        window: Tokens that every rung scores; by default the model's ``stride``.

    Raises:
        ValueError: If the lengths do not ascend from 1 or more.
    """

    contexts: list[PositiveInt] | Literal["auto"] = "auto"
    window: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.contexts == "auto":
            return
        if not self.contexts or any(longer <= shorter for shorter, longer in pairwise([0, *self.contexts])):
            raise ValueError(f"`ladder.contexts` must be ascending lengths, or 'auto', got {list(self.contexts)}.")

    def rungs(self, *, context_length: int, stride: int, longest: int | None) -> "Rungs":
        """Return the rungs for a model with this K and d that was made for the ``longest`` text, if that is known."""
        window = self.window or stride
        if self.contexts != "auto":
            return Rungs(tuple(self.contexts), window)
        longest = LONGEST if longest is None else longest
        powers = (context_length << doubling for doubling in range(longest.bit_length()))
        return Rungs(tuple(context for context in powers if context <= longest) or (context_length,), window)

    def model_rungs(self, backbone: Backbone, context_length: int, stride: int) -> "Rungs":
        """Return the rungs for a model that has been loaded, scored with these lengths."""
        config = backbone.base_model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None)
        return self.rungs(context_length=context_length, stride=stride, longest=longest)


@dataclass(frozen=True)
class Rungs:
    """A ladder whose lengths are all numbers: ascending ``contexts``, and the ``window`` that they score, in tokens."""

    contexts: tuple[int, ...]
    window: int

    def log_likelihood(self, backbone: Backbone, batch: PackedBatch, long: Tensor) -> list[dict[int, Tensor]]:
        """Score the last tokens of each document on each rung that it has.

        From ``[B, T]`` rows of one document each and their ``[B, T]`` long log-likelihoods follow for each row ``[w]``
        log-likelihoods in nats by context length.
        """
        found: list[dict[int, Tensor]] = [{} for _ in batch["document_boundaries"]]
        windows: dict[int, list[tuple[int, Window]]] = {context: [] for context in self.contexts}
        for row, boundaries in enumerate(batch["document_boundaries"]):
            stop = boundaries[-1]
            start = stop - self.window
            for context in self.contexts:
                if context == start:
                    found[row][context] = long[row, start:stop]
                elif context < start:
                    windows[context].append((row, Window(start - context, start, stop)))
        for alike in windows.values():
            for group, scores in score_windows(backbone, batch, alike):
                for own, (row, window) in zip(scores, group, strict=True):
                    found[row][window.scored - window.start] = own[window.scored - window.start :]
        return [dict(sorted(rungs.items())) for rungs in found]
