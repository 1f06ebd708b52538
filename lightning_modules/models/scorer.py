"""Interface of models that compute log-likelihoods of token ids, in this process or on a server."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_modules.batch import PackedBatch


class Scorer(nn.Module, ABC):
    """A causal LM that scores batches: a `Backbone` in this process, or a model on servers.

    Calling it with a batch returns ``[B, T]`` log-likelihoods in nats, 0 where a token is not scored.

    Attributes:
        is_sharded: Whether each forward pass gathers weights from all processes, which must make the same number.
        rotates_by_length: Whether RoPE depends on the length of the text: long and short contexts cannot be compared.
        in_lockstep: Whether the model is inside a `lightning_modules.models.lockstep.lockstep` block.
    """

    is_sharded = False
    rotates_by_length = False
    in_lockstep = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return the device of the input."""

    @property
    @abstractmethod
    def log_likelihood_dtype(self) -> torch.dtype:
        """Return the dtype of the log-likelihoods."""

    @property
    @abstractmethod
    def tokens_per_pass(self) -> int:
        """Return the number of tokens in a batch of short sequences that is fast, and needs little memory."""

    @abstractmethod
    def windows_per_pass(self, window_length: int) -> int:
        """Return the number of windows of this length in one batch."""

    @abstractmethod
    def with_greedy(self, batch: PackedBatch, places: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Compute `lightning_modules.functional.top_tokens.with_greedy` of a batch."""

    @abstractmethod
    def check_batch(self, batch: PackedBatch) -> None:
        """Raise a ``ValueError`` for ids outside of the embedding, which an accelerator would report obscurely."""

    @abstractmethod
    def check_length(self, longest: int) -> None:
        """Raise a ``ValueError`` for a document that is too long for the model."""

    def check_compares_contexts(self) -> None:
        """Raise a ``ValueError`` if log-likelihoods of a long and a short context cannot be compared."""

    def verify(self) -> None:
        """Raise a ``ValueError`` if the model has changed since it was loaded."""

    def report(self) -> str:
        """Return how much each server has scored, as text; empty for a model in this process."""
        return ""
