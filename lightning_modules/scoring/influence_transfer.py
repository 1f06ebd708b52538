"""LongCE weights of packed sequences by an evaluator, with their tokenizer or another one."""

import json
import logging
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import soft_influence, transfer_influence
from lightning_modules.functional.windows import batch_windows
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.short_context import long_and_short
from lightning_modules.models.tokenization.detokenization import TokenCharacters
from lightning_modules.scoring.evaluator import score_text

log = logging.getLogger(__name__)


def row_influence(batch: PackedBatch, backbone: Backbone, *, context_length: int, stride: int, gamma: float) -> Tensor:
    """Compute LongCE weights of packed sequences by a model with the same tokenizer, as LongCE itself does.

    The ``[B, T]`` rows are where the model is. Their ``[B, T]`` float32 weights are at most ``gamma``, and 1 for a
    token that is not scored or has no short context.
    """
    backbone.check_token_ids(batch)
    if not batch_windows(batch["document_boundaries"], context_length=context_length, stride=stride):
        return torch.ones_like(batch["labels"], dtype=torch.float32)
    long, short = long_and_short(backbone, batch, context_length=context_length, stride=stride)
    return soft_influence(long, short, gamma=gamma).float()


@dataclass(frozen=True)
class Transfer:
    """Computes LongCE weights of packed sequences by a model with another tokenizer, through characters (Equation 10).

    ``characters`` turns the rows' tokens into text for the evaluator's tokenizer.
    """

    characters: TokenCharacters
    tokenizer: PreTrainedTokenizerFast
    add_special_tokens: bool

    def row_influence(
        self, batch: PackedBatch, backbone: Backbone, *, context_length: int, stride: int, gamma: float
    ) -> Tensor:
        """Like the function `row_influence`; context length and stride count the evaluator's tokens.

        Each document of a row, or the part of it that is in the row, is decoded, scored as a text and its weights are
        averaged over the characters of the row's tokens. A token without characters (the end of a text, bytes of a
        character that was cut in two) has weight 1.
        """
        influence = torch.ones(batch["labels"].shape, dtype=torch.float32)
        ids = batch["input_ids"].cpu()
        for row, boundaries in enumerate(batch["document_boundaries"]):
            for start, stop in pairwise(boundaries):
                text, offsets = self.characters(ids[row, start:stop])
                if not self._has_short_context(text, context_length + stride):
                    continue
                scores = score_text(
                    text,
                    backbone,
                    self.tokenizer,
                    context_length=context_length,
                    stride=stride,
                    add_special_tokens=self.add_special_tokens,
                    name="of the training text",
                )
                weights = transfer_influence(scores.soft_influence(gamma=gamma), scores.offsets, offsets)
                weights[offsets[:, 0] == offsets[:, 1]] = 1.0
                influence[row, start:stop] = weights
        return influence

    def _has_short_context(self, text: str, window: int) -> bool:
        if not text.strip():
            return False
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=self.add_special_tokens)
        return len(encoding.ids) > window


def make_transfer(
    rows: PreTrainedTokenizerFast, evaluator: PreTrainedTokenizerFast, *, add_special_tokens: bool
) -> Transfer | None:
    """Return how weights get from the evaluator's tokens to those of the rows, or None if the tokens are the same.

    A ``ValueError`` is raised if the tokens of the rows cannot be turned into text.
    """
    if same_ids(rows, evaluator):
        return None
    log.info("The evaluator has another tokenizer: its weights are transferred through the characters.")
    return Transfer(TokenCharacters(rows), evaluator, add_special_tokens=add_special_tokens)


def same_ids(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> bool:
    """Whether two tokenizers turn every text into the same ids, leaving aside the special tokens they may add to it.

    Rows are ids already: what a tokenizer would put around a text, or where it would cut it, changes none of them.
    """
    parts = [json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (one, other)]
    for part in parts:
        for name in ("post_processor", "truncation", "padding"):
            part.pop(name, None)
    return parts[0] == parts[1]
