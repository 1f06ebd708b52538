"""Log-likelihoods of documents, with failures kept per document."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_modules.batch import PackedBatch
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.config import ModelConfig
from lightning_modules.models.identity import model_identity
from lightning_modules.models.loading import has_weights
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.short_context import long_and_short
from lightning_modules.scoring.context_lengths import ContextLadder, Rungs
from lightning_modules.scoring.token_scores import TokenScores, text_sha256
from lightning_modules.utilities.identity import content_hash


@dataclass
class Failed:
    """Reason why a document has no scores, in their place."""

    reason: str


@dataclass(frozen=True)
class DocumentScorer:
    """Computes long and short log-likelihoods of documents, and those in other context lengths.

    The scores carry the ``name`` of the model. ``context_length`` and ``stride`` are K and d, in tokens.
    """

    backbone: Backbone
    name: str
    context_length: int
    stride: int
    rungs: Rungs | None = None

    def score(self, batch: PackedBatch, *, beta: float | None = None) -> list[TokenScores]:
        """Score rows of one document each, with ``text`` and ``offsets``; ``beta`` is that of `long_and_short`."""
        ladders: list[dict[int, Tensor]] = [{} for _ in batch["document_boundaries"]]
        with lockstep(self.backbone):
            sizes = {"context_length": self.context_length, "stride": self.stride}
            long, short = long_and_short(self.backbone, batch, **sizes, beta=beta)
            if self.rungs is not None:
                ladders = self.rungs.log_likelihood(self.backbone, batch, long)
        return [
            TokenScores(
                text_sha256=text_sha256(batch["text"][row]),
                evaluator=self.name,
                context_length=self.context_length,
                stride=self.stride,
                token_ids=batch["input_ids"][row, : boundaries[-1]].cpu(),
                offsets=batch["offsets"][row, : boundaries[-1]].cpu(),
                long=long[row, : boundaries[-1]].float().cpu(),
                short=short[row, : boundaries[-1]].float().cpu(),
                floor=-math.inf if beta is None else beta,
                rungs={context: scores.float().cpu() for context, scores in ladders[row].items()},
            )
            for row, boundaries in enumerate(batch["document_boundaries"])
        ]

    def try_to_score(self, batch: PackedBatch) -> list[TokenScores | Failed]:
        """Score like `score`, but let single documents fail: too long for the model or the memory, or not finite.

        All other errors are those of the run.

        Raises:
            RuntimeError: If memory runs out while weights are sharded: the other processes wait for this one's shard.
        """
        results: list[TokenScores | Failed] = [Failed("") for _ in batch["document_boundaries"]]
        fitting = []
        for row, boundaries in enumerate(batch["document_boundaries"]):
            try:
                self.backbone.check_length(boundaries[-1])
                fitting.append(row)
            except ValueError as error:
                results[row] = Failed(str(error))
        with lockstep(self.backbone):  # in which this process takes part even if nothing fits
            if fitting:
                scored = self._in_parts(batch if len(fitting) == len(results) else rows_of(batch, fitting))
                for row, result in zip(fitting, scored, strict=True):
                    results[row] = result if isinstance(result, Failed) else checked(result)
        return results

    def _in_parts(self, batch: PackedBatch) -> list[TokenScores | Failed]:
        """Score all documents at once, or one after the other if memory runs out."""
        rows = len(batch["document_boundaries"])
        try:
            return [*self.score(batch)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self.backbone.is_sharded:
                error.add_note(
                    "Processes with sharded weights cannot skip a document that one of them has no memory for"
                    f" ({_sizes(batch)}): lower `data.max_tokens`, or use more processes."
                )
                raise
        # Only here does the error no longer hold the tensors of the failed pass.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if rows == 1:
            return [Failed(f"out of memory ({_sizes(batch)})")]
        return [self._in_parts(rows_of(batch, [row]))[0] for row in range(rows)]


def rows_of(batch: PackedBatch, rows: Sequence[int]) -> PackedBatch:
    """Return some documents of a batch, padded to the longest of them."""
    width = max(batch["document_boundaries"][row][-1] for row in rows)
    index = torch.tensor(rows, device=batch["input_ids"].device)
    return PackedBatch(
        input_ids=batch["input_ids"][index, :width],
        labels=batch["labels"][index, :width],
        position_ids=batch["position_ids"][index, :width],
        document_boundaries=[batch["document_boundaries"][row] for row in rows],
        text=[batch["text"][row] for row in rows],
        offsets=batch["offsets"][index.to(batch["offsets"].device), :width],
    )


def checked(scores: TokenScores) -> TokenScores | Failed:
    """Return the scores if all are finite, else the failure."""
    parts = torch.cat([scores.long, scores.short, *scores.rungs.values()])
    if (wrong := int((~parts.isfinite()).sum())) == 0:
        return scores
    return Failed(f"{wrong} of {len(parts)} log-likelihoods are not finite ({len(scores.long)} tokens)")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; torch's error for main memory has no separate class."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _sizes(batch: PackedBatch) -> str:
    return " + ".join(str(boundaries[-1]) for boundaries in batch["document_boundaries"]) + " tokens"


def scoring_settings(
    loading: ModelConfig, context_length: int, stride: int, ladder: ContextLadder | None
) -> dict[str, Any]:
    """Return everything except its tokens that a document's scores depend on, as plain values.

    The model need not be loaded yet.
    """
    path = loading.pretrained_model_name_or_path
    if has_weights(path):
        model: str | None = model_identity(loading)
    else:  # random weights, or those of a checkpoint; a config if there is a path
        model = None if path is None else f"sha256:{content_hash(Path(path).expanduser())}"
    names = ("model_config", "context_extension", "dtype", "lora", "quantization")
    return {
        "model": model,
        **{name: getattr(loading, name) for name in names},
        "context_length": context_length,
        "stride": stride,
        "ladder": None if ladder is None else asdict(ladder),
    }
