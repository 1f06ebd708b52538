"""TensorBoard panels: the text, figures and histograms of an evaluation, and their tags."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_modules.scoring.evaluator import EvaluatedDocument
from lightning_modules.scoring.key_tokens import evaluator_key_tokens
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.visualization.tensorboard.documents import ScoredDocument, helped_markdown
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


class EvaluationPanels:
    """Writer of the panels of successive evaluations.

    The model's own key tokens exceed ``alpha`` (LSD) and ``beta`` (LCL), in nats, unless they are ``precomputed``.
    """

    def __init__(self, *, alpha: float, beta: float, precomputed: bool = False) -> None:
        self.precomputed = precomputed
        self.thresholds: Any = {"alpha": alpha, "beta": beta}
        self._drawn: set[str] = set()

    def draw(
        self,
        writers: Sequence[Any],
        documents: Sequence[ScoredDocument],
        positions: PositionSums,
        *,
        evaluated: Mapping[str, EvaluatedDocument],
        step: int,
    ) -> None:
        """Write all panels of an evaluation after ``step`` optimizer steps to each ``SummaryWriter``.

        ``documents`` have the model's scores, and mark all scored tokens unless key tokens are precomputed.
        ``positions`` has the model's losses over all documents, ``evaluated`` the evaluator's by SHA-256 of texts.
        """
        pairs = [(document, evaluated.get(document.scores.text_sha256)) for document in documents]
        by_model = [document._replace(key=self._find_key(document, found)) for document, found in pairs]
        by_evaluator = [
            document._replace(scores=found.scores, key=self._key_tokens(found.scores))
            for document, found in pairs
            if found is not None
        ]
        for writer in writers:
            if not set(evaluated) <= self._drawn:  # draw an evaluator's scores once, because they never change
                writer.add_text("most_helped_tokens/evaluator", helped_markdown(by_evaluator), step)
                self._draw_scores(writer, [found.scores for found in evaluated.values()], "evaluator", step)
            if documents:
                writer.add_text("most_helped_tokens/model", helped_markdown(by_model), step)
                values = torch.cat([document.scores.long[document.key] for document in by_model])
                if len(values):
                    writer.add_histogram("key_tokens/model_log_likelihood_nats", values, step)
            if documents and not evaluated:
                self._draw_scores(writer, [document.scores for document in documents], "model", step)
            if positions.sums[0].any():
                figure = position_figure(positions, title=f"trained model, step {step:,}")
                writer.add_figure("loss_by_context/model_all_documents", figure, step, close=False)
        self._drawn |= set(evaluated)

    def _key_tokens(self, scores: TokenScores) -> Tensor:
        return evaluator_key_tokens(scores, **self.thresholds)

    def _find_key(self, document: ScoredDocument, found: EvaluatedDocument | None) -> Tensor:
        """Return the evaluator's key tokens, or the model's own without an evaluator."""
        if self.precomputed:
            return document.key
        return document.key & (self._key_tokens(document.scores) if found is None else found.key)

    def _draw_scores(self, writer: Any, documents: Sequence[TokenScores], scored_by: str, step: int) -> None:
        """Draw the density of LSD and LCL over all documents of a model, and their loss by context length."""
        long, short = (torch.cat([getattr(s, name)[1:] for s in documents]) for name in ("long", "short"))
        positions = PositionSums(3)
        key = torch.cat([self._key_tokens(s)[1:] for s in documents])
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
