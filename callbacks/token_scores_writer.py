"""Write the long- and short-context log-likelihoods of every document to a file."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from typing_extensions import override

from lightning_modules.scoring.document_scorer import Failed
from lightning_modules.scoring.token_scores import TokenScores

_NAME_CHARACTERS = 40  # of the text, by which a message identifies a document

_log = logging.getLogger(__name__)


class TokenScoresWriter(BasePredictionWriter):
    """Writes the scores that ``longce predict`` computes, one file per document, as soon as it is scored.

    Files are named by the hash of the text, so processes never write the same one. Documents that cannot be scored are
    logged; `DocumentScoresWriter` also counts them, and ends with exit status 1 above a limit.

    Args:
        output_dir: Folder for the ``<hash of the text>.safetensors`` files; created if needed.
    """

    def __init__(self, output_dir: str) -> None:
        super().__init__(write_interval="batch")
        self.output_dir = Path(output_dir)

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Sequence[TokenScores | Failed],
        batch_indices: Any,
        batch: Any,
        *_: Any,
    ) -> None:
        for ref in batch.get("failed", []):
            _log.warning("'%s' has no scores: %s", ref.key, ref.error)
        for scores, text in zip(prediction, batch["text"], strict=True):
            if isinstance(scores, Failed):
                _log.warning("The document %r.. has no scores: %s.", text[:_NAME_CHARACTERS], scores.reason)
            elif text:  # sequences without text only keep the processes in lockstep
                scores.save(self.output_dir / f"{scores.text_sha256}.safetensors")
