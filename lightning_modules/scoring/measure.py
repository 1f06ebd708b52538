"""Measure a document: sums of a model's log-likelihoods over its tokens and the key tokens of an evaluator."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional.text_bits import text_bits
from lightning_modules.scoring.key_tokens import (
    Tokens,
    count_coverage,
    document_tokens,
    find_key_tokens,
    transfer_soft_influence,
)
from lightning_modules.scoring.records import Definition, Record, Source, Sums
from lightning_modules.scoring.token_scores import TokenScores, text_sha256


class Document(NamedTuple):
    """A text in the tokens of the evaluated model."""

    name: str
    text: str
    tokens: Tokens
    scored: Tensor  # [N] bool, the tokens that have a log-likelihood
    set: str = ""  # validation set
    special_tokens: bool = False  # whether the tokenizer added special tokens

    @classmethod
    def of_row(cls, batch: PackedBatch, row: int = 0) -> "Document":
        """Return the one document of a sequence, without padding, in main memory."""
        tokens = document_tokens(batch, row)
        scored = batch["labels"][row, : len(tokens.ids)].ne(IGNORE_INDEX).cpu()
        set_name = batch["sets"][row] if "sets" in batch else ""
        special = batch["special_tokens"][row] if "special_tokens" in batch else False
        return cls(batch["names"][row], batch["text"][row], tokens, scored, set_name, special)


class EvaluatedDocument(NamedTuple):
    """A document that an evaluator has scored, in the tokens of the evaluated model."""

    scores: TokenScores
    tokens: Tokens


def measure(
    document: Document,
    log_likelihood: Tensor,
    found_by: TokenScores | Tensor,
    definitions: Mapping[str, Definition],
    *,
    model: Source,
    evaluator: Source,
) -> list[Record]:
    """Measure a document, once for each definition of a key token.

    Args:
        document: The text in the model's N tokens.
        log_likelihood: ``[N]`` log-likelihoods of its tokens by the model in nats: all possible, or all NaN for a model
            that has diverged. Those of tokens that are not scored do not count.
        found_by: Source of the key tokens: the evaluator's scores of the text, or ``[M, 2]`` precomputed character
            spans.
        definitions: Definitions by the names of their thresholds.
        model: Identity of the model.
        evaluator: Identity of the evaluator, or of the precomputed spans.
    """
    nll = -log_likelihood.detach().cpu().double()
    scores = found_by if isinstance(found_by, TokenScores) else None
    # 1. Sums that do not depend on the definition.
    about_text = Sums(
        documents=1,
        characters=len(document.text),
        tokens=int(document.scored.sum()),
        unscored=int((~document.scored).sum()),
        nll=_sum(nll, document.scored),
    )
    coverage = count_coverage(document.tokens.offsets)
    evaluator_coverage = None if scores is None else count_coverage(scores.offsets)
    records = []
    for label, definition in definitions.items():
        # 2. The key tokens of the model, and the spans of those of the evaluator.
        key_tokens = find_key_tokens(
            found_by,
            document.tokens,
            alpha=definition.alpha,
            beta=definition.beta,
            rule=definition.key_token_rule,
        )
        key = key_tokens.mask & document.scored
        bits = text_bits(
            document.text,
            log_likelihood.detach().cpu(),
            document.tokens.offsets,
            document.scored,
            key_tokens.spans,
            None if scores is None else scores.offsets,
        )
        # 3. Their sums.
        sums = about_text._replace(
            without_key_tokens=int(not key.any()),
            by_characters=int(key_tokens.alignment != "tokens"),
            key_tokens=int(key.sum()),
            key_nll=_sum(nll, key),
            bytes=bits.bytes,
            key_bytes=bits.key_bytes,
            key_bits=bits.key_bits,
            crossing_bits=bits.crossing_bits,
            evaluator_key_tokens=bits.evaluator_key_tokens,
            text_tokens=coverage.tokens,
            sharing_characters=coverage.sharing,
            without_characters=coverage.without,
        )
        if evaluator_coverage is not None:
            sums = sums._replace(
                evaluator_tokens=evaluator_coverage.tokens,
                evaluator_sharing_characters=evaluator_coverage.sharing,
                evaluator_without_characters=evaluator_coverage.without,
            )
        # Scores down to beta only are not enough for the influence of every token.
        if scores is not None and scores.floor == -math.inf:
            soft = transfer_soft_influence(scores, document.tokens, gamma=definition.gamma) * document.scored
            sums = sums._replace(soft_weight=float(soft.sum()), soft_nll=_sum(nll, soft))
        records.append(
            Record(
                document=document.name,
                text_sha256=text_sha256(document.text),
                model=model,
                evaluator=evaluator,
                definition=definition,
                alignment=key_tokens.alignment,
                sums=sums,
                set=document.set,
                thresholds_label=label,
            )
        )
    return records


def _sum(nll: Tensor, weight: Tensor) -> float:
    """Return a weighted sum, in which a token of weight 0 does not count even if it is not finite."""
    return float(torch.where(weight != 0, nll * weight, 0.0).sum())
