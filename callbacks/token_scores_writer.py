"""Write predictions as files: the pair of log-likelihoods of every document."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from typing_extensions import override

from lightning_modules.scoring.document_scorer import Failed
from lightning_modules.scoring.token_scores import TokenScores

_BEGINNING = 40  # characters by which a message names a document

_log = logging.getLogger(__name__)


class TokenScoresWriter(BasePredictionWriter):
    """Writes the scores that ``longce predict`` computes, one file per document as soon as it is done.

    Files are named by the hash of the text, so that processes never write the same one. The log names documents of a
    corpus that cannot be scored; `DocumentScoresWriter` also counts them, and ends with exit status 1 above a limit.

    Args:
        output_dir: Folder of the ``<hash of the text>.safetensors`` files; made if needed.
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
                _log.warning("A document beginning with %r has no scores: %s.", text[:_BEGINNING], scores.reason)
            elif text:  # rows without text only keep the processes in step
                scores.save(self.output_dir / f"{scores.text_sha256}.safetensors")
