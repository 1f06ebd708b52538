"""A Hugging Face causal LM reduced to its one product: the log-likelihood of tokens, in long and in short contexts."""

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_modules.attention import DOCUMENT_SDPA, isolation_arguments
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import (
    Weighing,
    WeightedLoss,
    Window,
    fused_long_cross_entropy,
    short_context_windows,
    token_log_likelihood,
)
from lightning_modules.functional.head_kernels import (
    HeadKernel,
    LinearHead,
    check_kernel,
    kernel_long_cross_entropy,
    kernel_token_log_likelihood,
)
from lightning_modules.functional.windows import window_batch

log = logging.getLogger(__name__)

WINDOW_TOKENS_PER_PASS = 32_768
"""Tokens of short windows that share a forward pass on an accelerator; on CPU each window has its own."""


class Backbone(nn.Module):
    """Scores packed rows with a causal LM; full logits of a row never exist.

    Everything goes through `forward`, so that wrappers (DDP, FSDP) see decoder and head as one module.

    Args:
        model: A Hugging Face causal LM, or a peft model around one (prompt learning is refused).
        head_kernel: What computes the loss from hidden states where gradients are wanted. Without gradients it is
            always our own chunks: they hold as little then, and round nothing but the logits.

    Raises:
        ValueError: If the model is no causal LM with a decoder and an output head, or uses prompt learning.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, head_kernel: HeadKernel = "chunked") -> None:
        super().__init__()
        if isinstance(model, PeftModel) and model.peft_config[model.active_adapter].is_prompt_learning:
            raise ValueError("Prompt learning adds tokens that nobody scores: use LoRA or another weight adapter.")
        self.model = model
        self.head_kernel: HeadKernel = head_kernel
        self.isolates_documents = True
        if self.base_model.get_output_embeddings() is None or self.decoder is None:
            raise ValueError(f"`{type(self.base_model).__name__}` is no causal LM with a decoder and an output head.")

    @property
    def base_model(self) -> PreTrainedModel:
        """The Hugging Face model itself; adapters inside it stay active."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def decoder(self) -> Any:
        """The module that turns tokens into hidden states; None if there is none."""
        base = self.base_model
        decoder = base.get_decoder()
        # Some models (Llama 4) do not say which of their parts it is and name themselves.
        return getattr(base, base.base_model_prefix, None) if decoder is base else decoder

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding: token ids must stay below it."""
        return self.base_model.get_input_embeddings().weight.shape[0]

    @property
    def has_dropout(self) -> bool:
        """Whether training mode drops anything out."""
        config = self.base_model.config.get_text_config(decoder=True)
        layers = any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.modules())
        return layers or getattr(config, "attention_dropout", 0.0) > 0

    @property
    def device(self) -> torch.device:
        """Where the model takes its input."""
        return self.base_model.get_input_embeddings().weight.device

    @overload
    def forward(self, batch: PackedBatch, weighing: None = None) -> Tensor: ...

    @overload
    def forward(self, batch: PackedBatch, weighing: Weighing) -> WeightedLoss: ...

    def forward(self, batch: PackedBatch, weighing: Weighing | None = None) -> Tensor | WeightedLoss:
        """Log-likelihood of each scored token given everything before it in its document, or the loss made of them.

        Args:
            batch: ``[B, T]`` packed rows.
            weighing: How the tokens make up a loss, for training.

        Returns:
            ``[B, T]`` log-likelihoods in nats, float32; 0 where a token is not scored. With ``weighing``, the loss,
            whose gradients our own kernel has formed already, and what it was made of.

        Raises:
            ValueError: If a document is longer than learned positions allow, or the model cannot keep documents apart.
        """
        hidden_states = self._hidden_states(batch)
        if self.head_kernel != "chunked" and torch.is_grad_enabled():
            arguments = (self.head_kernel, hidden_states, self.linear_head(), batch["labels"])
            if weighing is None:
                return kernel_token_log_likelihood(*arguments)
            return kernel_long_cross_entropy(*arguments, weighing)
        if weighing is None:
            return token_log_likelihood(hidden_states, self.logits, batch["labels"])
        parameters = self.base_model.get_output_embeddings().parameters()
        return fused_long_cross_entropy(hidden_states, self.logits, parameters, batch["labels"], weighing)

    def _hidden_states(self, batch: PackedBatch) -> Tensor:
        self._check_length(max(stop - start for row in batch["document_borders"] for start, stop in pairwise(row)))
        if not self.isolates_documents and any(len(borders) > 2 for borders in batch["document_borders"]):
            raise ValueError(
                f"`{type(self.base_model).__name__}` cannot keep the documents of a row apart ('{self._attention}'"
                " attention): give it rows of one document, or `isolate_documents: false` for plain concatenation."
            )
        return self.decoder(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            use_cache=False,  # a cache object silently switches document isolation off
            **isolation_arguments(
                self._attention,
                batch["document_borders"],
                batch["input_ids"].shape[1],
                batch["input_ids"].device,
            ),
        ).last_hidden_state

    def logits(self, hidden_states: Tensor) -> Tensor:
        """``[.., V]`` logits of ``[.., D]`` hidden states, with the scale and soft cap that the model applies."""
        scale, soft_cap = self._logit_transform()
        logits = self.base_model.get_output_embeddings()(hidden_states)
        if scale != 1.0:
            logits = logits * scale
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        return logits

    def linear_head(self) -> LinearHead:
        """What `logits` computes, for kernels that take the weight instead of calling a module.

        Raises:
            ValueError: If the head is more than a plain linear layer: an adapter, quantised, sharded, or hooked.
        """
        head = self.base_model.get_output_embeddings()
        hooks = (head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks)
        altered = any(hooks) or "forward" in vars(head)
        if type(head) is not nn.Linear or altered:
            kind = f"{type(head).__module__}.{type(head).__qualname__}"
            raise ValueError(
                f"The head of `{type(self.base_model).__name__}` is a `{kind}`{' with hooks' * altered}, and"
                f" `head_kernel: {self.head_kernel}` computes plain linear layers only: set `head_kernel: chunked`."
            )
        return LinearHead(head.weight, head.bias, *self._logit_transform())

    def _logit_transform(self) -> tuple[float, float | None]:
        """What the model multiplies its logits by, and the soft cap that it puts on them then."""
        config = self.base_model.config.get_text_config(decoder=True)
        scale = 1.0
        if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
            scale *= factor
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            scale /= divisor
        return scale, getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3

    @torch.no_grad()
    def short_log_likelihood(self, batch: PackedBatch, *, context_length: int, stride: int) -> tuple[Tensor, Tensor]:
        """Log-likelihood of each token given a short context, in eval mode and without gradient.

        Args:
            batch: ``[B, T]`` packed rows.
            context_length: Length K of the shortest short context, in tokens.
            stride: Number d of tokens that share one window.

        Returns:
            ``[B, T]`` log-likelihoods in nats and ``[B, T]`` bool: where a short context differs from the long one.
            Elsewhere the log-likelihood is 0 and the caller puts the long one in its place.

        Raises:
            ValueError: If the rotation of a position depends on the length of the text.
        """
        self._check_rope()
        short = torch.zeros_like(batch["labels"], dtype=torch.float32)
        differs = torch.zeros_like(batch["labels"], dtype=torch.bool)
        with _eval_mode(self):
            for windows in self._window_passes(batch, context_length, stride):
                log_likelihood = self(window_batch(batch, windows))
                short = short.to(log_likelihood.dtype)
                for scores, (row, (start, scored, stop)) in zip(log_likelihood, windows, strict=True):
                    short[row, scored:stop] = scores[scored - start : stop - start]
                    differs[row, scored:stop] = True
        return short, differs & batch["labels"].ne(IGNORE_INDEX)

    @torch.no_grad()
    def long_and_short(self, batch: PackedBatch, *, context_length: int, stride: int) -> tuple[Tensor, Tensor]:
        """The pair everything else is a function of.

        Args:
            batch: ``[B, T]`` packed rows.
            context_length: Length K of the shortest short context, in tokens.
            stride: Number d of tokens that share one window.

        Returns:
            ``[B, T]`` long and ``[B, T]`` short log-likelihoods in nats, equal where a token has no short context.
        """
        short, differs = self.short_log_likelihood(batch, context_length=context_length, stride=stride)
        long = self(batch)
        return long, torch.where(differs, short, long)

    def check_token_ids(self, batch: PackedBatch) -> None:
        """Raise a ``ValueError`` for ids beyond the embedding, which an accelerator reports obscurely."""
        largest = int(batch["input_ids"].max())
        if largest >= self.vocabulary_size:
            raise ValueError(
                f"Token id {largest} is beyond the embedding of {self.vocabulary_size} tokens of"
                f" `{type(self.base_model).__name__}`: the tokenizer is not the one of this model."
            )

    def check_scoring(self) -> None:
        """Compare our scores of a dozen tokens with the model's own logits, document by document and packed in a row.

        A model that cannot keep our documents apart gets transformers' own masks, and if those do not help either, it
        is only refused rows that hold several.

        Raises:
            ValueError: If they disagree: the model does something to its logits or positions that is not known here,
                and every number would be wrong. If the head kernel is missing, wrong, or unfit for the head.
        """
        if self.head_kernel != "chunked":
            check_kernel(self.head_kernel, self.linear_head())
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocabulary_size, (12,), generator=generator).to(self.device)
        documents = tokens.split([7, 5])
        with torch.no_grad(), _eval_mode(self):
            logits = [self.model(input_ids=part.unsqueeze(0), use_cache=False).logits[0, :-1] for part in documents]
            if not all(torch.isfinite(part).all() for part in logits):
                raise ValueError(
                    f"`{type(self.base_model).__name__}` gives logits that are not finite for a few plain tokens: its"
                    f" weights are damaged, or {self.base_model.dtype} is too narrow for it."
                )
            expected = torch.cat(
                [
                    part.float().log_softmax(-1).gather(-1, document[1:, None]).squeeze(-1)
                    for part, document in zip(logits, documents, strict=True)
                ]
            )
            # Half precision rounds differently for other matrix shapes; a forgotten scale or a leak is far above that.
            exact = logits[0].dtype in (torch.float32, torch.float64)
            tolerance = (0.01 if exact else 0.5) * max(1.0, logits[0].float().std().item())
            error = max(self._head_error(*pair) for pair in zip(documents, logits, strict=True))
            if not error <= (1e-3 if exact else 0.03):
                raise ValueError(
                    f"`{type(self.base_model).__name__}` cannot be scored from its hidden states: its logits are off"
                    f" by {error:.2g} of their spread. It does something to them that is not known here."
                )
            if not self._keeps_apart(documents, expected, tolerance) and self._attention == DOCUMENT_SDPA:
                log.warning("Packed documents need a mask of the whole row: %s", type(self.base_model).__name__)
                self.base_model.set_attn_implementation("sdpa")
            self.isolates_documents = self._keeps_apart(documents, expected, tolerance)

    def _head_error(self, document: Tensor, logits: Tensor) -> float:
        """Largest difference of our logits to the model's own, as a share of their standard deviation.

        Both come from hidden states of the same shape, so that even half precision hardly differs.
        """
        hidden_states = self.decoder(input_ids=document.unsqueeze(0), use_cache=False).last_hidden_state
        difference = self.logits(hidden_states)[0, :-1].float() - logits.float()
        return (difference.abs().max() / logits.float().std().clamp(min=1e-6)).item()

    def _keeps_apart(self, documents: Sequence[Tensor], expected: Tensor, tolerance: float) -> bool:
        return bool((self._score_packed(*documents) - expected).abs().max() <= tolerance)

    def _score_packed(self, *documents: Tensor) -> Tensor:
        """Log-likelihoods of all tokens but the first of each document, packed into one row."""
        tokens = torch.cat(documents).unsqueeze(0)
        borders = [0, *itertools.accumulate(map(len, documents))]
        labels = tokens.clone()
        labels[:, borders[:-1]] = IGNORE_INDEX
        positions = torch.cat([torch.arange(len(document)) for document in documents]).unsqueeze(0).to(tokens.device)
        row = PackedBatch(input_ids=tokens, labels=labels, position_ids=positions, document_borders=[borders])
        return self(row)[labels != IGNORE_INDEX]

    @property
    def _attention(self) -> str:
        return self.base_model.config._attn_implementation

    def _window_passes(
        self, batch: PackedBatch, context_length: int, stride: int
    ) -> Iterator[list[tuple[int, Window]]]:
        """Windows of all rows, grouped by forward pass."""
        windows = [
            (row, window)
            for row, borders in enumerate(batch["document_borders"])
            for window in short_context_windows(borders, context_length=context_length, stride=stride)
        ]
        size = self._windows_per_pass(context_length + stride)
        for start in range(0, len(windows), size):
            yield windows[start : start + size]

    def _windows_per_pass(self, window_length: int) -> int:
        return 1 if self.device.type == "cpu" else max(1, WINDOW_TOKENS_PER_PASS // window_length)

    def _check_rope(self) -> None:
        """Raise a ``ValueError`` for RoPE types by which the same window rotates differently alone and in its text."""
        parameters = getattr(self.base_model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        types = {parameters.get("rope_type"), *(p.get("rope_type") for p in parameters.values() if isinstance(p, dict))}
        if unfit := types & {"dynamic", "longrope"}:
            raise ValueError(
                f"RoPE of type '{unfit.pop()}' rotates by the length of the text, so that a long and a short context"
                " cannot be compared. Set `rope_parameters.rope_type` (with its parameters) to a type that does not,"
                " such as 'yarn', 'linear' or 'default'."
            )

    def _check_length(self, longest: int) -> None:
        config = self.base_model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is None or longest <= limit:
            return
        if getattr(config, "rope_parameters", None) is None:
            raise ValueError(
                f"`{type(self.base_model).__name__}` has {limit} learned positions and cannot read a document of"
                f" {longest} tokens: shorten the documents or use another model."
            )
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
        """Raise a ``RuntimeError`` unless all rotary frequencies are float32 or wider."""
        for name, buffer in self.named_buffers():
            if name.endswith("inv_freq") and torch.finfo(buffer.dtype).bits < 32:
                raise RuntimeError(
                    f"The rotary frequencies `{name}` were cast to {buffer.dtype}, which makes long positions wrong."
                    " Use a mixed precision (`bf16-mixed`) or a strategy that leaves buffers in float32."
                )


@contextlib.contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch dropout off, and afterwards put each submodule back into the mode it was in."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
