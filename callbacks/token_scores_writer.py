"""Write the long- and short-context log-likelihoods of every document to a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from typing_extensions import override

from lightning_modules.scoring.token_scores import TokenScores


class TokenScoresWriter(BasePredictionWriter):
    """Writes the scores that ``longce predict`` computes, one file per document, as soon as it is scored.

    Files are named by the hash of the text, so processes never write the same one.

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
        prediction: Sequence[TokenScores],
        batch_indices: Any,
        batch: Any,
        *_: Any,
    ) -> None:
        for scores, text in zip(prediction, batch["text"], strict=True):
            if text:  # sequences without text only keep the processes in lockstep
                scores.save(self.output_dir / f"{scores.text_sha256}.safetensors")
