"""Long and short log-likelihoods of documents; a document that fails does not stop the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_modules.batch import PackedBatch
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.served.dialects import AnswerError
from lightning_modules.models.short_context import long_and_short
from lightning_modules.scoring.context_lengths import ContextLengths
from lightning_modules.scoring.token_scores import TokenScores, scores_of_row


@dataclass
class Failed:
    """Result of a document that could not be scored, with the reason."""

    reason: str


@dataclass(frozen=True)
class DocumentScorer:
    """Scores documents in long and short contexts, and optionally in several context lengths.

    ``name`` identifies the model in the scores.
    """

    backbone: Scorer
    name: str
    short_context: ShortContext
    context_lengths: ContextLengths | None = None

    def score(self, batch: PackedBatch, *, beta: float | None = None) -> list[TokenScores]:
        """Score a batch with one document per sequence, ``text`` and ``offsets``; for ``beta`` see `long_and_short`."""
        ladders: list[dict[int, Tensor]] = [{} for _ in batch["document_boundaries"]]
        # One block for all passes: a process whose documents need fewer passes makes up for them once, at its end.
        with lockstep(self.backbone):
            long, short = long_and_short(self.backbone, batch, self.short_context, beta=beta)  # [B, T] each, in nats
            if self.context_lengths is not None:
                ladders = self.context_lengths.log_likelihood(self.backbone, batch, long)
        # Scores leave the accelerator here, or those of a corpus would fill it.
        fields: dict[str, Any] = {
            "evaluator": self.name,
            "context_length": self.short_context.context_length,
            "stride": self.short_context.stride,
            "floor": -math.inf if beta is None else beta,
        }
        in_contexts = [{context: scores.float().cpu() for context, scores in ladder.items()} for ladder in ladders]
        return [
            scores_of_row(batch, row, long[row], short[row], context_scores=context_scores, **fields)
            for row, context_scores in enumerate(in_contexts)
        ]

    def try_to_score(self, batch: PackedBatch) -> list[TokenScores | Failed]:
        """Score documents like `score`, but return `Failed` for those that are too long or not finite.

        A document is too long if it exceeds the model's positions or the memory. A document that a server refuses has
        failed as well. Other errors are raised.
        """
        # 1. Leave out documents that are longer than the model's positions.
        results: list[TokenScores | Failed] = [Failed("") for _ in batch["document_boundaries"]]
        fitting = []
        for row, boundaries in enumerate(batch["document_boundaries"]):
            try:
                self.backbone.check_length(boundaries[-1])
                fitting.append(row)
            except ValueError as error:
                results[row] = Failed(str(error))
        if not fitting:
            return results
        # 2. Score the others.
        scored = self._score_or_split(batch if len(fitting) == len(results) else select_rows(batch, fitting))
        # 3. A log-likelihood of NaN or infinity must not reach a file: the document has failed instead.
        for row, result in zip(fitting, scored, strict=True):
            results[row] = result if isinstance(result, Failed) else check_possible(result)
        return results

    def _score_or_split(self, batch: PackedBatch) -> list[TokenScores | Failed]:
        """Score all documents at once, or in halves if memory runs out or a server refuses one of them."""
        rows = len(batch["document_boundaries"])
        reason = f"out of memory ({_format_lengths(batch)})"
        try:
            return [*self.score(batch)]
        except AnswerError as error:
            reason = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # After the `except` block, the error no longer keeps the tensors of the failed pass alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if rows == 1:  # cannot be split further
            return [Failed(reason)]
        halves = (range(rows // 2), range(rows // 2, rows))
        return [result for half in halves for result in self._score_or_split(select_rows(batch, half))]


def select_rows(batch: PackedBatch, rows: Sequence[int]) -> PackedBatch:
    """Return the documents of these rows, padded to the longest of them."""
    # Padding is on the right, so a row's tokens keep their places.
    width = max(batch["document_boundaries"][row][-1] for row in rows)
    index = torch.tensor(rows, device=batch["input_ids"].device)
    return PackedBatch(
        input_ids=batch["input_ids"][index, :width],
        labels=batch["labels"][index, :width],
        position_ids=batch["position_ids"][index, :width],
        document_boundaries=[batch["document_boundaries"][row] for row in rows],
        scored=batch["scored"][list(rows), :width],
        text=[batch["text"][row] for row in rows],
        # Offsets stay in main memory.
        offsets=batch["offsets"][index.to(batch["offsets"].device), :width],
    )


def check_possible(scores: TokenScores) -> TokenScores | Failed:
    """Return the scores if all are possible log-likelihoods, and `Failed` otherwise."""
    wrong = scores.impossible()  # [N] bool
    if not wrong.any():
        return scores
    token = int(wrong.nonzero()[0])
    return Failed(
        f"{int(wrong.sum())} of {len(wrong)} log-likelihoods are not finite or above 0, first that of token {token}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out; torch has no error class for main memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _format_lengths(batch: PackedBatch) -> str:
    return " + ".join(str(boundaries[-1]) for boundaries in batch["document_boundaries"]) + " tokens"
