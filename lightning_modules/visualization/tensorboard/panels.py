"""TensorBoard panels: the table, figures and histograms of an evaluation, and their tags."""

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_modules.scoring.key_tokens import evaluator_key_tokens, find_key_tokens
from lightning_modules.scoring.measure import EvaluatedDocument
from lightning_modules.scoring.records import Definition
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.visualization.report import Table, as_markdown_table
from lightning_modules.visualization.tensorboard.figures import benefit_figure, position_figure
from lightning_modules.visualization.tensorboard.sums import PositionSums

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


class InspectedDocument(NamedTuple):
    """Text with a model's scores of its ``[N]`` tokens; ``key`` (bool) marks key tokens, ``scored`` the scored ones."""

    name: str
    text: str
    scores: TokenScores
    key: Tensor
    scored: Tensor

    def most_helped(self, count: int) -> list[tuple[float, int]]:
        """Return long-short difference (nats) and index of the tokens that the long context helps most."""
        values, order = (self.scores.long - self.scores.short).sort(descending=True, stable=True)
        return [(lsd, index) for lsd, index in zip(values[:count].tolist(), order.tolist(), strict=False) if lsd > 0]

    def distance(self, index: int) -> int | None:
        """Return the distance in tokens to the previous occurrence of the same token, or None."""
        earlier = (self.scores.token_ids[:index] == self.scores.token_ids[index]).nonzero()
        if not len(earlier):
            return None
        return index - int(earlier[-1])


class EvaluationPanels:
    """Writer of the panels of successive evaluations.

    Key tokens are those of a ``definition``, unless they are ``precomputed``.
    """

    def __init__(self, definition: Definition, *, precomputed: bool = False) -> None:
        self.definition = definition
        self.precomputed = precomputed
        self.thresholds: Any = {"alpha": definition.alpha, "beta": definition.beta}
        self._drawn: set[str] = set()

    def draw(
        self,
        writers: Sequence[Any],
        documents: Sequence[InspectedDocument],
        positions: PositionSums,
        *,
        evaluated: Mapping[str, EvaluatedDocument],
        step: int,
    ) -> None:
        """Write all panels of an evaluation after ``step`` optimizer steps to each ``SummaryWriter``.

        ``documents`` have the model's scores, and mark all scored tokens unless key tokens are precomputed.
        ``positions`` has the model's losses over all documents, ``evaluated`` the evaluator's by SHA-256 of texts.
        """
        by_model, by_evaluator = self._mark_key_tokens(documents, evaluated)
        for writer in writers:
            if not set(evaluated) <= self._drawn:  # draw an evaluator's scores once, because they never change
                writer.add_text("most_helped_tokens/evaluator", helped_markdown(by_evaluator), step)
                self._draw_evaluator(writer, evaluated.values(), step)
            if documents:
                writer.add_text("most_helped_tokens/model", helped_markdown(by_model), step)
                values = torch.cat([document.scores.long[document.key] for document in by_model])
                if len(values):
                    writer.add_histogram("key_tokens/model_log_likelihood_nats", values, step)
            if documents and not evaluated:
                scored = [document.scored for document in documents]  # prompts of chats are not
                self._draw_scores(writer, [document.scores for document in documents], scored, "model", step)
            if positions.sums[0].any():
                figure = position_figure(positions, title=f"trained model, step {step:,}")
                writer.add_figure("loss_by_context/model_all_documents", figure, step, close=False)
        self._drawn |= set(evaluated)

    def _mark_key_tokens(
        self, documents: Sequence[InspectedDocument], evaluated: Mapping[str, EvaluatedDocument]
    ) -> tuple[list[InspectedDocument], list[InspectedDocument]]:
        """Return the documents with their key tokens: with the model's scores, and those with the evaluator's."""
        by_model = []
        by_evaluator = []
        for document in documents:
            found = evaluated.get(document.scores.text_sha256)
            by_model.append(document._replace(key=self._find_key(document, found)))
            if found is not None:
                key = self._key_tokens(found.scores)
                by_evaluator.append(document._replace(scores=found.scores, key=key))
        return by_model, by_evaluator

    def _key_tokens(self, scores: TokenScores) -> Tensor:
        return evaluator_key_tokens(scores, **self.thresholds)

    def _find_key(self, document: InspectedDocument, found: EvaluatedDocument | None) -> Tensor:
        """Return the evaluator's key tokens, or the model's own without an evaluator."""
        if self.precomputed:
            return document.key
        if found is None:
            return document.key & self._key_tokens(document.scores)
        rule = self.definition.key_token_rule
        return document.key & find_key_tokens(found.scores, found.tokens, **self.thresholds, rule=rule).mask

    def _draw_evaluator(self, writer: Any, evaluated: Iterable[EvaluatedDocument], step: int) -> None:
        documents = [found.scores for found in evaluated]
        scored = [torch.arange(len(scores.long)) >= scores.unscored for scores in documents]
        self._draw_scores(writer, documents, scored, "evaluator", step)

    def _draw_scores(
        self, writer: Any, documents: Sequence[TokenScores], scored: Sequence[Tensor], scored_by: str, step: int
    ) -> None:
        """Draw the density of LSD and LCL over all documents of a model, and their loss by context length.

        ``scored`` marks the tokens of each document that are drawn.
        """
        long_parts = []
        short_parts = []
        key_parts = []
        place_parts = []
        for scores, mask in zip(documents, scored, strict=True):
            long_parts.append(scores.long[mask])
            short_parts.append(scores.short[mask])
            key_parts.append(self._key_tokens(scores)[mask])
            place_parts.append(torch.arange(len(scores.long))[mask])
        long = torch.cat(long_parts)
        short = torch.cat(short_parts)
        positions = PositionSums(3)
        positions.add(torch.cat(place_parts), -long, -short, torch.cat(key_parts))
        title = f"{scored_by}, {len(documents):,} documents"
        if (long != short).any():
            figure = benefit_figure(long, short, **self.thresholds, title=title)
            writer.add_figure(f"lsd_and_lcl/{scored_by}", figure, step, close=False)
        if len(long):
            figure = position_figure(positions, title=title)
            writer.add_figure(f"loss_by_context/{scored_by}", figure, step, close=False)


