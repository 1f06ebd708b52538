"""The one definition of a key token, for every command.

Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, defines the key tokens of the evaluator. They
determine those of an evaluated model:

1. If both read the text as the same tokens at the same characters, these are the key tokens.
2. Otherwise the evaluator's key tokens become spans of characters, and a token is key when it lies wholly inside one
   (Equation 9). Tokens that share a character are one unit on both sides: key together or not at all, decided by their
   summed log-likelihoods.

The rule ``authors`` always goes by spans, exactly as the package `longppl` 0.3.0 does.
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
from lightning_modules.scoring.config import Rule
from lightning_modules.scoring.token_scores import TokenScores

Alignment = Literal["tokens", "characters", "authors"]
"""How key tokens came from the evaluator's tokens to those of the evaluated model."""

NOTABLE_SHARE = 0.01
"""A warning reports tokens that share characters or cover none if more than this fraction of all tokens do."""


class Tokens(NamedTuple):
    """How a model reads a document."""

    ids: Tensor  # [N] int64 token ids
    offsets: Tensor  # [N, 2] int64 character span of each token


class KeyTokens(NamedTuple):
    """Key tokens of an evaluated model."""

    mask: Tensor  # [N] bool
    alignment: Alignment  # how they came from the evaluator's tokens


class Coverage(NamedTuple):
    """How tokens cover the characters of one document, or of several; special tokens around a text are left out."""

    by_characters: int = 0  # documents whose key tokens came by way of characters
    tokens: int = 0  # number of the model's tokens
    sharing: int = 0  # those that share a character with another one
    without: int = 0  # those without a character
    evaluator_tokens: int = 0  # number of the evaluator's tokens; 0 if they are not known
    evaluator_sharing: int = 0  # those that share a character with another one
    evaluator_without: int = 0  # those without a character

    def shares(self) -> dict[str, float]:
        """Return the shares of tokens of each kind, named as in results."""
        shares = {
            "tokens_sharing_characters": self.sharing / max(self.tokens, 1),
            "tokens_without_characters": self.without / max(self.tokens, 1),
        }
        if self.evaluator_tokens:
            shares["evaluator_tokens_sharing_characters"] = self.evaluator_sharing / self.evaluator_tokens
            shares["evaluator_tokens_without_characters"] = self.evaluator_without / self.evaluator_tokens
        return shares

    def warning(self) -> str | None:
        """Return a warning if many tokens share a character or cover none, and key tokens depend on it."""
        odd = self.sharing + self.without, self.evaluator_sharing + self.evaluator_without
        sizes = self.tokens, self.evaluator_tokens
        if not self.by_characters or all(n <= NOTABLE_SHARE * size for n, size in zip(odd, sizes, strict=True)):
            return None
        return (
            f"{odd[0] / max(sizes[0], 1):.1%} of the model's tokens and {odd[1] / max(sizes[1], 1):.1%} of the"
            " evaluator's share a character with another one or cover none, and key tokens came as spans of characters,"
            " which cannot tell such tokens apart. With an evaluator that has the model's tokenizer, and `key_tokens:"
            " paper`, each token is decided by itself."
        )


def document_tokens(batch: PackedBatch, row: int = 0) -> Tokens:
    """Return the tokens of the one document of a row, without padding, in main memory."""
    end = batch["document_boundaries"][row][-1]
    return Tokens(batch["input_ids"][row, :end].cpu(), batch["offsets"][row, :end].cpu())


def find_key_tokens(
    scores: TokenScores,
    tokens: Tokens | None = None,
    *,
    alpha: float = 2.0,
    beta: float = -2.0,
    rule: Rule = "paper",
) -> KeyTokens:
    """Find the key tokens of a document.

    Args:
        scores: The evaluator's log-likelihoods of the document.
        tokens: How the evaluated model reads the same text; by default as the evaluator does.
        alpha: A key token's long-short difference exceeds it, in nats.
        beta: A key token's long log-likelihood exceeds it, in nats.
        rule: ``paper``, or ``authors`` for the numbers of their package.

    Returns:
        The mask of the model's tokens, special ones and the first token included (they are never key but by accident of
        the rule ``authors``), and how it came about.

    Raises:
        ValueError: If a threshold makes no sense, or the scores are not known down to ``beta``.
    """
    key = evaluator_key_tokens(scores, alpha=alpha, beta=beta)
    tokens = Tokens(scores.token_ids, scores.offsets) if tokens is None else tokens
    if rule == "authors":
        spans = merge_touching_spans(scores.offsets[key])
        return KeyTokens(scan_token_mask(tokens.offsets, spans), "authors")
    if (same := same_tokens(Tokens(scores.token_ids, scores.offsets), tokens)) is not None:
        mask = torch.zeros(len(tokens.ids), dtype=torch.bool)
        mask[same[1]] = key[same[0]]
        return KeyTokens(mask, "tokens")
    return KeyTokens(span_token_mask(tokens.offsets, key_spans(scores, alpha=alpha, beta=beta)), "characters")


