"""Documents to log-likelihoods, and what becomes of a document for which that fails."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.batch import PackedBatch, unscored_token
from lightning_modules.models.backbone import Backbone
from lightning_modules.scoring.context_lengths import Rungs
from lightning_modules.scoring.token_scores import TokenScores, text_sha256


@dataclass
class Failed:
    """In the place of a document's scores, why there are none."""

    reason: str


@dataclass(frozen=True)
class DocumentScorer:
    """Long and short log-likelihoods of documents under one model, and those of a context ladder.

    Args:
        backbone: The model.
        name: Of the model, as scores cite it.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one short window.
        rungs: Of a context ladder, if there is one.
    """

    backbone: Backbone
    name: str
    context_length: int
    stride: int
    rungs: Rungs | None = None

    def score(self, batch: PackedBatch) -> list[TokenScores]:
        """Score rows of one document each, with ``text`` and ``offsets``."""
        long, short = self.backbone.long_and_short(batch, context_length=self.context_length, stride=self.stride)
        ladders: list[dict[int, Tensor]] = [{} for _ in batch["document_borders"]]
        if self.rungs is not None:
            ladders = self.rungs.log_likelihood(self.backbone, batch, long)
        return [
            TokenScores(
                text_sha256=text_sha256(batch["text"][row]),
                evaluator=self.name,
                context_length=self.context_length,
                stride=self.stride,
                token_ids=batch["input_ids"][row, : borders[-1]].cpu(),
                offsets=batch["offsets"][row, : borders[-1]].cpu(),
                long=long[row, : borders[-1]].float().cpu(),
                short=short[row, : borders[-1]].float().cpu(),
                rungs={context: scores.float().cpu() for context, scores in ladders[row].items()},
            )
            for row, borders in enumerate(batch["document_borders"])
        ]

    def try_to_score(self, batch: PackedBatch) -> list[TokenScores | Failed]:
        """`score`, but a document that has more tokens than the model bears or memory holds fails by itself.

        So does one with a log-likelihood that is not finite. All other errors are those of the run.

        Raises:
            RuntimeError: If memory runs out while weights are divided among processes, as all others wait for this
                one's part in them.
        """
        results: list[TokenScores | Failed] = [Failed("") for _ in batch["document_borders"]]
        fitting = []
        for row, borders in enumerate(batch["document_borders"]):
            try:
                self.backbone.check_length(borders[-1])
                fitting.append(row)
            except ValueError as error:
                results[row] = Failed(str(error))
        if not fitting:
            self._accompany()
            return results
        scored = self._in_parts(batch if len(fitting) == len(results) else rows_of(batch, fitting))
        for row, result in zip(fitting, scored, strict=True):
            results[row] = result if isinstance(result, Failed) else checked(result)
        return results

    def _in_parts(self, batch: PackedBatch) -> list[TokenScores | Failed]:
        """Score all at once, or one after the other if there is too little memory for that."""
        rows = len(batch["document_borders"])
        try:
            return [*self.score(batch)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self.backbone.in_step:
                error.add_note(
                    "Processes that divide the weights among them cannot leave out a document that one of them has no"
                    f" memory for ({_sizes(batch)}): lower `data.max_tokens`, or have more processes."
                )
                raise
        # Not before here, where nothing that the failed pass held is held by the error any more.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if rows == 1:
            return [Failed(f"out of memory ({_sizes(batch)})")]
        return [self._in_parts(rows_of(batch, [row]))[0] for row in range(rows)]

    def _accompany(self) -> None:
        """Make the passes that other processes wait for, if any do."""
        if self.backbone.in_step:
            batch = unscored_token(self.backbone.device)
            long, _ = self.backbone.long_and_short(batch, context_length=self.context_length, stride=self.stride)
            if self.rungs is not None:
                self.rungs.log_likelihood(self.backbone, batch, long)


def rows_of(batch: PackedBatch, rows: Sequence[int]) -> PackedBatch:
    """Some rows of a batch of documents, no wider than the longest of them."""
    width = max(batch["document_borders"][row][-1] for row in rows)
    index = torch.tensor(rows, device=batch["input_ids"].device)
    return PackedBatch(
        input_ids=batch["input_ids"][index, :width],
        labels=batch["labels"][index, :width],
        position_ids=batch["position_ids"][index, :width],
        document_borders=[batch["document_borders"][row] for row in rows],
        text=[batch["text"][row] for row in rows],
        offsets=batch["offsets"][index.to(batch["offsets"].device), :width],
    )


def checked(scores: TokenScores) -> TokenScores | Failed:
    """The scores, if all are finite."""
    parts = torch.cat([scores.long, scores.short, *scores.rungs.values()])
    if (wrong := int((~parts.isfinite()).sum())) == 0:
        return scores
    return Failed(f"{wrong} of {len(parts)} log-likelihoods are not finite ({len(scores.long)} tokens)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of which torch's for main memory has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _sizes(batch: PackedBatch) -> str:
    return " + ".join(str(borders[-1]) for borders in batch["document_borders"]) + " tokens"
