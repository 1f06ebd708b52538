"""A Hugging Face causal LM reduced to its one product: the log-likelihood of tokens, in long and in short contexts."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import token_log_likelihood
from lightning_modules.functional.linear_head import LinearHead
from lightning_modules.functional.log_likelihood import Head
from lightning_modules.models.adapters import active_module, is_peft_model
from lightning_modules.models.attention import Exchange, borders_given, index_free_length, isolation_arguments
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.optimizations import last_layer_reads_from, no_autocast_cache

if TYPE_CHECKING:
    from peft import PeftModel

Result = TypeVar("Result")

CacheUse = Literal["together", "alone", "none"]
"""How a model generates: prompts of a group together, each with its own cache, or all tokens again for each new one."""

HeadFunction = Callable[[Tensor, Head, Tensor], Result]
"""Computes something from ``[B, T, D]`` last hidden states, the head and ``[B, T]`` labels."""


class Backbone(nn.Module):
    """Scores packed rows with a causal LM; full logits of a row never exist.

    Everything goes through `forward`, so that wrappers (DDP, FSDP2) see decoder and head as one module; what has to
    look inside does it by `unsharded`.

    Args:
        model: A Hugging Face causal LM, or a peft model around one (prompt learning is refused).

    Attributes:
        is_sharded: Whether each pass gathers weights from all processes, which must then make equally many.
        in_lockstep: Whether a `lockstep` is under way.
        cache_use: How the model generates, once `lightning_modules.tasks.generation` has found out.

    Raises:
        ValueError: If the model is not a causal LM with a decoder and an output head, or uses prompt learning.
    """

    def __init__(self, model: "PreTrainedModel | PeftModel") -> None:
        super().__init__()
        if is_peft_model(model) and model.peft_config[model.active_adapter].is_prompt_learning:
            raise ValueError("Prompt learning adds tokens that are not scored: use LoRA or another weight adapter.")
        self.model = model
        # A state runs on from token to token: no position and no mask can keep documents apart, or leave tokens out.
        # Known of the architecture, as weights may make it too small to be measured.
        self.isolates_documents = self.trims_last_layer = not self.is_stateful
        self.is_sharded = self.in_lockstep = False
        self.cache_use: CacheUse | None = None
        self._longest_told = 0
        if self.base_model.get_output_embeddings() is None or self.decoder is None:
            raise ValueError(
                f"`{type(self.base_model).__name__}` is not a causal LM with a decoder and an output head."
            )

    @property
    def base_model(self) -> PreTrainedModel:
        """The Hugging Face model itself; adapters inside it stay active."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    @property
    def decoder(self) -> Any:
        """Return the module that turns tokens into hidden states, or None."""
        decoder = self.base_model.get_decoder()
        if decoder is None or decoder.get_output_embeddings() is None:
            return decoder
        # Some models (Llama 4) name a whole language model with its head, or themselves, and another class's prefix.
        return getattr(decoder, decoder.base_model_prefix, None) or getattr(decoder, "model", None)

    @property
    def is_stateful(self) -> bool:
        """Whether layers carry a state along the row, as Mamba's do (transformers knows of its classes)."""
        return any(getattr(part, "_is_stateful", False) for part in (self.base_model, self.decoder))

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding: token ids must stay below it."""
        return self._embedding.shape[0]

    @property
    def has_dropout(self) -> bool:
        """Whether training mode drops anything out."""
        config = self.base_model.config.get_text_config(decoder=True)
        layers = any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.modules())
        return layers or getattr(config, "attention_dropout", 0.0) > 0

    @property
    def device(self) -> torch.device:
        """Where the model takes its input."""
        return self._embedding.device

    @property
    def _embedding(self) -> nn.Parameter:
        return next(self.base_model.get_input_embeddings().parameters())

    @overload
    def forward(self, batch: PackedBatch, *, first_scored: int = 1, exchange: Exchange | None = None) -> Tensor: ...

    @overload
    def forward(self, batch: PackedBatch, *, first_scored: int = 1, head_fn: HeadFunction[Result]) -> Result: ...

    def forward(
        self,
        batch: PackedBatch,
        *,
        first_scored: int = 1,
        exchange: Exchange | None = None,
        head_fn: HeadFunction[Any] = token_log_likelihood,
    ) -> Any:
        """Compute the log-likelihood of each scored token given everything before it in its document.

        Args:
            batch: ``[B, T]`` packed sequences.
            first_scored: No token before this one is scored in any sequence, which saves work in the last layer.
            exchange: If the sequences are this process's part of sequences that several share (`SequenceGroup.part`),
                how their attention is computed. Labels are ``[B, T + 1]`` then, and so is what is returned.
            head_fn: What to compute from the hidden states instead.

        Returns:
            ``[B, T]`` log-likelihoods in nats, float32; 0 where a token is not scored. Gradients flow through them, if
            they are enabled. Or what ``head_fn`` returns.

        Raises:
            ValueError: If a document is longer than learned positions allow, or the model cannot keep documents apart.
        """
        trims = self.trims_last_layer and not torch.is_grad_enabled()
        trims = trims and not self._must_part(batch)  # or it would leave out the first tokens of each document
        # The head as well: with one half-precision copy for all chunks, its gradient would be summed in that type.
        with no_autocast_cache():
            with last_layer_reads_from(self.decoder, first_scored - 1 if trims else 0):
                hidden_states = self.hidden_states(batch, exchange)
            return head_fn(hidden_states, self.head, batch["labels"])

    def unsharded(self, function: Callable[[], Result]) -> Result:
        """Call a function that uses decoder, head or model by themselves, while their weights are whole.

        Sharded weights are whole only inside of a pass, and this is one. All processes must call it.
        """
        return function()

    def hidden_states(self, batch: PackedBatch, exchange: Exchange | None = None) -> Tensor:
        """``[B, T, D]`` last hidden states, entry ``t`` having seen tokens ``0 .. t`` of its document.

        Call it in `unsharded`, or weights that are sharded may be missing.
        """
        lengths = [stop - start for row in batch["document_boundaries"] for start, stop in pairwise(row)]
        self.check_length(max(lengths, default=0))
        if self._must_part(batch):
            return self._hidden_states_one_by_one(batch)
        arguments = isolation_arguments(
            self.attention, batch["document_boundaries"], batch["input_ids"].shape[1], batch["input_ids"].device
        )
        if exchange is not None:
            if index_free_length(self.base_model.config) is not None:
                raise ValueError(
                    f"Processes cannot share the rows of `{type(self.base_model).__name__}`, whose attention counts"
                    " tokens from the start of what a process holds: set `sequence_parallel_size: 1`."
                )
            arguments["exchange"] = exchange
        with borders_given():
            hidden_states = self.decoder(
                input_ids=batch["input_ids"],
                position_ids=batch["position_ids"],
                use_cache=False,  # a cache object silently switches document isolation off
                **arguments,
            ).last_hidden_state
        # The last token of a part predicts the first of the next part, whose label is here.
        return hidden_states if exchange is None else F.pad(hidden_states, (0, 0, 0, 1))

    def _must_part(self, batch: PackedBatch) -> bool:
        """Return whether the documents of these sequences need separate passes.

        Raises:
            ValueError: If they do, and processes that share weights would make different numbers of passes.
        """
        if all(len(boundaries) <= 2 for boundaries in batch["document_boundaries"]):
            return False
        limit = index_free_length(self.base_model.config)
        if self.isolates_documents and (limit is None or batch["input_ids"].shape[1] <= limit):
            return False
        if self.is_sharded:
            raise ValueError(
                f"`{type(self.base_model).__name__}` cannot keep the documents of a row apart where processes share its"
                f" weights ('{self.attention}' attention): give it rows of one document, or `isolate_documents: false`"
                " for plain concatenation."
            )
        return True

    def _hidden_states_one_by_one(self, batch: PackedBatch) -> Tensor:
        """Return ``[B, T, D]`` last hidden states of documents from separate passes; 0 after the last one."""
        rows = []
        for tokens, boundaries in zip(batch["input_ids"], batch["document_boundaries"], strict=True):
            documents = [
                self.decoder(input_ids=tokens[None, start:stop], use_cache=False).last_hidden_state
                for start, stop in pairwise(boundaries)
            ]
            rows.append(F.pad(torch.cat(documents, dim=1), (0, 0, 0, len(tokens) - boundaries[-1])))
        return torch.cat(rows)

    @property
    def head(self) -> Head:
        """Maps hidden states to logits, with the scale and soft cap that the model applies, in the fastest way."""
        head = active_module(self.base_model.get_output_embeddings())
        kinds = (head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks)
        hooked = any(kinds)
        # Anything else (an adapter, a quantised weight) has to be asked for its logits.
        if type(head) is not nn.Linear or hooked or "forward" in vars(head):
            return self.logits
        return LinearHead(head.weight, head.bias, *self._logit_transform())

    def logits(self, hidden_states: Tensor) -> Tensor:
        """``[.., V]`` logits of ``[.., D]`` hidden states, with the scale and soft cap that the model applies."""
        scale, soft_cap = self._logit_transform()
        logits = self.base_model.get_output_embeddings()(hidden_states)
        if scale != 1.0:
            logits = logits * scale
        return logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap

    def _logit_transform(self) -> tuple[float, float | None]:
        """Return the factor of the model's logits, and the soft cap that is applied after it."""
        config = self.base_model.config.get_text_config(decoder=True)
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere, Falcon-H1, Muse
            scale *= getattr(config, name, None) or 1.0
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            scale /= divisor
        return scale, getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3

    def check_token_ids(self, batch: PackedBatch) -> None:
        """Raise a ``ValueError`` for ids beyond the embedding, which an accelerator reports obscurely."""
        largest = int(batch["input_ids"].max())
        if largest >= self.vocabulary_size:
            raise ValueError(
                f"Token id {largest} is beyond the embedding of {self.vocabulary_size} tokens of"
                f" `{type(self.base_model).__name__}`: the tokenizer is not the one of this model."
            )

    @property
    def attention(self) -> str:
        """Name of the attention implementation in transformers."""
        return self.base_model.config._attn_implementation

    def check_length(self, longest: int) -> None:
        """Raise a ``ValueError`` for a document of more tokens than learned positions, and warn of too many others."""
        config = self.base_model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is None or longest <= limit:
            return
        if getattr(config, "rope_parameters", None) is None:
            raise ValueError(
                f"`{type(self.base_model).__name__}` has {limit} learned positions and cannot read a document of"
                f" {longest} tokens: shorten the documents or use another model."
            )
        if longest <= self._longest_told:  # or a corpus would fill the log
            return
        self._longest_told = longest
        warnings.warn(
            f"A document of {longest} tokens is longer than the {limit} positions that"
            f" `{type(self.base_model).__name__}` was made for (`max_position_embeddings`): expect poor scores.",
            stacklevel=2,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Backbone":
        """Move and cast, but keep rotary frequencies in float32.

        A cast to bfloat16 (`precision: bf16-true`, `.to(torch.bfloat16)`) rounds them, and at 32k tokens the angles
        are then wrong by whole turns.
        """
        frequencies = {name: buffer for name, buffer in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(fn, recurse)
        for name, frequency in frequencies.items():
            parent, _, leaf = name.rpartition(".")
            module = self.get_submodule(parent)
            setattr(module, leaf, frequency.to(getattr(module, leaf).device))
        return self

    def check_rotary_dtype(self) -> None:
        """Raise a ``RuntimeError`` unless rotary frequencies are float32 or wider, and what the config asks for."""
        check_rotary(self.base_model)
