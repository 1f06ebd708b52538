"""A Hugging Face causal LM that computes log-likelihoods of tokens instead of logits."""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_modules.batch import PackedBatch, pack_sequence
from lightning_modules.functional import token_log_likelihood
from lightning_modules.functional.linear_head import LinearHead
from lightning_modules.functional.log_likelihood import Head
from lightning_modules.functional.top_tokens import with_greedy
from lightning_modules.models.attention import Exchange, documents_by_boundaries, isolation_arguments
from lightning_modules.models.context_extension.length_dependent import rotation_key
from lightning_modules.models.context_extension.rotary_checks import check_static, index_free_length
from lightning_modules.models.loading.adapters import active_module, is_peft_model
from lightning_modules.models.optimizations import no_autocast_cache
from lightning_modules.models.scorer import Scorer

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

Result = TypeVar("Result")

HeadFunction = Callable[..., Result]
"""Computes something from ``[B, T, D]`` last hidden states, the head, ``[B, T]`` labels and ``scored`` of the batch."""


TOKENS_PER_PASS = 32_768
"""Tokens of short sequences in one forward pass on an accelerator; a longer sequence has its own pass."""

TOKENS_PER_PASS_CPU = 4096

WINDOW_TOKENS_PER_PASS_CPU = 1280


class Backbone(Scorer):
    """Scores packed sequences with a causal LM, without ever holding the logits of a whole sequence.

    All computation goes through `forward`, so that wrappers (DDP, FSDP2) see decoder and head as one module. Code that
    needs the weights themselves calls `unsharded`.

    Args:
        model: A Hugging Face causal LM, or a peft model around one (without prompt learning).
    """

    def __init__(self, model: "PreTrainedModel | PeftModel") -> None:
        super().__init__()
        self.model = model
        # Until `check_scoring` has measured more, each document gets a forward pass of its own.
        self.isolates_documents = False
        self.checked_conditions: tuple[Any, ...] | None = None
        self._longest_warned = 0
        self._reported_separate_passes = False
        if self.base_model.get_output_embeddings() is None or self.decoder is None:
            raise ValueError(
                f"`{type(self.base_model).__name__}` is not a causal LM with a decoder and an output head."
            )

    # Cached, because each of them is read a dozen times per forward pass.
    @cached_property
    def base_model(self) -> PreTrainedModel:
        """Return the Hugging Face model itself; adapters inside it stay active."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    @cached_property
    def decoder(self) -> Any:
        """Return the module that turns tokens into hidden states, or None."""
        decoder = self.base_model.get_decoder()
        if not isinstance(decoder, PreTrainedModel):  # some models call their output head a decoder
            return None
        if decoder.get_output_embeddings() is None:
            return decoder
        # Some models (Llama 4) return a whole language model with its head, or themselves.
        return getattr(decoder, decoder.base_model_prefix, None) or getattr(decoder, "model", None)

    @property
    def is_stateful(self) -> bool:
        """Return whether layers carry a state along the sequence, like Mamba's."""
        return any(getattr(module, "_is_stateful", False) for module in (self.base_model, self.decoder))

    @property
    def vocabulary_size(self) -> int:
        """Return the size of the embedding; token ids must be below it."""
        return next(self.base_model.get_input_embeddings().parameters()).shape[0]

    @property
    def device(self) -> torch.device:
        """Return the device of the model's input; offloaded weights are not on it."""
        weight: Tensor = next(self.base_model.get_input_embeddings().parameters())
        # Offloaded shards are in host memory, but FSDP computes on the device of the mesh.
        if isinstance(weight, DTensor) and weight.device.type == "cpu":
            return torch.device(weight.device_mesh.device_type)
        return weight.device

    @property
    def log_likelihood_dtype(self) -> torch.dtype:
        """Return the dtype of log-likelihoods, float32 or float64."""
        # float64 stays float64, for tests; half precision would round log-likelihoods to 2 or 3 digits.
        return torch.promote_types(self.base_model.dtype, torch.float32)

    @property
    def tokens_per_pass(self) -> int:
        """Return the number of tokens in a batch of short sequences, which is smaller on a CPU."""
        return TOKENS_PER_PASS_CPU if self.device.type == "cpu" else TOKENS_PER_PASS

    def windows_per_pass(self, window_length: int) -> int:
        """Return the number of windows in one forward pass."""
        # On a CPU, larger passes are not faster, and only short windows have an overhead that is worth sharing.
        tokens = WINDOW_TOKENS_PER_PASS_CPU if self.device.type == "cpu" else TOKENS_PER_PASS
        return max(1, tokens // window_length)

    def forward(
        self,
        batch: PackedBatch,
        *,
        exchange: Exchange | None = None,
        window: int | None = None,
        head_fn: HeadFunction[Any] = token_log_likelihood,
    ) -> Any:
        """Compute the log-likelihood of each scored token given everything before it in its document.

        Args:
            batch: ``[B, T]`` packed sequences.
            exchange: How attention is computed if the batch is a shard of sequences that processes share
                (`SequenceGroup.shard`). Labels and result are then ``[B, T + 1]``.
            window: Number of tokens that each layer sees: a token itself and those before it. All by default.
            head_fn: Computes another result from the hidden states.

        Returns:
            ``[B, T]`` log-likelihoods in nats, float32; 0 where a token is not scored. Gradients flow through them if
            enabled. With ``head_fn``, its result.
        """
        # This includes the head: with a cached half-precision copy of its weight, the gradient would be summed in half
        # precision over all chunks.
        with no_autocast_cache():
            hidden_states = self.hidden_states(batch, exchange, window)
            return head_fn(hidden_states, self.head, batch["labels"], scored=batch.get("scored"))

    def with_greedy(self, batch: PackedBatch, places: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Return ``[B, T]`` log-likelihoods in nats, and ``[B, T]`` likeliest tokens at ``places`` of each sequence."""
        return self(batch, head_fn=partial(with_greedy, places=places))

    def unsharded(self, function: Callable[[], Result]) -> Result:
        """Call a function that uses the decoder, head or model directly, with unsharded weights.

        FSDP gathers sharded weights for each call of this method, like for `forward`. All processes must call it.
        """
        return function()

    def hidden_states(self, batch: PackedBatch, exchange: Exchange | None = None, window: int | None = None) -> Tensor:
        """Compute ``[B, T, D]`` last hidden states; entry ``t`` has seen the tokens of its document up to ``t``.

        Call it inside `unsharded` if weights may be sharded.
        """
        self.check_length(max(_document_lengths(batch), default=0))
        if self._needs_separate_passes(batch):
            return self._run_documents_separately(batch, window)
        tokens = batch["input_ids"]
        boundaries = batch["document_boundaries"]
        arguments = isolation_arguments(self.attention, boundaries, tokens.shape[1], tokens.device, window)
        if exchange is not None:
            arguments["exchange"] = exchange
        with documents_by_boundaries(self.attention, batch["position_ids"]):
            hidden_states = self.run_decoder(input_ids=tokens, position_ids=batch["position_ids"], **arguments)
        # A shard has one more label: its last token predicts the first token of the next shard.
        return hidden_states if exchange is None else F.pad(hidden_states, (0, 0, 0, 1))

    def run_decoder(self, **inputs: Any) -> Tensor:
        """Return the ``[B, T, D]`` last hidden states of the decoder, in the dtype of the head."""
        # A cache object would silently disable document isolation.
        hidden_states = self.decoder(use_cache=False, **inputs).last_hidden_state
        weight = getattr(self.base_model.get_output_embeddings(), "weight", hidden_states)
        # Mamba's residual stream is in float32 in a model of half precision.
        is_wider = hidden_states.dtype == torch.float32 and weight.dtype in (torch.bfloat16, torch.float16)
        return hidden_states.to(weight.dtype) if is_wider else hidden_states

    def _needs_separate_passes(self, batch: PackedBatch) -> bool:
        """Return whether each document of the sequences needs a forward pass by itself."""
        config = self.base_model.config
        # The longest document of a pass decides how LongRoPE and dynamic NTK rotate all of them.
        rotations = {rotation_key(config, length) for length in _document_lengths(batch)}
        if len(rotations) <= 1:
            if all(len(boundaries) <= 2 for boundaries in batch["document_boundaries"]):
                return False
            # Llama 4 counts chunks from the start of the sequence, so only short sequences can be packed.
            limit = index_free_length(config)
            if self.isolates_documents and (limit is None or batch["input_ids"].shape[1] <= limit):
                return False
        # Ranks would make different numbers of passes, and wait for each other forever.
        if self.is_sharded:
            raise ValueError(
                f"`{type(self.base_model).__name__}` with '{self.attention}' attention cannot isolate the documents of"
                " a sequence while its weights are sharded: use sequences of one document, or `isolate_documents:"
                " false` for plain concatenation. RoPE that depends on the length of the text also needs batches of one"
                " sequence."
            )
        if not self._reported_separate_passes:
            self._reported_separate_passes = True
            log.warning("`%s` scores each packed document in a pass of its own.", type(self.base_model).__name__)
        return True

    def _run_documents_separately(self, batch: PackedBatch, window: int | None) -> Tensor:
        """Return ``[B, T, D]`` last hidden states with one forward pass per document; padding is 0."""
        rows = []
        for tokens, boundaries in zip(batch["input_ids"], batch["document_boundaries"], strict=True):
            documents = [
                self.hidden_states(pack_sequence([tokens[start:stop]]), window=window)
                for start, stop in pairwise(boundaries)
            ]
            rows.append(F.pad(torch.cat(documents, dim=1), (0, 0, 0, len(tokens) - boundaries[-1])))
        return torch.cat(rows)

    @property
    def head(self) -> Head:
        """Return the fastest function from hidden states to logits, with the model's scale and soft cap."""
        head = active_module(self.base_model.get_output_embeddings())
        hooks = (head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks)
        # Any other head (an adapter, a quantized weight) must compute its logits itself.
        if type(head) is not nn.Linear or any(hooks) or "forward" in vars(head):
            return self.logits
        return LinearHead(head.weight, head.bias, *self._logit_transform())

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[.., V]`` logits of ``[.., D]`` hidden states, with the model's scale and soft cap."""
        # The head is called as a module: its bias, adapters and hooks are a part of the logits.
        scale, soft_cap = self._logit_transform()
        logits = self.base_model.get_output_embeddings()(hidden_states)
        if scale != 1.0:
            logits = logits * scale
        return logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap

    def _logit_transform(self) -> tuple[float, float | None]:
        """Return the scale of the model's logits, and the soft cap applied after it."""
        config = self.base_model.config.get_text_config(decoder=True)
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere, Falcon-H1, Muse
            scale *= getattr(config, name, None) or 1.0
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            scale /= divisor
        return scale, getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3

    def check_batch(self, batch: PackedBatch) -> None:
        """Raise a ``ValueError`` for ids outside of the embedding, which an accelerator would report obscurely."""
        # Waits for an accelerator once per batch. Its kernel would report an assertion, in another line.
        largest = int(batch["input_ids"].max())
        if largest >= self.vocabulary_size:
            raise ValueError(
                f"Token id {largest} is beyond the embedding of {self.vocabulary_size} tokens of"
                f" `{type(self.base_model).__name__}`: use the model's own tokenizer."
            )

    def check_compares_contexts(self) -> None:
        """Raise a ``ValueError`` for RoPE that depends on the length of the text: contexts would rotate differently."""
        check_static(self.base_model.config, compares=True)

    @property
    def attention(self) -> str:
        """Return the name of the attention implementation in transformers."""
        return self.base_model.config._attn_implementation

    def check_length(self, longest: int) -> None:
        """Raise a ``ValueError`` for a document beyond learned positions; warn if it exceeds the trained length."""
        config = self.base_model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is None or longest <= limit:
            return
        if getattr(config, "rope_parameters", None) is None:
            raise ValueError(
                f"`{type(self.base_model).__name__}` has {limit} learned positions and cannot read a document of"
                f" {longest} tokens: shorten the documents or use another model."
            )
        if longest <= self._longest_warned:  # not one warning per document
            return
        self._longest_warned = longest
        warnings.warn(
            f"A document of {longest} tokens is longer than the {limit} positions of"
            f" `{type(self.base_model).__name__}` (`max_position_embeddings`): expect poor scores.",
            stacklevel=2,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Backbone":
        """Move and cast, but keep rotary frequencies in float32 and sharded weights on their device.

        A cast to bfloat16 (`precision: bf16-true`, `.to(torch.bfloat16)`) would round the frequencies, and at 32k
        tokens the angles would be wrong by whole turns. Offloaded weights must stay in host memory.
        """

        def apply(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor):
                return tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype)
            return fn(tensor)

        # Kept aside in float32: casting back would not restore the rounded digits.
        frequencies = {name: buffer for name, buffer in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(apply, recurse)
        for name, frequency in frequencies.items():
            parent, _, leaf = name.rpartition(".")
            module = self.get_submodule(parent)
            setattr(module, leaf, frequency.to(getattr(module, leaf).device))
        return self


def _document_lengths(batch: PackedBatch) -> set[int]:
    return {stop - start for row in batch["document_boundaries"] for start, stop in pairwise(row)}
