"""The definition of a key token that all commands share.

Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, defines the key tokens of the evaluator. They are
transferred to an evaluated model as follows:

1. If both models have the same tokens at the same characters, the key tokens are the same.
2. Otherwise the evaluator's key tokens become character spans, and a token is key if it lies entirely inside one
   (Equation 9). Tokens that share a character form one unit on both sides: they are key together or not at all, decided
   by the sum of their log-likelihoods.

The rule ``authors`` always uses spans, exactly as the package `longppl` 0.3.0 does.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import (
    character_units,
    key_token_mask,
    merge_spans,
    merge_touching_spans,
    scan_token_mask,
    span_token_mask,
    transfer_influence,
    unit_spans,
)
from lightning_modules.scoring.config import KeyTokenRule
from lightning_modules.scoring.token_scores import TokenScores

Alignment = Literal["tokens", "characters", "authors"]
"""How key tokens were transferred from the evaluator's tokens to those of the evaluated model."""

NOTABLE_FRACTION = 0.01
"""Fraction of tokens that share characters or cover none above which a warning reports them."""


class Tokens(NamedTuple):
    """Tokens of a document for one model."""

    ids: Tensor  # [N] int64 token ids
    offsets: Tensor  # [N, 2] int64 character span of each token


class KeyTokens(NamedTuple):
    """Key tokens of an evaluated model."""

    mask: Tensor  # [N] bool
    alignment: Alignment  # how they were transferred from the evaluator's tokens


class Coverage(NamedTuple):
    """Counts of how tokens cover the characters of documents, without the special tokens around a text."""

    by_characters: int = 0  # documents whose key tokens were transferred through characters
    tokens: int = 0  # tokens of the model
    sharing: int = 0  # .. that share a character with another token
    without: int = 0  # .. without characters
    evaluator_tokens: int = 0  # tokens of the evaluator; 0 if unknown
    evaluator_sharing: int = 0  # .. that share a character with another token
    evaluator_without: int = 0  # .. without characters

    def fractions(self) -> dict[str, float]:
        """Return the fractions of tokens of each kind, by their names in results."""
        fractions = {
            "tokens_sharing_characters": self.sharing / max(self.tokens, 1),
            "tokens_without_characters": self.without / max(self.tokens, 1),
        }
        if self.evaluator_tokens:
            fractions["evaluator_tokens_sharing_characters"] = self.evaluator_sharing / self.evaluator_tokens
            fractions["evaluator_tokens_without_characters"] = self.evaluator_without / self.evaluator_tokens
        return fractions

    def warning(self) -> str | None:
        """Return a warning if key tokens depend on many tokens that share a character or cover none."""
        odd = self.sharing + self.without, self.evaluator_sharing + self.evaluator_without
        sizes = self.tokens, self.evaluator_tokens
        if not self.by_characters or all(n <= NOTABLE_FRACTION * size for n, size in zip(odd, sizes, strict=True)):
            return None
        return (
            f"{odd[0] / max(sizes[0], 1):.1%} of the model's tokens and {odd[1] / max(sizes[1], 1):.1%} of the"
            " evaluator's share a character with another one or cover none, and key tokens were transferred as"
            " character spans, which cannot distinguish such tokens. With `key_token_rule: paper` and an evaluator that"
            " has the model's tokenizer, each token is decided by itself."
        )


def document_tokens(batch: PackedBatch, row: int = 0) -> Tokens:
    """Return the tokens of a sequence with one document, without padding, in main memory."""
    end = batch["document_boundaries"][row][-1]
    return Tokens(batch["input_ids"][row, :end].cpu(), batch["offsets"][row, :end].cpu())


def find_key_tokens(
    scores: TokenScores,
    tokens: Tokens | None = None,
    *,
    alpha: float = 2.0,
    beta: float = -2.0,
    rule: KeyTokenRule = "paper",
) -> KeyTokens:
    """Find the key tokens of a document.

    Args:
        scores: The evaluator's log-likelihoods of the document.
        tokens: The same text in the evaluated model's tokens; by default the evaluator's own.
        alpha: Threshold of a key token's long-short difference, in nats.
        beta: Threshold of a key token's long log-likelihood, in nats.
        rule: ``paper``, or ``authors`` for the numbers of their package.

    Returns:
        The mask of the model's tokens, and how it was found. The mask includes special tokens and the first token,
        which the rule ``paper`` never makes key.

    Raises:
        ValueError: If a threshold is out of range, or the scores do not extend down to ``beta``.
    """
    key = evaluator_key_tokens(scores, alpha=alpha, beta=beta)
    tokens = Tokens(scores.token_ids, scores.offsets) if tokens is None else tokens
    if rule == "authors":
        spans = merge_touching_spans(scores.offsets[key])
        return KeyTokens(scan_token_mask(tokens.offsets, spans), "authors")
    # Steps 1 and 2 of the module's docstring.
    if (same := match_tokens(Tokens(scores.token_ids, scores.offsets), tokens)) is not None:
        mask = torch.zeros(len(tokens.ids), dtype=torch.bool)
        mask[same[1]] = key[same[0]]
        return KeyTokens(mask, "tokens")
    return KeyTokens(span_token_mask(tokens.offsets, key_spans(scores, alpha=alpha, beta=beta)), "characters")


