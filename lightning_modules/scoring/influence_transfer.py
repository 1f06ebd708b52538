"""LongCE weights of packed sequences from an evaluator, with the same tokenizer or another one; reference losses."""

import json
import logging
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import soft_influence, transfer_influence
from lightning_modules.functional.checks import find_impossible
from lightning_modules.functional.windows import ShortContext, batch_windows
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.short_context import long_and_short
from lightning_modules.models.tokenization.detokenization import TokenCharacters
from lightning_modules.models.tokenization.encoding import encode_text
from lightning_modules.scoring.scored_model import score_text

log = logging.getLogger(__name__)


def compute_influence(batch: PackedBatch, backbone: Scorer, short_context: ShortContext, *, gamma: float) -> Tensor:
    """Compute LongCE weights of packed sequences with an evaluator that has the same tokenizer.

    The batch must be on the evaluator's device. The ``[B, T]`` float32 weights are at most ``gamma``, and 1 for a token
    that is not scored or has no short context; NaN if a log-likelihood is impossible.
    """
    backbone.check_batch(batch)
    if not batch_windows(batch["document_boundaries"], short_context):
        return torch.ones_like(batch["labels"], dtype=torch.float32)
    long, short = long_and_short(backbone, batch, short_context)  # [B, T] each
    weights = soft_influence(long, short, gamma=gamma).float()
    # `gamma` would hide the infinite weight of an impossible pair.
    return weights.masked_fill(find_impossible(long) | find_impossible(short), torch.nan)


@torch.no_grad()
def compute_reference_losses(batch: PackedBatch, backbone: Scorer) -> Tensor:
    """Return ``[B, T]`` float32 negative log-likelihoods of packed sequences, in nats; NaN where they are impossible.

    The batch must be on the model's device.
    """
    backbone.check_batch(batch)
    log_likelihood = backbone(batch)
    return -log_likelihood.float().masked_fill(find_impossible(log_likelihood), torch.nan)


@dataclass(frozen=True)
class InfluenceTransfer:
    """Computes LongCE weights of packed sequences with an evaluator that has another tokenizer (Equation 10).

    ``characters`` turns the sequences' tokens into text for the evaluator's tokenizer.
    """

    characters: TokenCharacters
    tokenizer: PreTrainedTokenizerFast
    add_special_tokens: bool

    def compute_influence(
        self, batch: PackedBatch, backbone: Scorer, short_context: ShortContext, *, gamma: float
    ) -> Tensor:
        """Compute weights like the function `compute_influence`, with lengths in the evaluator's tokens.

        Each document, or the part of it that is in the sequence, is decoded and scored as a text. The weights are
        averaged over the characters of the sequence's tokens. A token without characters (an end-of-text token, bytes
        of an incomplete character) has weight 1.
        """
        influence = torch.ones(batch["labels"].shape, dtype=torch.float32)  # weight of a token without short context
        ids = batch["input_ids"].cpu()
        for row, boundaries in enumerate(batch["document_boundaries"]):
            for start, stop in pairwise(boundaries):
                text, offsets = self.characters.decode_document(ids[row, start:stop])  # offsets: [N, 2]
                if not text.strip():
                    continue
                encoded = encode_text(
                    text, self.tokenizer, name="training text", add_special_tokens=self.add_special_tokens
                )
                if len(encoded.ids) <= short_context.window_length:
                    continue  # no token has a short context
                scores = score_text(
                    text,
                    backbone,
                    self.tokenizer,
                    short_context,
                    add_special_tokens=self.add_special_tokens,
                    name="of the training text",
                )
                if scores.impossible().any():  # NaN, which the caller refuses
                    influence[row, start:stop] = torch.nan
                    continue
                # Equation 10; the transfer gives 0 to a token without characters, which would leave it untrained.
                weights = transfer_influence(scores.soft_influence(gamma=gamma), scores.offsets, offsets)
                weights[offsets[:, 0] == offsets[:, 1]] = 1.0
                influence[row, start:stop] = weights
        return influence


def make_transfer(
    sequences: PreTrainedTokenizerFast, evaluator: PreTrainedTokenizerFast, *, add_special_tokens: bool
) -> InfluenceTransfer | None:
    """Return the transfer from the evaluator's tokens to the sequences', or None if both have the same tokens."""
    if have_same_ids(sequences, evaluator):
        return None
    log.info("The evaluator has another tokenizer: its weights are transferred through the characters.")
    return InfluenceTransfer(TokenCharacters(sequences), evaluator, add_special_tokens=add_special_tokens)


def have_same_ids(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> bool:
    """Return whether two tokenizers give every text the same ids, apart from the special tokens that they add.

    Training sequences consist of ids, so added special tokens, truncation and padding do not matter.
    """
    settings = [json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (one, other)]
    for tokenizer in settings:
        for name in ("post_processor", "truncation", "padding"):
            tokenizer.pop(name, None)
    return settings[0] == settings[1]
