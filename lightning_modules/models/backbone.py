"""A Hugging Face causal LM that computes log-likelihoods of tokens instead of logits."""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
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
from lightning_modules.models.attention import (
    Exchange,
    documents_by_boundaries,
    isolation_arguments,
    sparse_arguments,
)
from lightning_modules.models.context_extension.length_dependent import rotation_key
from lightning_modules.models.context_extension.rotary_checks import (
    check_static,
    depends_on_length,
    index_free_length,
    rope_parameter_sets,
)
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

    base_model: PreTrainedModel
    """The Hugging Face model itself; adapters inside it stay active."""

    decoder: Any
    """The module that turns tokens into hidden states."""

    def __init__(self, model: "PreTrainedModel | PeftModel") -> None:
        super().__init__()
        self.model = model
        base_model = model.get_base_model() if is_peft_model(model) else model
        embedding = base_model.get_input_embeddings()
        decoder = _find_decoder(base_model)
        if base_model.get_output_embeddings() is None or decoder is None:
            raise ValueError(f"`{type(base_model).__name__}` is not a causal LM with a decoder and an output head.")
        # Not as submodules: they are parts of `model`, and checkpoints must contain each weight once.
        vars(self).update(base_model=base_model, decoder=decoder)
        # 1. Properties of every pass, from the config.
        config: Any = base_model.config.get_text_config(decoder=True)
        self.vocabulary_size: int = next(embedding.parameters()).shape[0]  # token ids must be below it
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.logit_scale = _find_logit_scale(config)
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3
        self.rotates_by_length = any(map(depends_on_length, rope_parameter_sets(config)))
        # Layers may carry a state along the sequence, like Mamba's.
        self.is_stateful = any(getattr(module, "_is_stateful", False) for module in (base_model, decoder))
        # 2. Results of `check_scoring`. Until it runs, each document gets its own forward pass.
        self.isolates_documents = False
        self.longest_packed = index_free_length(config)  # of sequences with several documents, None without a limit
        self.checked_conditions: tuple[Any, ...] | None = None
        self.needs_compiled = True  # otherwise, layers that cannot be compiled run as written
        # 3. Warnings that were already logged.
        self._longest_warned = 0
        self._reported_separate_passes = False

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
        group: int | None = None,
        head_fn: HeadFunction[Any] = token_log_likelihood,
    ) -> Any:
        """Compute the log-likelihood of each scored token given everything before it in its document.

        Args:
            batch: ``[B, T]`` packed sequences.
            exchange: How attention is computed if the batch is a shard of sequences that processes share
                (`SequenceGroup.shard`). Labels and result are then ``[B, T + 1]``.
            window: Number of tokens that each layer sees: a token itself and those before it. All by default.
            group: Number of tokens in a group of shifted sparse attention (`sparse_arguments`); full by default.
            head_fn: Computes another result from the hidden states.

        Returns:
            ``[B, T]`` log-likelihoods in nats, float32; 0 where a token is not scored. Gradients flow through them if
            enabled. With ``head_fn``, its result.
        """
        # This includes the head: with a cached half-precision copy of its weight, the gradient would be summed in half
        # precision over all chunks.
        with no_autocast_cache():
            hidden_states = self.hidden_states(batch, exchange, window, group)
            return head_fn(hidden_states, self.head, batch["labels"], scored=batch.get("scored"))

    def with_greedy(self, batch: PackedBatch, places: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Return ``[B, T]`` log-likelihoods in nats, and ``[B, T]`` likeliest tokens at ``places`` of each sequence."""
        return self(batch, head_fn=partial(with_greedy, places=places))

    def unsharded(self, function: Callable[[], Result]) -> Result:
        """Call a function that uses the decoder, head or model directly, with unsharded weights.

        FSDP gathers sharded weights for each call of this method, like for `forward`. All processes must call it.
        """
        return function()

    def hidden_states(
        self,
        batch: PackedBatch,
        exchange: Exchange | None = None,
        window: int | None = None,
        group: int | None = None,
    ) -> Tensor:
        """Compute ``[B, T, D]`` last hidden states; entry ``t`` has seen the tokens of its document up to ``t``.

        Call it inside `unsharded` if weights may be sharded.
        """
        tokens = batch["input_ids"]
        boundaries = batch["document_boundaries"]
        attention = self.base_model.config._attn_implementation
        lengths = {stop - start for row in boundaries for start, stop in pairwise(row)}
        longest = max(lengths, default=0)
        if self.max_length is not None and longest > self.max_length:
            self.check_length(longest)
        # 1. Documents get separate passes if they would attend to each other, or if the longest document of a pass
        #    would determine how RoPE rotates all of them (LongRoPE and dynamic NTK).
        is_packed = any(len(row) > 2 for row in boundaries)
        isolates = self.isolates_documents and (self.longest_packed is None or tokens.shape[1] <= self.longest_packed)
        rotations = {rotation_key(self.base_model.config, length) for length in lengths if self.rotates_by_length}
        if (is_packed and not isolates) or len(rotations) > 1:
            return self._run_documents_separately(batch, window, group)
        # 2. Otherwise attention separates them, in one pass.
        if group is None:
            arguments = isolation_arguments(attention, boundaries, tokens.shape[1], tokens.device, window)
        else:
            arguments = sparse_arguments(boundaries, tokens.shape[1], tokens.device, group)
        if exchange is not None:
            arguments["exchange"] = exchange
        with documents_by_boundaries(attention, batch["position_ids"]):
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

    def _run_documents_separately(self, batch: PackedBatch, window: int | None, group: int | None) -> Tensor:
        """Return ``[B, T, D]`` last hidden states with one forward pass per document; padding is 0."""
        name = type(self.base_model).__name__
        # Ranks would make different numbers of passes, and wait for each other forever.
        if self.is_sharded:
            raise ValueError(
                f"`{name}` with '{self.attention}' attention cannot isolate the documents of a sequence while its"
                " weights are sharded: use sequences of one document, or `isolate_documents: false` for plain"
                " concatenation. RoPE that depends on the length of the text also needs batches of one sequence."
            )
        if not self._reported_separate_passes:
            self._reported_separate_passes = True
            log.warning("`%s` scores each packed document in a separate forward pass.", name)
        rows = []
        for row, boundaries in enumerate(batch["document_boundaries"]):
            tokens = batch["input_ids"][row]
            documents = []
            for start, stop in pairwise(boundaries):
                document = pack_sequence([tokens[start:stop]])
                document["position_ids"] = batch["position_ids"][row : row + 1, start:stop]  # which may skip
                documents.append(self.hidden_states(document, window=window, group=group))
            rows.append(F.pad(torch.cat(documents, dim=1), (0, 0, 0, len(tokens) - boundaries[-1])))
        return torch.cat(rows)

    @property
    def head(self) -> Head:
        """Return the fastest function from hidden states to logits, with the model's scale and soft cap."""
        head = self.base_model.get_output_embeddings()
        if type(head) is not nn.Linear:
            head = active_module(head)
        hooks = (head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks)
        # Any other head (an adapter, a quantized weight) must compute its logits itself.
        if type(head) is not nn.Linear or any(hooks) or "forward" in vars(head):
            return self.logits
        return LinearHead(head.weight, head.bias, self.logit_scale, self.soft_cap)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[.., V]`` logits of ``[.., D]`` hidden states, with the model's scale and soft cap."""
        # The head is called as a module: its bias, adapters and hooks are a part of the logits.
        logits = self.base_model.get_output_embeddings()(hidden_states)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

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
        limit = self.max_length
        if limit is None or longest <= limit:
            return
        config = self.base_model.config.get_text_config(decoder=True)
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


def _find_decoder(model: PreTrainedModel) -> Any:
    """Return the module of a model that turns tokens into hidden states, or None."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # some models call their output head a decoder
        return None
    if decoder.get_output_embeddings() is None:
        return decoder
    # Some models (Llama 4) return a whole language model with its head, or themselves.
    return getattr(decoder, decoder.base_model_prefix, None) or getattr(decoder, "model", None)


def _find_logit_scale(config: Any) -> float:
    """Return the factor by which the model multiplies its logits, before any soft cap."""
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere, Falcon-H1, Muse
        scale *= getattr(config, name, None) or 1.0
    divisor = getattr(config, "logits_scaling", None)  # Granite
    return scale if divisor is None else scale / divisor