def transfer_soft_influence(scores: TokenScores, tokens: Tokens, *, gamma: float = 5.0) -> Tensor:
    """Transfer the evaluator's soft influence to the tokens of an evaluated model.

    Identical tokens keep their influence; others get the mean over their characters (Equation 10). The result is
    ``[N]`` float64, and 0 for special tokens around the document.
    """
    influence = scores.soft_influence(gamma=gamma)  # [N] of the evaluator's tokens, Equation 7
    if (same := match_tokens(Tokens(scores.token_ids, scores.offsets), tokens)) is not None:
        transferred = torch.zeros(len(tokens.ids), dtype=torch.float64)
        transferred[same[1]] = influence[same[0]].double()
        return transferred
    return transfer_influence(influence, scores.offsets, tokens.offsets)


def evaluator_key_tokens(scores: TokenScores, *, alpha: float = 2.0, beta: float = -2.0) -> Tensor:
    """Return the ``[N]`` mask of the key tokens among the evaluator's tokens (Equation 4)."""
    _check_floor(scores, beta)
    return key_token_mask(scores.long, scores.short, alpha=alpha, beta=beta)


def key_spans(scores: TokenScores, *, alpha: float = 2.0, beta: float = -2.0) -> Tensor:
    """Return the ``[M, 2]`` character spans of the key units; adjacent spans are merged."""
    _check_floor(scores, beta)
    units = character_units(scores.offsets)
    spans = unit_spans(scores.offsets, units)
    # The likelihood of a unit is the product of its tokens' likelihoods, so log-likelihoods are added up.
    long, short = (torch.zeros(len(spans)).index_add(0, units, values) for values in (scores.long, scores.short))
    return merge_spans(spans[key_token_mask(long, short, alpha=alpha, beta=beta)])


def measure_coverage(tokens: Tokens, scores: TokenScores | None, alignment: Alignment) -> Coverage:
    """Count how the tokens of a model, and those of an evaluator if given, cover the characters of a document."""
    counts = _count_kinds(tokens.offsets) + (() if scores is None else _count_kinds(scores.offsets))
    return Coverage(int(alignment != "tokens"), *counts)


def add_coverage(documents: Iterable[Coverage]) -> Coverage:
    """Add up the coverage of documents."""
    return Coverage(*map(sum, zip(Coverage(), *documents, strict=True)))


def _count_kinds(offsets: Tensor) -> tuple[int, int, int]:
    """Return the numbers of tokens, of tokens that share a character, and of tokens without characters."""
    inner = offsets[_find_inner_range(offsets)]
    units = character_units(inner)
    members = torch.bincount(units, minlength=1)[units]
    return len(inner), int((members > 1).sum()), int((inner[:, 0] == inner[:, 1]).sum())


def _check_floor(scores: TokenScores, beta: float) -> None:
    if beta < scores.floor:
        raise ValueError(f"These scores are valid only for a `beta` of {scores.floor} or above, got {beta}.")


def match_tokens(one: Tokens, other: Tokens) -> tuple[slice, slice] | None:
    """Return the ranges in which two tokenizations of a text have the same ids and offsets, or None if they differ.

    Only special tokens around the text may be outside of the ranges.
    """
    if _are_equal(one, other):
        return slice(0, len(one.ids)), slice(0, len(other.ids))
    ranges = _find_inner_range(one.offsets), _find_inner_range(other.offsets)
    inner = (Tokens(tokens.ids[at], tokens.offsets[at]) for tokens, at in zip((one, other), ranges, strict=True))
    return ranges if _are_equal(*inner) else None


def _are_equal(one: Tokens, other: Tokens) -> bool:
    return torch.equal(one.ids, other.ids) and torch.equal(one.offsets, other.offsets)


def _find_inner_range(offsets: Tensor) -> slice:
    """Return the range from the first to the last token with characters, without the special tokens around a text."""
    covering = (offsets[:, 1] > offsets[:, 0]).nonzero()
    return slice(int(covering[0]), int(covering[-1]) + 1) if len(covering) else slice(0, 0)
