"""What is drawn after an evaluation: what never changes once, the rest each time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_modules.scoring.key_tokens import Rule, Tokens, find_key_tokens
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.visualization.tensorboard.figures import position_figure
from lightning_modules.visualization.tensorboard.panels import draw_documents, draw_learned, draw_scores
from lightning_modules.visualization.tensorboard.scored_document import ScoredDocument
from lightning_modules.visualization.tensorboard.sums import PositionSums


@dataclass
class InspectedDocument:
    """A validation document with what the model in training says of it.

    Attributes:
        name: How it is cited.
        text: The document.
        scores: Of the model.
        scored: ``[N]`` bool, the tokens of the model that count.
        key: ``[N]`` bool, its key tokens where these are known beforehand; else None, and scores tell them.
        tokens: How the model reads it, for an evaluator's key tokens, if other offsets than those of the scores count.
    """

    name: str
    text: str
    scores: TokenScores
    scored: Tensor
    key: Tensor | None = None
    tokens: Tokens | None = None


class EvaluationPanels:
    """Draws evaluations one after another.

    Args:
        alpha: A key token's long-short difference exceeds it, in nats.
        beta: A key token's long log-likelihood exceeds it, in nats.
        tokens: Shown of each document, at most.
        rule: How key tokens come from an evaluator.
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
            documents: Those that are inspected.
            positions: Losses of the model by context, of all documents.
            judge: Scores of an evaluator by the SHA-256 of the text, of these and other documents; None without one.
            step: Optimizer steps so far.
        """
        judged = [self._judged(document, judge or {}) for document in documents]
        own = [self._own(document, judge or {}) for document in documents]
        keys = [document.scores.text_sha256 for document in documents]
        for key, document in zip(keys, own, strict=True):
            self._first.setdefault(key, (document.long, step))
        learned = [(document, *self._first[key]) for key, document in zip(keys, own, strict=True)]
        shown: Any = {"tokens": self.tokens, "step": step}
        for writer in writers:
            if judge and not set(judge) <= self._drawn:
                scored = [document for document in judged if document is not None]
                draw_documents(writer, scored, scored_by="evaluator", text=True, **shown)
                draw_scores(writer, judge.values(), **self.thresholds, scored_by="evaluator", step=step)
            if documents:
                draw_documents(writer, own, scored_by="model", text=not judge, **shown)
                draw_learned(writer, learned, judged, step=step)
            if documents and not judge:
                scores = (document.scores for document in documents)
                draw_scores(writer, scores, **self.thresholds, scored_by="model", step=step)
            if positions.sums[0].any():
                figure = position_figure(positions, title=f"model in training, step {step:,}")
                writer.add_image("loss_by_context/model_all_documents", figure, step, dataformats="HWC")
        self._drawn |= set(judge or ())

    def _judged(self, document: InspectedDocument, judge: Mapping[str, TokenScores]) -> ScoredDocument | None:
        """As the evaluator sees it."""
        if (scores := judge.get(document.scores.text_sha256)) is None:
            return None
        return _scored_document(document, scores, find_key_tokens(scores, **self.thresholds).mask)

    def _own(self, document: InspectedDocument, judge: Mapping[str, TokenScores]) -> ScoredDocument:
        """As the model sees it, with the key tokens of the evaluator if there is one."""
        scores, key = document.scores, document.key
        if key is None:
            tokens = document.tokens or Tokens(scores.token_ids, scores.offsets)
            if (evaluator := judge.get(scores.text_sha256)) is None:
                key = find_key_tokens(scores, **self.thresholds).mask
            else:
                key = find_key_tokens(evaluator, tokens, **self.thresholds, rule=self.rule).mask
            key = key & document.scored
        return _scored_document(document, scores, key)


def _scored_document(document: InspectedDocument, scores: TokenScores, key: Tensor) -> ScoredDocument:
    return ScoredDocument(document.name, document.text, scores.offsets, scores.long, scores.short, key)
