"""Architectures of GGUF files: which config their metadata describes, and which parameter each tensor is.

The rules are those of llama.cpp, whose converter wrote the file and whose defaults hold for keys that it lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_modules.models.loading.gguf.metadata import Metadata, exact_float

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of factors by which the RoPE frequencies of Llama 3 are divided. It is no parameter of the model."""

_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """One kind of model in GGUF files.

    Attributes:
        model_type: Type of its config in transformers.
        parts: Modules of a layer by their names in the file.
        rotates_neighbors: Whether llama.cpp rotates neighboring elements of a head, so that rows have another order.
        norm_offset: What the converter adds to the weights of norms.
    """

    model_type: str
    parts: Mapping[str, str]
    rotates_neighbors: bool = False
    norm_offset: float = 0.0


ARCHITECTURES = {
    "llama": Architecture("llama", _DENSE, rotates_neighbors=True),
    "qwen2": Architecture("qwen2", _DENSE),
    "qwen3": Architecture("qwen3", _DENSE | _HEAD_NORMS),
    "gemma3": Architecture("gemma3_text", _DENSE | _HEAD_NORMS | _FOUR_NORMS, norm_offset=1.0),
}
"""Architectures by their names in files. Each is compared with transformers' own logits in the tests."""


def read_config(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: torch.Tensor | None) -> Any:
    """Return the config of the model in a file, and take all values that it is made of.

    Args:
        metadata: The file's values.
        shapes: Shapes of its tensors by name.
        factors: The tensor `ROPE_FACTORS`, if the file has it.

    Raises:
        ValueError: If a value is missing, or one that cannot be converted is set.
    """
    sizes = _read_sizes(metadata, shapes)
    rope = _read_rope(metadata, sizes["max_position_embeddings"], factors)
    settings: dict[str, Any] = {
        **sizes,
        "rms_norm_eps": exact_float(metadata.take("attention.layer_norm_rms_epsilon", 0.0)),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": rope,
    }
    if metadata.architecture == "gemma3":
        settings |= _read_gemma_3(metadata, sizes, rope)
    if metadata.architecture == "llama":
        settings["attention_bias"] = any(".attn_" in name and name.endswith(".bias") for name in shapes)
        settings["mlp_bias"] = any(".ffn_" in name and name.endswith(".bias") for name in shapes)
    if settings["rms_norm_eps"] <= 0:
        metadata.refuse("attention.layer_norm_rms_epsilon", settings["rms_norm_eps"], "a number above 0")
    return AutoConfig.for_model(ARCHITECTURES[metadata.architecture].model_type, **settings)


