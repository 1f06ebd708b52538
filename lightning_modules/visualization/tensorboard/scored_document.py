"""A document with one model's scores of its tokens, and excerpts around key tokens."""

import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BEFORE, AFTER = 24, 8
"""Tokens shown before and after a key token."""


@dataclass
class ScoredDocument:
    """Text, tokens and the pair of log-likelihoods, with the key tokens marked.

    Attributes:
        name: Name of the document.
        text: Text of the document.
        offsets: ``[N, 2]`` int64 character span of each token.
        long: ``[N]`` log-likelihoods given everything before the token, in nats.
        short: ``[N]`` log-likelihoods given the short context, equal to ``long`` where there is none.
        key: ``[N]`` bool, the key tokens.
    """

    name: str
    text: str
    offsets: Tensor
    long: Tensor
    short: Tensor
    key: Tensor

    @cached_property
    def lsd(self) -> Tensor:
        """``[N]`` long-short difference in nats."""
        return self.long - self.short

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, str, str]]:
        """Yield index, preceding gap and characters of the tokens from ``start`` to before ``stop``.

        Every character comes once: a token that begins inside of the one before (bytes of one letter) has the rest.
        """
        reach = int(self.offsets[start, 0]) if start < stop else 0
        for index in range(start, stop):
            begin, end = self.offsets[index].tolist()
            yield index, self.text[reach:begin], self.text[max(begin, reach) : end]
            reach = max(reach, end)

    def most_helped(self, count: int) -> list[int]:
        """Return the tokens that the long context helps most, in descending order of the difference."""
        order = self.lsd.argsort(descending=True, stable=True)[:count]
        return [index for index in order.tolist() if self.lsd[index] > 0]

    def key_tokens(self, count: int) -> list[int]:
        """Return key tokens by the long-short difference, the largest first."""
        order = torch.where(self.key, self.lsd, -math.inf).argsort(descending=True, stable=True)[:count]
        return [index for index in order.tolist() if self.key[index]]

    def excerpts(self, tokens: int) -> list[tuple[int, int]]:
        """Return ascending ranges ``[start, stop)`` around the clearest key tokens, else the most helped ones.

        Together they have at most ``tokens`` tokens; a document of no more is one range.
        """
        count = len(self.long)
        if count <= tokens:
            return [(0, count)] if count else []
        shown = torch.zeros(count, dtype=torch.bool)
        for index in self.key_tokens(tokens) or self.most_helped(tokens):
            part = slice(max(index - BEFORE, 0), index + AFTER + 1)
            if int(shown.sum() + (~shown[part]).sum()) > tokens:
                break
            shown[part] = True
        if not shown.any():
            shown[:tokens] = True
        edges = torch.diff(shown.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
        starts, stops = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
        return list(zip(starts, stops, strict=True))

    def distance(self, index: int) -> int | None:
        """Return the distance in tokens to the last token of the same characters; None if there is none."""
        start, end = self.offsets[index].tolist()
        starts = self.offsets[:index, 0].contiguous()
        found = self.text.rfind(self.text[start:end], 0, start) if start < end else -1
        while found >= 0:
            token = int(torch.searchsorted(starts, found))
            if self.offsets[token].tolist() == [found, found + end - start]:
                return index - token
            found = self.text.rfind(self.text[start:end], 0, found + end - start - 1)  # a part of another token
        return None


def printable(text: str) -> str:
    """Make line breaks and tabs visible, and replace characters that would act on others."""
    visible = {"\n": "⏎", "\r": "", "\t": "⇥"}
    return "".join(
        visible.get(character, "\N{REPLACEMENT CHARACTER}")
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        else character
        for character in text
    )
