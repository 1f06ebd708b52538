"""The one definition of a key token, for every command.

An evaluator says which of *its* tokens are key (Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771).
What follows for the tokens of an evaluated model:

1. If both read the text as the same tokens at the same characters, these are the key tokens.
2. Otherwise the evaluator's key tokens become spans of characters, and a token is key when it lies wholly inside one
   (Equation 9). Tokens that share a character are one unit on both sides: key together or not at all, decided by their
   summed log-likelihoods.

The rule ``authors`` always goes by spans, exactly as the package `longppl` 0.3.0 does.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

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
from lightning_modules.token_scores import TokenScores

Rule = Literal["paper", "authors"]
Alignment = Literal["tokens", "characters", "authors"]
"""How key tokens came from the evaluator's tokens to those of the evaluated model."""

NOTABLE_SHARE = 0.01
"""A warning reports tokens that share characters or cover none if more than this fraction of all tokens do."""


class Tokens(NamedTuple):
    """How a model reads a document.

    Attributes:
        ids: ``[N]`` int64 token ids.
        offsets: ``[N, 2]`` int64 character span of each token.
    """

    ids: Tensor
    offsets: Tensor


class KeyTokens(NamedTuple):
    """Key tokens of an evaluated model.

    Attributes:
        mask: ``[N]`` bool.
        alignment: How they came from the evaluator's tokens.
    """

    mask: Tensor
    alignment: Alignment


class CharacterCounts(NamedTuple):
    """How the tokens of documents cover their characters; special tokens around a document are left out.

    Attributes:
        tokens: Number of tokens.
        sharing: Tokens that share a character with another one.
        without: Tokens without a character.
    """

    tokens: int
    sharing: int
    without: int

    def shares(self) -> dict[str, float]:
        """The two kinds as shares of all tokens, named as in results."""
        return {
            "tokens_sharing_characters": self.sharing / max(self.tokens, 1),
            "tokens_without_characters": self.without / max(self.tokens, 1),
        }


def check_rule(rule: str) -> None:
    """Refuse an unknown rule with a ``ValueError``."""
    if rule not in get_args(Rule):
        raise ValueError(f"`key_tokens` must be one of {', '.join(get_args(Rule))}, got {rule!r}.")


def document_tokens(batch: PackedBatch, row: int = 0) -> Tokens:
    """Return the tokens of the one document of a row, without padding, in main memory."""
    end = batch["document_borders"][row][-1]
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

    The same tokens keep their influence; others get the average over their characters (Equation 10).

    Args:
        scores: The evaluator's log-likelihoods of the document.
        tokens: How the evaluated model reads the same text.
        gamma: Largest influence.

    Returns:
        ``[N]`` float64; 0 for special tokens around the document.

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


def count_characters(offsets: Tensor) -> CharacterCounts:
    """Count how the tokens of one document, ``[N, 2]`` offsets, cover its characters."""
    inner = offsets[_inner(offsets)]
    units = character_units(inner)
    members = torch.bincount(units, minlength=1)[units]
    return CharacterCounts(len(inner), int((members > 1).sum()), int((inner[:, 0] == inner[:, 1]).sum()))


def add_counts(counts: Iterable[CharacterCounts]) -> CharacterCounts:
    """Add up the counts of documents."""
    return CharacterCounts(*map(sum, zip(CharacterCounts(0, 0, 0), *counts, strict=True)))


def character_warning(counts: CharacterCounts, alignments: Iterable[Alignment]) -> str | None:
    """Return a warning about tokens that share characters or cover none, or None where no number depends on them."""
    if set(alignments) <= {"tokens"} or counts.sharing + counts.without <= NOTABLE_SHARE * counts.tokens:
        return None
    shares = counts.shares()
    return (
        f"{shares['tokens_sharing_characters']:.1%} of the tokens share a character with another token, and"
        f" {shares['tokens_without_characters']:.1%} cover none. The evaluator reads other tokens, so its key tokens"
        " become spans of characters, which cannot tell such tokens apart. An evaluator with the model's own tokenizer"
        " decides each token by itself."
    )


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
    """Return the range from the first to the last token with characters: special tokens around a text have none."""
    covering = (offsets[:, 1] > offsets[:, 0]).nonzero()
    return slice(int(covering[0]), int(covering[-1]) + 1) if len(covering) else slice(0, 0)