def draw_weights(writer: Any, weights: Tensor, differences: Tensor, *, cap: float | None, step: int) -> None:
    """Write histograms of ``[N]`` token weights up to a cap, and of ``[M]`` LSD in nats, of one optimizer step."""
    if len(weights):
        # TensorBoard's default bins grow by 10%, which is too coarse for weights between 0 and 5.
        bins: Any = "tensorflow"
        if not (cap is None or weights.min() < 0):
            bins = torch.linspace(0, cap * 1.0001, 51).tolist()
        writer.add_histogram("train/token_weights", weights, step, bins=bins)
    if len(differences):
        writer.add_histogram("train/lsd_nats", differences, step)


def escaped(text: str) -> str:
    """Escape a text for Markdown and HTML as numbered entities, and make line breaks and control characters visible."""
    return "".join(map(_escape_character, text))


def _escape_character(character: str) -> str:
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return VISIBLE.get(character, "\N{REPLACEMENT CHARACTER}")
    if character.isalnum() or character == " " or ord(character) > 127:
        return character
    return f"&#{ord(character)};"


def probability(log_likelihood: float) -> str:
    """Format the probability of a log-likelihood as ``12.3%``, or as ``5e-05`` if it is below 0.1%."""
    value = math.exp(log_likelihood)
    if value >= 0.001:
        return f"{value:.1%}"
    return f"{value:.0e}"


def helped_markdown(documents: Sequence[InspectedDocument], *, count: int = 20) -> str:
    """Format a table of at most ``count`` tokens that the long context helps most, with their probabilities."""
    found: list[tuple[float, InspectedDocument, int]] = []
    for document in documents:
        found += [(lsd, document, index) for lsd, index in document.most_helped(count)]
    found.sort(key=lambda entry: -entry[0])
    rows = []
    for lsd, document, index in found[:count]:
        distance = document.distance(index)
        row = [
            _cut_snippet(document, index),
            probability(float(document.scores.long[index])),
            probability(float(document.scores.short[index])),
            f"{lsd:.2f}",
            "yes" if document.key[index] else "",
            "never" if distance is None else f"{distance:,}",
            escaped(f"{document.name}, token {index:,}"),
        ]
        rows.append(row)
    return as_markdown_table(Table(COLUMNS, rows))


def _cut_snippet(document: InspectedDocument, index: int, before: int = 60, after: int = 20) -> str:
    start, end = document.scores.offsets[index].tolist()
    token = document.text[start:end]
    word = token.strip() or "\N{OPEN BOX}"
    inner = start + len(token) - len(token.lstrip())
    left = document.text[max(inner - before, 0) : inner]
    right = document.text[end : end + after]
    if token.strip():
        right = document.text[start + len(token.rstrip()) : end] + right
    return f"{escaped(left)}**{escaped(word)}**{escaped(right)}"
