"""The definition of a key token that all commands share.

Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, defines the key tokens of the evaluator. They are
transferred to an evaluated model as follows:

1. If both models have the same tokens at the same characters, the key tokens are the same.
2. Otherwise the evaluator's key tokens become character spans, and a token is key if it lies entirely inside one
   (Equation 9). Tokens that share a character form one unit on both sides: they are key together or not at all, decided
   by the sum of their log-likelihoods.

The rule ``authors`` always uses spans, exactly as the package `longppl` 0.3.0 does.
"""

import math
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
"""Method by which key tokens were transferred from the evaluator's tokens to those of the evaluated model."""


class Tokens(NamedTuple):
    """Tokens of a document for one model."""

    ids: Tensor  # [N] int64 token ids
    offsets: Tensor  # [N, 2] int64 character span of each token


class KeyTokens(NamedTuple):
    """Key tokens of an evaluated model."""

    mask: Tensor  # [N] bool
    spans: Tensor  # [M, 2] character spans of the evaluator's key tokens
    alignment: Alignment  # how they were transferred from the evaluator's tokens


class Coverage(NamedTuple):
    """Counts of how tokens cover the characters of a text, without the special tokens around it."""

    tokens: int
    sharing: int  # tokens that share a character with another one
    without: int  # tokens without characters


def document_tokens(batch: PackedBatch, row: int = 0) -> Tokens:
    """Return the tokens of a sequence with one document, without padding, in main memory."""
    end = batch["document_boundaries"][row][-1]
    return Tokens(batch["input_ids"][row, :end].cpu(), batch["offsets"][row, :end].cpu())


def find_key_tokens(
    found_by: TokenScores | Tensor,
    tokens: Tokens | None = None,
    *,
    alpha: float = 2.0,
    beta: float = -2.0,
    rule: KeyTokenRule = "paper",
) -> KeyTokens:
    """Find the key tokens of a document.

    Args:
        found_by: The evaluator's log-likelihoods of the document, or ``[M, 2]`` precomputed character spans.
        tokens: The text in the evaluated model's tokens; by default the evaluator's own.
        alpha: Threshold of a key token's long-short difference, in nats; unused for precomputed spans.
        beta: Threshold of a key token's long log-likelihood, in nats; unused for precomputed spans.
        rule: ``paper``, or ``authors`` for the numbers of their package.

    Returns:
        The mask of the model's tokens, and how it was found. The mask includes special tokens and the first token,
        which the rule ``paper`` never makes key.

    Raises:
        ValueError: If a threshold is out of range, or the scores do not extend down to ``beta``.
    """
    if isinstance(found_by, Tensor):
        assert tokens is not None
        in_spans = scan_token_mask if rule == "authors" else span_token_mask
        alignment: Alignment = "authors" if rule == "authors" else "characters"
        return KeyTokens(in_spans(tokens.offsets, found_by), found_by, alignment)
    own = Tokens(found_by.token_ids, found_by.offsets)
    tokens = own if tokens is None else tokens
    key = evaluator_key_tokens(found_by, alpha=alpha, beta=beta)
    spans = key_spans(found_by, alpha=alpha, beta=beta)
    if rule == "authors":
        touching = merge_touching_spans(found_by.offsets[key])
        return KeyTokens(scan_token_mask(tokens.offsets, touching), spans, "authors")
    # Steps 1 and 2 of the module's docstring.
    same = match_tokens(own, tokens)
    if same is not None:
        mask = torch.zeros(len(tokens.ids), dtype=torch.bool)
        mask[same[1]] = key[same[0]]
        return KeyTokens(mask, spans, "tokens")
    return KeyTokens(span_token_mask(tokens.offsets, spans), spans, "characters")


def transfer_soft_influence(scores: TokenScores, tokens: Tokens, *, gamma: float = 5.0) -> Tensor:
    """Transfer the evaluator's soft influence to the tokens of an evaluated model.

    Identical tokens keep their influence; others get the mean over their characters (Equation 10). The result is
    ``[N]`` float64, and 0 for special tokens around the document.
    """
    influence = scores.soft_influence(gamma=gamma)  # [N] of the evaluator's tokens, Equation 7
    same = match_tokens(Tokens(scores.token_ids, scores.offsets), tokens)
    if same is not None:
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


def compare_key_spans(one: Tensor, other: Tensor) -> float:
    """Return how far two evaluators agree on a document: the Jaccard index of the characters in their key spans.

    Args:
        one: ``[M, 2]`` int64 character spans of `key_spans`.
        other: ``[N, 2]`` spans of another evaluator, whose tokenizer may differ.

    Returns:
        From 0 to 1, or NaN without any key tokens.

    Example:
        >>> compare_key_spans(torch.tensor([[0, 4]]), torch.tensor([[2, 6]]))
        0.3333333333333333
    """
    first = _characters(one)
    second = _characters(other)
    return len(first & second) / len(first | second) if first or second else math.nan


def _characters(spans: Tensor) -> set[int]:
    characters: set[int] = set()
    for start, end in spans.tolist():
        characters.update(range(start, end))
    return characters


def count_coverage(offsets: Tensor) -> Coverage:
    """Count how tokens with ``[N, 2]`` offsets cover the characters of a document."""
    inner = offsets[_find_inner_range(offsets)]
    units = character_units(inner)
    members = torch.bincount(units, minlength=1)[units]
    return Coverage(len(inner), int((members > 1).sum()), int((inner[:, 0] == inner[:, 1]).sum()))


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
