"""Panels of TensorBoard: which text, figures and histograms are written, and under which tags."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_modules.functional import key_token_mask
from lightning_modules.scoring.config import Rule
from lightning_modules.scoring.key_tokens import Tokens, find_key_tokens
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.visualization.tensorboard.figures import benefit_figure, position_figure
from lightning_modules.visualization.tensorboard.markdown import excerpts_markdown, helped_markdown, learned_markdown
from lightning_modules.visualization.tensorboard.scored_document import ScoredDocument
from lightning_modules.visualization.tensorboard.sums import BenefitCounts, PositionSums

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
"""Layout for ``SummaryWriter.add_custom_scalars``: LongPPL beside perplexity. Charts without a curve stay empty."""


@dataclass
class InspectedDocument:
    """A validation document with its scores by the model in training.

    Attributes:
        name: Name of the document.
        text: Text of the document.
        scores: Scores of the model in training.
        scored: ``[N]`` bool, the model's tokens that count.
        key: ``[N]`` bool, its key tokens if they are known beforehand; None to find them from scores.
        tokens: The model's tokens and offsets for the evaluator's key tokens, if they differ from those of the scores.
    """

    name: str
    text: str
    scores: TokenScores
    scored: Tensor
    key: Tensor | None = None
    tokens: Tokens | None = None

    def with_key_tokens(self, scores: TokenScores, key: Tensor) -> ScoredDocument:
        """Return the document with one model's scores and key tokens."""
        return ScoredDocument(self.name, self.text, scores.offsets, scores.long, scores.short, key)


class EvaluationPanels:
    """Writes the panels of one evaluation after another.

    Key tokens exceed ``alpha`` (LSD) and ``beta`` (LCL), in nats; ``rule`` moves an evaluator's to the model's tokens.
    At most ``tokens`` tokens of each document are shown.
    """

    def __init__(self, *, alpha: float, beta: float, tokens: int, rule: Rule = "paper") -> None:
        self.rule: Rule = rule
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
        judge: Mapping[str, TokenScores] | None,
        step: int,
    ) -> None:
        """Write all panels of an evaluation.

        Args:
            writers: ``SummaryWriter`` of each folder of events.
            documents: The inspected documents.
            positions: The model's losses by context length, over all documents.
            judge: Evaluator scores by the SHA-256 of the text, of these and other documents; None without an evaluator.
            step: Optimizer steps so far.
        """
        by_evaluator = [self._by_evaluator(document, judge or {}) for document in documents]
        by_model = [self._by_model(document, judge or {}) for document in documents]
        keys = [document.scores.text_sha256 for document in documents]
        for key, document in zip(keys, by_model, strict=True):
            self._first.setdefault(key, (document.long, step))
        first = [self._first[key] for key in keys]
        for writer in writers:
            if judge and not set(judge) <= self._drawn:  # an evaluator's scores never change: drawn once
                scored = [document for document in by_evaluator if document is not None]
                self._draw_documents(writer, scored, scored_by="evaluator", step=step)
                draw_scores(writer, judge.values(), **self.thresholds, scored_by="evaluator", step=step)
            if documents:
                self._draw_documents(writer, by_model, scored_by="model", step=step)
                draw_learned(writer, by_model, first, by_evaluator, step=step)
            if documents and not judge:
                scores = (document.scores for document in documents)
                draw_scores(writer, scores, **self.thresholds, scored_by="model", step=step)
            if positions.sums[0].any():
                figure = position_figure(positions, title=f"model in training, step {step:,}")
                writer.add_image("loss_by_context/model_all_documents", figure, step, dataformats="HWC")
        self._drawn |= set(judge or ())

    def _by_evaluator(self, document: InspectedDocument, judge: Mapping[str, TokenScores]) -> ScoredDocument | None:
        if (scores := judge.get(document.scores.text_sha256)) is None:
            return None
        return document.with_key_tokens(scores, find_key_tokens(scores, **self.thresholds).mask)

    def _by_model(self, document: InspectedDocument, judge: Mapping[str, TokenScores]) -> ScoredDocument:
        """Return the document with the model's scores, and with the evaluator's key tokens if there is an evaluator."""
        scores, key = document.scores, document.key
        if key is None:
            if (evaluator := judge.get(scores.text_sha256)) is None:
                found = find_key_tokens(scores, **self.thresholds)
            else:
                tokens = document.tokens or Tokens(scores.token_ids, scores.offsets)
                found = find_key_tokens(evaluator, tokens, **self.thresholds, rule=self.rule)
            key = found.mask & document.scored
        return document.with_key_tokens(scores, key)

    def _draw_documents(self, writer: Any, documents: Sequence[ScoredDocument], *, scored_by: str, step: int) -> None:
        for number, document in enumerate(documents):
            key_tokens = f"{int(document.key.sum())} key tokens of {len(document.key):,}"
            title = f"{document.name}: {key_tokens}; by the {scored_by}"
            markdown = excerpts_markdown(document, tokens=self.tokens, title=title)
            writer.add_text(f"key_tokens/{slug(document, number)}/{scored_by}", markdown, step)
        writer.add_text(f"most_helped_tokens/{scored_by}", helped_markdown(documents), step)


def draw_learned(
    writer: Any,
    documents: Sequence[ScoredDocument],
    first: Sequence[tuple[Tensor, int]],
    judged: Sequence[ScoredDocument | None],
    *,
    step: int,
) -> None:
    """Write how likely the model finds key tokens now, and at the step of the first ``[N]`` log-likelihoods."""
    for number, (document, (long, then), judge) in enumerate(zip(documents, first, judged, strict=True)):
        table = learned_markdown(document, long, then=then, judge=judge)
        writer.add_text(f"key_tokens/{slug(document, number)}/learned", table, step)
    values = torch.cat([document.long[document.key] for document in documents])
    if len(values):
        writer.add_histogram("key_tokens/model_log_likelihood_nats", values, step)


def draw_scores(
    writer: Any, scores: Iterable[TokenScores], *, alpha: float, beta: float, scored_by: str, step: int
) -> None:
    """Draw the density of LSD and LCL over all documents of a model, and their loss by context length."""
    benefit, positions, documents = BenefitCounts(), PositionSums(3), 0
    for pair in scores:
        long, short = pair.long[1:], pair.short[1:]  # the first token has no context
        key = key_token_mask(long, short, alpha=alpha, beta=beta)
        benefit.add(long, short)
        positions.add(torch.arange(1, len(long) + 1), -long, -short, key)
        documents += 1
    title = f"{scored_by}, {documents:,} documents"
    if benefit.counts.any():
        figure = benefit_figure(benefit, alpha=alpha, beta=beta, title=title)
        writer.add_image(f"lsd_and_lcl/{scored_by}", figure, step, dataformats="HWC")
    if positions.sums[0].any():
        figure = position_figure(positions, title=title, short=1, key_share=2)
        writer.add_image(f"loss_by_context/{scored_by}", figure, step, dataformats="HWC")


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
