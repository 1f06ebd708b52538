"""Format the tokens that the long context helps most as a Markdown table, which TensorBoard shows."""

import math
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.visualization.report import Table, as_markdown_table

COLUMNS = (
    "token",
    "long context",
    "short context",
    "LSD (nats)",
    "key token",
    "previous occurrence, tokens ago",
    "where",
)
VISIBLE = {"\n": "⏎", "\r": "", "\t": "⇥"}


class ScoredDocument(NamedTuple):
    """Text with a model's scores of its ``[N]`` tokens; ``key`` (bool) marks key tokens."""

    name: str
    text: str
    scores: TokenScores
    key: Tensor

    def most_helped(self, count: int) -> list[tuple[float, int]]:
        """Return long-short difference (nats) and index of the tokens that the long context helps most."""
        values, order = (self.scores.long - self.scores.short).sort(descending=True, stable=True)
        return [(lsd, index) for lsd, index in zip(values[:count].tolist(), order.tolist(), strict=False) if lsd > 0]

    def distance(self, index: int) -> int | None:
        """Return the distance in tokens to the previous occurrence of the same token, or None."""
        earlier = (self.scores.token_ids[:index] == self.scores.token_ids[index]).nonzero()
        return index - int(earlier[-1]) if len(earlier) else None


def escaped(text: str) -> str:
    """Escape a text for Markdown and HTML as numbered entities, and make line breaks and control characters visible."""
    return "".join(
        VISIBLE.get(character, "\N{REPLACEMENT CHARACTER}")
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        else character
        if character.isalnum() or character == " " or ord(character) > 127
        else f"&#{ord(character)};"
        for character in text
    )


def probability(log_likelihood: float) -> str:
    """Format the probability of a log-likelihood as ``12.3%``, or as ``5e-05`` if it is below 0.1%."""
    value = math.exp(log_likelihood)
    return f"{value:.1%}" if value >= 0.001 else f"{value:.0e}"


def helped_markdown(documents: Sequence[ScoredDocument], *, count: int = 20) -> str:
    """Format a table of at most ``count`` tokens that the long context helps most, with their probabilities."""
    found = [(lsd, document, index) for document in documents for lsd, index in document.most_helped(count)]
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
    return as_markdown_table(Table([*COLUMNS], rows))


def _cut_snippet(document: ScoredDocument, index: int, before: int = 60, after: int = 20) -> str:
    start, end = document.scores.offsets[index].tolist()
    token = document.text[start:end]
    word = token.strip() or "\N{OPEN BOX}"
    inner = start + len(token) - len(token.lstrip())
    left = document.text[max(inner - before, 0) : inner]
    right = document.text[start + len(token.rstrip()) : end + after] if token.strip() else document.text[end:][:after]
    return f"{escaped(left)}**{escaped(word)}**{escaped(right)}"
