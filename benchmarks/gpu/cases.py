"""Rows of `benchmarks/on_gpu.py`, with the operations and the memory that `longce plan` expects of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from lightning_modules.models.short_context import ShortContextConfig
from longce.plan.activations import ActivationBytes
from longce.plan.flops import Flops, ce_step_flops, forward_flops, scoring_flops, short_pass_flops
from longce.plan.hardware import GPU, Range, Rates
from longce.plan.memory import (
    HEAD_ROWS,
    Memory,
    Training,
    largest_short_pass,
    logit_bytes,
    training_memory,
)
from longce.plan.shapes import ModelShape

LLAMAS = {
    "8B": {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    "7B": {"num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000},
}
TINY = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs on the device; ``--device cpu`` replaces them with tiny ones."""

    tokens: int = 32768
    context_length: int = 4096
    stride: int = 1024
    rounds: int = 1  # after one to warm up


@dataclass(frozen=True)
class Case:
    """One row: a pass, scoring, or an optimizer step."""

    name: str
    kind: str  # pass, LongPPL, CE, LongCE, authors
    llama: str = "8B"
    layers: int = 8
    autocast: bool = False  # float32 weights; otherwise all is bfloat16
    documents: int = 1
    wide: bool = False  # d = K, so that windows do not overlap
    plain: bool = False  # whether `longce plan` compares it with the rates of products and attention
    settings: dict[str, Any] = field(default_factory=dict)  # of LongContextLM

    def short_context(self, sizes: Sizes) -> ShortContextConfig:
        """Return K and d."""
        return ShortContextConfig(sizes.context_length, sizes.context_length if self.wide else sizes.stride)


def _cases() -> Iterator[Case]:
    """Yield the rows, the most important ones first."""
    for kind in ("pass", "LongPPL", "CE", "LongCE"):
        yield Case(f"8B, bf16: {kind}", kind, layers=32, plain=True)
    for kind in ("CE", "LongCE"):
        yield Case(f"16 layers of 7B, bf16: {kind}", kind, llama="7B", layers=16, plain=True)
    for kind in ("pass", "CE", "LongCE"):
        yield Case(f"8 layers, fp32 + autocast: {kind}", kind, autocast=True, plain=True)
    for kind in ("CE", "LongCE"):
        yield Case(f"8 layers, bf16: {kind}", kind, plain=True)
    step = partial(Case, kind="LongCE")
    yield step("8 layers, bf16: LongCE, d = K", wide=True)
    yield step("8 layers, bf16: LongCE, selective checkpointing", settings={"gradient_checkpointing": "selective"})
    yield step("8 layers, bf16: LongCE, 4 packed documents", documents=4)
    yield step("8 layers, bf16: LongCE, compiled", settings={"compile": True})
    yield Case("8 layers, bf16: LongPPL", "LongPPL")
    yield Case("8 layers, bf16: LongPPL, compiled", "LongPPL", settings={"compile": True})
    for number in (2, 3):
        flash = {"attn_implementation": f"flash_attention_{number}"}
        yield step(f"8 layers, bf16: LongCE, FlashAttention-{number}", settings=flash)
        yield step(f"8 layers, bf16: LongCE, FlashAttention-{number}, packed", documents=4, settings=flash)
    both = {"compile": True, "attn_implementation": "flash_attention_3"}
    yield step("8 layers, bf16: LongCE, compiled, FlashAttention-3", settings=both)
    residual = {"residual_dtype": "float32"}
    yield step("8 layers, fp32 + autocast: LongCE, float32 residual stream", autocast=True, settings=residual)
    yield step("8 layers, bf16: LongCE, offloaded activations", settings={"offload_activations": True})
    yield Case("8 layers, bf16: the authors' step", "authors")


CASES = {case.name: case for case in _cases()}


# --------------------------------------------------------------------------------------------------------- predictions


