"""A document with one model's scores of its tokens, and excerpts around key tokens."""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_modules.scoring.token_scores import TokenScores

BEFORE, AFTER = 24, 8
"""Tokens shown before and after a key token."""


@dataclass
class ScoredDocument:
    """A text with a model's scores of its tokens, and ``[N]`` bool, which of them are key tokens."""

    name: str
    text: str
    scores: TokenScores
    key: Tensor

    @cached_property
    def lsd(self) -> Tensor:
        """``[N]`` long-short difference in nats."""
        return self.scores.long - self.scores.short

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, str, str]]:
        """Yield index, preceding gap and characters of the tokens from ``start`` to before ``stop``.

        Every character comes once: a token that begins inside of the one before (bytes of one letter) has the rest.
        """
        reach = int(self.scores.offsets[start, 0]) if start < stop else 0
        for index in range(start, stop):
            begin, end = self.scores.offsets[index].tolist()
            yield index, self.text[reach:begin], self.text[max(begin, reach) : end]
            reach = max(reach, end)

    def most_helped(self, count: int, *, key_only: bool = False) -> list[int]:
        """Return the tokens that the long context helps most, or the key tokens, by descending difference."""
        order = self.lsd.argsort(descending=True, stable=True)
        chosen = self.key if key_only else self.lsd > 0
        return [int(index) for index in order[chosen[order]][:count]]

    def excerpts(self, tokens: int) -> list[tuple[int, int]]:
        """Return ascending ranges ``[start, stop)`` around the clearest key tokens, else the most helped ones.

        Together they have at most ``tokens`` tokens; a document of no more is one range.
        """
        count = len(self.key)
        if count <= tokens:
            return [(0, count)] if count else []
        shown = torch.zeros(count, dtype=torch.bool)
        for index in self.most_helped(tokens, key_only=True) or self.most_helped(tokens):
            part = slice(max(index - BEFORE, 0), index + AFTER + 1)
            if int(shown.sum() + (~shown[part]).sum()) > tokens:
                break
            shown[part] = True
        if not shown.any():
            shown[:tokens] = True
        edge = torch.zeros(1, dtype=torch.int)
        edges = torch.diff(shown.int(), prepend=edge, append=edge)
        starts, stops = ((edges == step).nonzero()[:, 0].tolist() for step in (1, -1))
        return list(zip(starts, stops, strict=True))

    def distance(self, index: int) -> int | None:
        """Return the distance in tokens to the same token before it; None if there is none."""
        earlier = (self.scores.token_ids[:index] == self.scores.token_ids[index]).nonzero()
        return index - int(earlier[-1]) if len(earlier) else None


def printable(text: str) -> str:
    """Make line breaks and tabs visible, and replace characters that would act on others."""
    visible = {"\n": "⏎", "\r": "", "\t": "⇥"}
    return "".join(
        visible.get(character, "\N{REPLACEMENT CHARACTER}")
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        else character
        for character in text
    )