def move_soft_influence(scores: TokenScores, tokens: Tokens, *, gamma: float = 5.0) -> Tensor:
    """Return the evaluator's soft influence for the tokens of an evaluated model.

    The same tokens keep their influence; others get the average over their characters (Equation 10). The result is
    ``[N]`` float64, 0 for special tokens around the document.

    Raises:
        ValueError: If the short log-likelihood of some tokens is not known.
    """
    influence = scores.soft_influence(gamma=gamma)
    if (same := same_tokens(Tokens(scores.token_ids, scores.offsets), tokens)) is not None:
        moved = torch.zeros(len(tokens.ids), dtype=torch.float64)
        moved[same[1]] = influence[same[0]].double()
        return moved
    return transfer_influence(influence, scores.offsets, tokens.offsets)


def evaluator_key_tokens(scores: TokenScores, *, alpha: float = 2.0, beta: float = -2.0) -> Tensor:
    """Return the ``[N]`` key tokens among the evaluator's own: Equation 4.

    Raises:
        ValueError: If a threshold makes no sense, or the scores are not known down to ``beta``.
    """
    _check_floor(scores, beta)
    return key_token_mask(scores.long, scores.short, alpha=alpha, beta=beta)


def key_spans(scores: TokenScores, *, alpha: float = 2.0, beta: float = -2.0) -> Tensor:
    """Return the ``[M, 2]`` character spans of the key units, those that touch joined.

    Raises:
        ValueError: If a threshold makes no sense, or the scores are not known down to ``beta``.
    """
    _check_floor(scores, beta)
    units = character_units(scores.offsets)
    spans = unit_spans(scores.offsets, units)
    # A unit is predicted token after token: the logarithms of the factors of its likelihood add up.
    long, short = (torch.zeros(len(spans)).index_add(0, units, part) for part in (scores.long, scores.short))
    return merge_spans(spans[key_token_mask(long, short, alpha=alpha, beta=beta)])


def measure_coverage(tokens: Tokens, scores: TokenScores | None, alignment: Alignment) -> Coverage:
    """Count how the tokens of a model cover a document, and those of an evaluator if its scores are known."""
    counts = _count(tokens.offsets) + (() if scores is None else _count(scores.offsets))
    return Coverage(int(alignment != "tokens"), *counts)


def add_coverage(parts: Iterable[Coverage]) -> Coverage:
    """Add up the coverage of documents."""
    return Coverage(*map(sum, zip(Coverage(), *parts, strict=True)))


def _count(offsets: Tensor) -> tuple[int, int, int]:
    inner = offsets[_inner(offsets)]
    units = character_units(inner)
    members = torch.bincount(units, minlength=1)[units]
    return len(inner), int((members > 1).sum()), int((inner[:, 0] == inner[:, 1]).sum())


def _check_floor(scores: TokenScores, beta: float) -> None:
    if beta < scores.floor:
        raise ValueError(f"These scores know key tokens for a `beta` of {scores.floor} or above, got {beta}.")


def same_tokens(one: Tokens, other: Tokens) -> tuple[slice, slice] | None:
    """Return the ranges in which two readings of a text are equal, special tokens around it aside; None if they differ.

    Equal are tokens with the same ids at the same characters.
    """
    if _equal(one, other):
        return slice(0, len(one.ids)), slice(0, len(other.ids))
    inner = _inner(one.offsets), _inner(other.offsets)
    parts = (Tokens(tokens.ids[part], tokens.offsets[part]) for tokens, part in zip((one, other), inner, strict=True))
    return inner if _equal(*parts) else None


def _equal(one: Tokens, other: Tokens) -> bool:
    return torch.equal(one.ids, other.ids) and torch.equal(one.offsets, other.offsets)


def _inner(offsets: Tensor) -> slice:
    """Return the range from the first to the last token with characters, without the special tokens around a text."""
    covering = (offsets[:, 1] > offsets[:, 0]).nonzero()
    return slice(int(covering[0]), int(covering[-1]) + 1) if len(covering) else slice(0, 0)