def _read_sizes(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    vocabulary, stored = shapes.get("token_embd.weight", (0, 0))
    layers = metadata.take_size("block_count")
    if layers > len(shapes):
        metadata.refuse("block_count", layers, f"a number of layers that the file's {len(shapes)} tensors can make up")
    width, heads = metadata.take_size("embedding_length"), metadata.take_size("attention.head_count")
    if width != stored:
        metadata.refuse("embedding_length", width, f"{stored}, the width of the file's embedding,")
    head_dim = metadata.take_size("attention.key_length", max(width // heads, 1))
    # Values that transformers derives from others, and parts that these architectures lack.
    metadata.expect("attention.value_length", head_dim)
    metadata.expect("rope.dimension_count", head_dim)
    metadata.expect("vocab_size", vocabulary)
    metadata.expect("attention.causal", True)
    for name in ("expert_count", "expert_used_count", "pooling_type"):
        metadata.expect(name, 0)
    if metadata.architecture != "gemma3":
        metadata.expect("attention.sliding_window", 0)
    return {
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": metadata.take_size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.take_size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.take_size("context_length"),
    }


def _read_rope(metadata: Metadata, trained: int, factors: torch.Tensor | None) -> dict[str, Any]:
    """Return the parameters of RoPE, of the layers without a window; ``trained`` is the model's context length."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": exact_float(metadata.take("rope.freq_base", 1e4))}
    kind = metadata.take("rope.scaling.type", "linear")
    # 0 means not scaled.
    factor = exact_float(metadata.take("rope.scaling.factor", 0.0)) or 1.0
    original = metadata.take("rope.scaling.original_context_length")
    betas = [(name, metadata.take(f"rope.scaling.yarn_{name}")) for name in ("beta_fast", "beta_slow")]
    metadata.take("rope.scaling.finetuned")  # whether the model was trained with it: a remark
    metadata.expect("rope.scale_linear", 0.0, 1.0)  # an old name of the factor
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        metadata.expect(f"rope.scaling.{name}", 1.0)
    if kind not in ("none", "linear", "yarn"):
        metadata.refuse("rope.scaling.type", kind, "none, linear or yarn")
    is_scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
    if factors is not None:
        if is_scaled:
            metadata.refuse("rope.scaling.type", kind, f"none beside the tensor `{ROPE_FACTORS}`")
        return _llama_3_rope(metadata, rope["rope_theta"], factors, original or 8192)
    if is_scaled:
        rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original or trained
        rope |= {name: exact_float(value) for name, value in betas if value is not None}
    return rope


def _llama_3_rope(metadata: Metadata, theta: float, factors: torch.Tensor, original: int) -> dict[str, Any]:
    """Return the parameters of which the factors of Llama 3 were made; raise a ``ValueError`` if they are others."""
    width = 2 * len(factors)
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(factors.max()), "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original}
    config = AutoConfig.for_model(
        "llama", head_dim=width, hidden_size=width, num_attention_heads=1, rope_parameters=rope
    )
    # Files have the factors, and not what they were made of.
    unscaled = 1 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(unscaled / frequencies, factors, rtol=1e-3):
        raise ValueError(
            f"'{metadata.name}' scales RoPE by `{ROPE_FACTORS}` in another way than Llama 3, so its long contexts would"
            " be wrong. Use the model's folder of the Hugging Face hub instead."
        )
    return rope


def _read_gemma_3(metadata: Metadata, sizes: Mapping[str, int], rope: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of Gemma 3 that other architectures lack."""
    layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
    cap = exact_float(metadata.take("final_logit_softcapping", 0.0))
    # A rule of llama.cpp: only the largest model, of 62 layers, scales attention by the width of all heads.
    scalar = sizes["hidden_size"] // heads if layers == 62 else sizes["head_dim"]
    local = exact_float(metadata.take("rope.freq_base_swa", 1e4))
    window = metadata.take("attention.sliding_window", 0)
    pattern = metadata.take("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers:
        slides = [bool(each) for each in pattern]
    elif pattern is None or (isinstance(pattern, int) and pattern >= 0):
        period = 6 if pattern is None else pattern
        slides = [period == 0 or index % period < period - 1 for index in range(layers)]
    else:
        metadata.refuse(
            "attention.sliding_window_pattern", pattern, f"a number or one value for each of {layers} layers"
        )
    if window == 0:  # as llama.cpp: without a window, all layers are the same
        slides = [False] * layers
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "sliding_window": window or sizes["max_position_embeddings"],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": cap or None,
    }


def parameter_names(architecture: str, config: PreTrainedConfig) -> dict[str, str]:
    """Return the parameter's name in transformers, without ``.weight``, by the beginning of a tensor's name."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(config.num_hidden_layers):
        for part, module in ARCHITECTURES[architecture].parts.items():
            names[f"blk.{layer}.{part}"] = f"model.layers.{layer}.{module}"
    return names


def original_values(name: str, values: NDArray[np.float32], architecture: str, config: Any) -> NDArray[np.float32]:
    """Undo what llama.cpp's converter changes in a tensor, which is named as in transformers."""
    rules = ARCHITECTURES[architecture]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if rules.rotates_neighbors and part in heads:
        rows = values.reshape(heads[part], -1, 2, *values.shape[1:])
        return rows.swapaxes(1, 2).reshape(values.shape)
    return values - np.float32(rules.norm_offset) if "norm" in part else values
