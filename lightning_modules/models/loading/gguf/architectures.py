"""Architectures of GGUF files: the config that their metadata describes, and how their tensors are stored.

The rules are those of llama.cpp, whose converter wrote the file and whose defaults hold for keys that it lacks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_modules.models.loading.gguf.metadata import Metadata, exact_float

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""Types of model in transformers by architecture. Tests compare each with transformers' own logits."""


def read_config(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: torch.Tensor | None) -> Any:
    """Return the config of the model in a file, and remove all values that it is computed from.

    Args:
        metadata: The file's values.
        shapes: Shapes of its tensors by name.
        factors: Divisors of the RoPE frequencies of Llama 3, if the file has them.

    Raises:
        ValueError: If a value is missing, or one that cannot be converted is set.
    """
    layers = metadata.take_size("block_count")
    width = metadata.take_size("embedding_length")
    heads = metadata.take_size("attention.head_count")
    head_dim = metadata.take_size("attention.key_length", max(width // heads, 1))
    if layers > len(shapes):  # some configs make a list of such a length
        metadata.refuse("block_count", layers, f"a number of layers that the file's {len(shapes)} tensors can make up")
    settings: dict[str, Any] = {
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": metadata.take_size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.take_size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.take_size("context_length"),
        "rms_norm_eps": exact_float(metadata.take("attention.layer_norm_rms_epsilon", 0.0)),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    if settings["rms_norm_eps"] <= 0:
        metadata.refuse("attention.layer_norm_rms_epsilon", settings["rms_norm_eps"], "a number above 0")
    # Values that transformers derives from others.
    metadata.expect("attention.value_length", head_dim)
    metadata.expect("rope.dimension_count", head_dim)
    metadata.expect("vocab_size", settings["vocab_size"])
    settings["rope_parameters"] = _read_rope(metadata, settings["max_position_embeddings"], factors)
    if metadata.architecture == "gemma3":
        settings |= _read_gemma_3(metadata, settings)
    if metadata.architecture == "llama":
        settings["attention_bias"] = any(".attn_" in name and name.endswith(".bias") for name in shapes)
        settings["mlp_bias"] = any(".ffn_" in name and name.endswith(".bias") for name in shapes)
    return AutoConfig.for_model(ARCHITECTURES[metadata.architecture], **settings)


def _read_rope(metadata: Metadata, trained: int, factors: torch.Tensor | None) -> dict[str, Any]:
    """Return the parameters of RoPE, of the layers without a window; ``trained`` is the model's context length."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": exact_float(metadata.take("rope.freq_base", 1e4))}
    metadata.take("rope.scaling.finetuned")  # a remark: whether the model was trained with it
    if factors is not None:
        metadata.expect("rope.scaling.type", "none")
        metadata.expect("rope.scaling.original_context_length", 8192)
        return rope | _match_llama_3(metadata, rope["rope_theta"], factors)
    kind = metadata.take("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        metadata.refuse("rope.scaling.type", kind, "none, linear or yarn")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": exact_float(metadata.take("rope.scaling.factor", 1.0))}
        original = metadata.take("rope.scaling.original_context_length", trained)
        if kind == "yarn":
            rope["original_max_position_embeddings"] = original
    return rope


def _match_llama_3(metadata: Metadata, theta: float, factors: torch.Tensor) -> dict[str, Any]:
    """Return the parameters that the factors of Llama 3 were computed from; raise a ``ValueError`` for others."""
    width = 2 * len(factors)
    rope = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = AutoConfig.for_model(
        "llama", head_dim=width, hidden_size=width, num_attention_heads=1, rope_parameters={**rope, "rope_theta": theta}
    )
    # Files store the factors, but not the parameters that they were computed from.
    unscaled = 1 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(unscaled / frequencies, factors, rtol=1e-3):
        raise ValueError(
            f"'{metadata.name}' does not scale RoPE like Llama 3, so its long contexts would be wrong. Use the"
            " model's folder of the Hugging Face hub instead."
        )
    return rope


def _read_gemma_3(metadata: Metadata, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Gemma 3 that other architectures lack, or that it has for each kind of layer."""
    layers = settings["num_hidden_layers"]
    heads = settings["num_attention_heads"]
    local = exact_float(metadata.take("rope.freq_base_swa", 1e4))
    # Rules of llama.cpp: every sixth layer has no window, and only the largest model, of 62 layers, scales attention by
    # the width of all heads.
    period = ["sliding_attention"] * 5 + ["full_attention"]
    kinds = (period * layers)[:layers]
    scaled_width = settings["head_dim"]
    if layers == 62:
        scaled_width = settings["hidden_size"] // heads
    return {
        "layer_types": kinds,
        "sliding_window": metadata.take_size("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": scaled_width,
        "final_logit_softcapping": None,
    }


def original_values(name: str, values: NDArray[np.float32], architecture: str, config: Any) -> NDArray[np.float32]:
    """Undo what llama.cpp's converter changes in a tensor, which is named as in transformers."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if architecture == "llama" and part in heads:  # llama.cpp rotates neighboring elements of a head
        rows = values.reshape(heads[part], -1, 2, *values.shape[1:])
        return rows.swapaxes(1, 2).reshape(values.shape)
    if architecture == "gemma3" and "norm" in part:
        return values - np.float32(1)
    return values
