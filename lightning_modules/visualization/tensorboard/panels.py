"""TensorBoard panels: the text, figures and histograms of an evaluation, and their tags."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_modules.scoring.evaluator import EvaluatedDocument
from lightning_modules.scoring.key_tokens import evaluator_key_tokens
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.visualization.tensorboard.documents import (
    ScoredDocument,
    excerpts_markdown,
    helped_markdown,
    learned_markdown,
)
from lightning_modules.visualization.tensorboard.figures import benefit_figure, position_figure
from lightning_modules.visualization.tensorboard.sums import PositionSums

CUSTOM_SCALARS = {
    "validation": {
        "LongPPL (key tokens)": ["Multiline", ["^val/longppl$"]],
        "perplexity (all tokens)": ["Multiline", ["^val/perplexity$"]],
        "soft LongPPL (all tokens, weighted)": ["Multiline", ["^val/longppl_soft$"]],
    },
    "training": {
        "loss": ["Multiline", ["^train/loss$"]],
        "weights: mean": ["Multiline", ["^train/weight_mean$"]],
        "weights: shares of tokens": ["Multiline", ["^train/weight_(above_1|at_cap|effective_share)$"]],
    },
    "tasks": {"average by length": ["Multiline", ["^tasks/average/.*$"]]},
    "test": {
        "LongPPL (key tokens), test": ["Multiline", ["^test/longppl$"]],
        "perplexity (all tokens), test": ["Multiline", ["^test/perplexity$"]],
        "soft LongPPL, test": ["Multiline", ["^test/longppl_soft$"]],
    },
}
"""Layout for ``SummaryWriter.add_custom_scalars``: LongPPL next to perplexity. Charts without data stay empty."""


@dataclass
class InspectedDocument:
    """Validation document with the trained model's scores.

    ``scored`` marks the ``[N]`` tokens that count, ``key`` the key tokens if they are precomputed.
    """

    name: str
    text: str
    scores: TokenScores
    scored: Tensor
    key: Tensor | None = None


class EvaluationPanels:
    """Writer of the panels of successive evaluations, with at most ``tokens`` tokens of each document.

    The model's own key tokens exceed ``alpha`` (LSD) and ``beta`` (LCL), in nats.
    """

    def __init__(self, *, alpha: float, beta: float, tokens: int) -> None:
        self.thresholds: Any = {"alpha": alpha, "beta": beta}
        self.tokens = tokens
        self._first: dict[str, tuple[Tensor, int]] = {}
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

        ``positions`` has the model's losses over all documents, ``evaluated`` the evaluator's by SHA-256 of texts.
        """
        by_evaluator = [self._by_evaluator(document, evaluated) for document in documents]
        by_model = [self._by_model(document, evaluated) for document in documents]
        for document in documents:
            self._first.setdefault(document.scores.text_sha256, (document.scores.long, step))
        for writer in writers:
            if not set(evaluated) <= self._drawn:  # draw an evaluator's scores once, because they never change
                self._draw_documents(writer, [document for document in by_evaluator if document], "evaluator", step)
                self._draw_scores(writer, [found.scores for found in evaluated.values()], "evaluator", step)
            if documents:
                self._draw_documents(writer, by_model, "model", step)
                self._draw_learned(writer, by_model, step)
            if documents and not evaluated:
                self._draw_scores(writer, [document.scores for document in documents], "model", step)
            if positions.sums[0].any():
                figure = position_figure(positions, title=f"trained model, step {step:,}")
                writer.add_figure("loss_by_context/model_all_documents", figure, step, close=False)
        self._drawn |= set(evaluated)

    def _by_evaluator(
        self, document: InspectedDocument, evaluated: Mapping[str, EvaluatedDocument]
    ) -> ScoredDocument | None:
        if (found := evaluated.get(document.scores.text_sha256)) is None:
            return None
        key = evaluator_key_tokens(found.scores, **self.thresholds)
        return ScoredDocument(document.name, document.text, found.scores, key)

    def _by_model(self, document: InspectedDocument, evaluated: Mapping[str, EvaluatedDocument]) -> ScoredDocument:
        """Return the document with the model's scores, and with the evaluator's key tokens if there is an evaluator."""
        key, found = document.key, evaluated.get(document.scores.text_sha256)
        if key is None:
            key = evaluator_key_tokens(document.scores, **self.thresholds) if found is None else found.key
        return ScoredDocument(document.name, document.text, document.scores, key & document.scored)

    def _draw_documents(self, writer: Any, documents: Sequence[ScoredDocument], scored_by: str, step: int) -> None:
        for number, document in enumerate(documents):
            key_tokens = f"{int(document.key.sum())} key tokens of {len(document.key):,}"
            title = f"{document.name}: {key_tokens}; by the {scored_by}"
            markdown = excerpts_markdown(document, tokens=self.tokens, title=title)
            writer.add_text(f"key_tokens/{slug(document, number)}/{scored_by}", markdown, step)
        writer.add_text(f"most_helped_tokens/{scored_by}", helped_markdown(documents), step)

    def _draw_learned(self, writer: Any, documents: Sequence[ScoredDocument], step: int) -> None:
        """Write the likelihood of key tokens now and when the model first scored the document."""
        for number, document in enumerate(documents):
            long, then = self._first[document.scores.text_sha256]
            table = learned_markdown(document, long, then=then)
            writer.add_text(f"key_tokens/{slug(document, number)}/learned", table, step)
        values = torch.cat([document.scores.long[document.key] for document in documents])
        if len(values):
            writer.add_histogram("key_tokens/model_log_likelihood_nats", values, step)

    def _draw_scores(self, writer: Any, documents: Sequence[TokenScores], scored_by: str, step: int) -> None:
        """Draw the density of LSD and LCL over all documents of a model, and their loss by context length."""
        long, short = (torch.cat([getattr(s, name)[1:] for s in documents]) for name in ("long", "short"))
        positions = PositionSums(3)
        key = torch.cat([evaluator_key_tokens(s, **self.thresholds)[1:] for s in documents])
        positions.add(torch.cat([torch.arange(1, len(s.long)) for s in documents]), -long, -short, key)
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
        bins = "tensorflow" if cap is None or weights.min() < 0 else torch.linspace(0, cap * 1.0001, 51).tolist()
        writer.add_histogram("train/token_weights", weights, step, bins=bins)
    if len(differences):
        writer.add_histogram("train/lsd_nats", differences, step)


def slug(document: ScoredDocument, number: int) -> str:
    """Return the part of a tag that names a document."""
    return f"{number}_{re.sub(r'[^-.A-Za-z0-9]+', '_', document.name)[:40]}"