def make_config(llama: str, layers: int, device: str) -> PreTrainedConfig:
    """Return a config with the published sizes, or a tiny one for a rehearsal."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": layers, **LLAMAS[llama]}
    if device == "cpu":
        sizes |= {**TINY, "num_hidden_layers": 2, "vocab_size": 500}
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return AutoConfig.for_model("llama", **sizes, max_position_embeddings=131072, rope_parameters=rope)


@cache
def _measure_model(
    llama: str, layers: int, autocast: bool, device: str, bfloat16_residual: bool = True
) -> tuple[ModelShape, ActivationBytes]:
    config = make_config(llama, layers, device)
    dtype, products = (torch.float32, torch.bfloat16) if autocast else (torch.bfloat16, None)
    return ModelShape.of(config), ActivationBytes(config, dtype, products, bfloat16_residual)


def predict(case: Case, sizes: Sizes, device: str) -> tuple[Flops, float]:
    """Return the FLOPs of a row, and the bytes that the plan expects at its peak."""
    residual = case.settings.get("residual_dtype") != "float32"
    shape, activations = _measure_model(case.llama, case.layers, case.autocast, device, residual)
    tokens, short_context = sizes.tokens // case.documents, case.short_context(sizes)
    checkpointing = "selective" if case.settings.get("gradient_checkpointing") == "selective" else "full"
    step = ce_step_flops(shape, tokens, checkpointing)
    length, stride = short_context.window_length, short_context.stride
    flops = {
        "pass": forward_flops(shape, tokens, tokens - 1),
        "LongPPL": scoring_flops(shape, shape, tokens, short_context, shared_pass=True),
        "CE": step,
        "LongCE": step + short_pass_flops(shape, tokens, short_context),
        # Windows start at 0, and every one computes all layers and all logits.
        "authors": step + forward_flops(shape, length, length) * max((tokens - length + stride) // stride, 0),
    }[case.kind]
    dtype = activations.dtype
    if case.kind in ("pass", "LongPPL"):
        memory = scoring_memory(shape, activations, sizes.tokens, dtype, short_context=short_context).peak
    else:
        training = Training(
            sizes.tokens,
            short_context=short_context,
            short_pass=case.kind != "CE",
            dtype=dtype,
            autocast=activations.autocast,
            checkpointing=checkpointing,
            accumulates=False,
            step_copy=False,
            offload_activations=bool(case.settings.get("offload_activations")),
        )
        memory = training_memory(shape, activations, training).peak
    if case.kind == "authors":  # logits, their float32 copy, and its softmax
        memory += sizes.tokens * shape.vocabulary * (2 + 4 + 4)
    return flops * case.documents, memory


def useful_flops(case: Case, sizes: Sizes, device: str) -> float:
    """Return the FLOPs without recomputation: of a backward pass, twice those of its forward pass."""
    if case.kind in ("pass", "LongPPL"):
        return predict(case, sizes, device)[0].total
    shape, tokens = _measure_model(case.llama, case.layers, case.autocast, device)[0], sizes.tokens // case.documents
    useful = 3 * forward_flops(shape, tokens, tokens - 1).total
    if case.kind != "CE":
        useful += short_pass_flops(shape, tokens, case.short_context(sizes)).total
    return useful * case.documents


def predict_seconds(case: Case, sizes: Sizes, device: str, gpu: GPU) -> Range:
    """Return how long all rounds of a row may take, with building and compiling the model."""
    rounds = Rates().seconds(predict(case, sizes, device)[0], gpu).times(1 + sizes.rounds)
    compilation = Range(20.0, 50.0) if "compile" in case.settings else Range(0.0, 0.0)
    return Range(1.0 + rounds.low + compilation.low, 4.0 + rounds.high + compilation.high)


def scoring_memory(
    shape: ModelShape,
    activations: ActivationBytes,
    tokens: int,
    dtype: torch.dtype,
    short_context: ShortContextConfig | None,
) -> Memory:
    """Return the memory of scoring one document without gradients, in ``short_context`` as well if there is one."""
    chunk = min(HEAD_ROWS, tokens) * shape.vocabulary * logit_bytes(dtype.itemsize, backward=False)
    phases = {
        "long pass": {"one layer of the document": tokens * activations.forward},
        "head": {"last hidden states, twice": 2.0 * tokens * activations.hidden, "head: a chunk of logits": chunk},
    }
    if short_context is not None:
        together = largest_short_pass(Training(tokens, 1, short_context))
        phases["short windows"] = {"one layer of the windows": together * activations.forward}
    return Memory({"weights": float(shape.parameters * dtype.itemsize)}, phases)
