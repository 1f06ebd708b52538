"""Format documents with one model's scores as Markdown.

TensorBoard removes colors but keeps bold text, tables and links with a tooltip: `[token](# "tooltip")`.
"""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.visualization.report import Table, as_markdown_table

STEPS = ((4.0, "█"), (2.0, "▆"), (1.0, "▄"), (0.5, "▂"))  # nats of long-short difference above which a symbol is shown

HELP = "**Key tokens** are bold, with their scores as tooltips. LSD above 0.5, 1, 2, 4 nats: ▂ ▄ ▆ █; below -0.5: ▿."

BEFORE, AFTER = 24, 8  # tokens shown around a key token


@dataclass
class ScoredDocument:
    """Text with a model's scores of its ``[N]`` tokens; ``key`` (bool) marks the key tokens."""

    name: str
    text: str
    scores: TokenScores
    key: Tensor

    @cached_property
    def lsd(self) -> Tensor:
        """``[N]`` long-short difference in nats."""
        return self.scores.long - self.scores.short

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, str, str]]:
        """Yield index, preceding gap and characters of the tokens in ``[start, stop)``.

        Every character comes once: a token that begins inside the preceding one (bytes of one letter) gets the rest.
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
        """Return ascending ranges ``[start, stop)`` around the clearest key tokens, or else the most helped tokens.

        Together they have at most ``tokens`` tokens; a shorter document is one range.
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
        """Return the distance in tokens to the previous occurrence of the same token, or None."""
        earlier = (self.scores.token_ids[:index] == self.scores.token_ids[index]).nonzero()
        return index - int(earlier[-1]) if len(earlier) else None


def printable(text: str) -> str:
    """Make line breaks and tabs visible, and replace control characters."""
    visible = {"\n": "⏎", "\r": "", "\t": "⇥"}
    return "".join(
        visible.get(character, "\N{REPLACEMENT CHARACTER}")
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        else character
        for character in text
    )


def escaped(text: str) -> str:
    """Escape a text for Markdown and HTML: all special characters become numbered entities."""
    return "".join(
        character if character.isalnum() or character == " " or ord(character) > 127 else f"&#{ord(character)};"
        for character in printable(text)
    )


def probability(log_likelihood: float) -> str:
    """Format the probability of a log-likelihood as ``12.3%``, or as ``5e-05`` if it is below 0.1%."""
    value = math.exp(log_likelihood)
    return f"{value:.1%}" if value >= 0.001 else f"{value:.0e}"


def excerpts_markdown(document: ScoredDocument, *, tokens: int, title: str) -> str:
    """Format excerpts of a document around its key tokens, with at most ``tokens`` tokens in total."""
    parts = document.excerpts(tokens)
    shown = sum(stop - start for start, stop in parts)
    lines = [f"**{escaped(title)}**", f"{shown:,} of {len(document.scores.long):,} tokens. {HELP}"]
    for start, stop in parts:
        running = "".join(
            escaped(gap) + _mark_token(document, i, piece) for i, gap, piece in document.pieces(start, stop)
        )
        lines.append(f"*tokens {start:,} to {stop - 1:,}:* {running}")
    return "\n\n".join(lines)


def helped_markdown(documents: Sequence[ScoredDocument], *, count: int = 20) -> str:
    """Format a table of at most ``count`` tokens that the long context helps most, with their probabilities."""
    found = [(float(document.lsd[i]), document, i) for document in documents for i in document.most_helped(count)]
    found.sort(key=lambda entry: -entry[0])
    rows = [
        [
            _cut_snippet(document, index),
            probability(float(document.scores.long[index])),
            probability(float(document.scores.short[index])),
            f"{lsd:.2f}",
            "yes" if document.key[index] else "",
            f"{distance:,}" if (distance := document.distance(index)) else "never",
            escaped(f"{document.name}, token {index:,}"),
        ]
        for lsd, document, index in found[:count]
    ]
    head = [
        "token",
        "long context",
        "short context",
        "LSD (nats)",
        "key token",
        "previous occurrence, tokens ago",
        "where",
    ]
    return as_markdown_table(Table(head, rows))


def learned_markdown(document: ScoredDocument, long_then: Tensor, *, then: int, count: int = 20) -> str:
    """Format a table of the probabilities of at most ``count`` key tokens at the step ``then`` and now.

    ``long_then`` are the ``[N]`` long-context log-likelihoods at that step, in nats; the most helped tokens are shown.
    """
    if not document.key.any():
        return "This document has no key token."
    long, short = document.scores.long, document.scores.short
    change = long - long_then
    rows = [
        [
            _cut_snippet(document, index),
            probability(float(long_then[index])),
            probability(float(long[index])),
            f"{float(change[index]):+.2f} {_choose_glyph(float(change[index]))}",
            probability(float(short[index])) if long[index] != short[index] else "",
        ]
        for index in sorted(document.most_helped(count, key_only=True))
    ]
    before, now = f"probability at step {then:,}", "probability now"
    table = Table(["key token", before, now, "change (nats)", "now, in the short context"], rows)
    mean_then, mean_now = float(long_then[document.key].mean()), float(long[document.key].mean())
    return (
        f"{int(document.key.sum()):,} key tokens; geometric mean of their probabilities at step {then:,}:"
        f" {probability(mean_then)}, now: {probability(mean_now)}.\n\n{as_markdown_table(table)}"
    )


def _mark_token(document: ScoredDocument, index: int, piece: str) -> str:
    """Format a token in running text; bold text must begin and end with visible characters."""
    lsd = float(document.lsd[index])
    if not document.key[index] or not piece.strip():
        return escaped(piece) + _choose_glyph(lsd)
    word = piece.strip()
    before, after = piece.split(word, 1)
    long, short = probability(float(document.scores.long[index])), probability(float(document.scores.short[index]))
    tip = f"LSD {lsd:.2f} nats, long {long}, short {short}"
    return f'{escaped(before)}**[{escaped(word)}](# "{tip}")**{_choose_glyph(lsd)}{escaped(after)}'


def _choose_glyph(lsd: float) -> str:
    if lsd < -STEPS[-1][0]:
        return "▿"
    return next((glyph for above, glyph in STEPS if lsd > above), "")


def _cut_snippet(document: ScoredDocument, index: int, before: int = 60, after: int = 20) -> str:
    start, end = document.scores.offsets[index].tolist()
    token = document.text[start:end]
    word = token.strip() or "\N{OPEN BOX}"
    inner = start + len(token) - len(token.lstrip())
    left = document.text[max(inner - before, 0) : inner]
    right = document.text[start + len(token.rstrip()) : end + after] if token.strip() else document.text[end:][:after]
    return f"{escaped(left)}**{escaped(word)}**{escaped(right)}"
