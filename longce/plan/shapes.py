"""Read the sizes that decide a model's cost from its config and its modules on the meta device."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_modules.models.context_extension.frequencies import global_parameters
from lightning_modules.models.context_extension.patterns.settings import PATTERN_SETTINGS
from lightning_modules.models.loading.adapters import active_module
from longce.plan.activations import meta_backbone

_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM."""

    name: str  # its `model_type`
    parameters: int  # shared ones count once
    trained: int  # parameters with a gradient: all, or those of LoRA
    quantizable: int  # parameters of linear layers except the head, which `model.quantization` stores in 4 or 8 bits
    layer_weights: int  # weights of the layers that a token is multiplied with; of experts only the chosen ones
    trained_layer_weights: int
    head_weights: int  # vocabulary x hidden size
    head_trained: bool
    tied: bool  # whether head and embedding share their weight
    largest_layer: int  # parameters, with all its experts
    vocabulary: int
    output_width: int  # numbers per token in the output of a layer's attention
    pair_flops: int  # operations of one layer's attention for each pair of tokens
    checkpointed: int  # number of layers that can be checkpointed one by one: all, or none in older classes of the hub
    windows: tuple[int | None, ...]  # tokens that each layer looks back on, itself included; None for all

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    @property
    def trained_head_weights(self) -> int:
        """Weights of the head that are trained."""
        return self.head_weights if self.head_trained else 0

    @property
    def vocabulary_weights(self) -> int:
        """Weights of head and embedding together."""
        return self.head_weights if self.tied else 2 * self.head_weights

    @classmethod
    def of(cls, config: PreTrainedConfig, lora: dict[str, Any] | None = None) -> "ModelShape":
        """Return the sizes of the model that a config describes, with only ``lora`` trained; loads no weights."""
        text = config.get_text_config(decoder=True)
        windows = _attention_windows(text)
        backbone = meta_backbone(config, lora=lora)
        layers = _find_layers(backbone.decoder, text.num_hidden_layers)
        used_weights, trained_weights = zip(*(_layer_weights(layer, text) for layer in layers), strict=True)
        embedding = active_module(backbone.base_model.get_input_embeddings()).weight
        head_parameters = active_module(backbone.base_model.get_output_embeddings()).parameters()
        head = next(parameter for parameter in head_parameters if parameter.ndim == 2)
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        query = getattr(text, "qk_head_dim", None) or size  # DeepSeek's latent attention
        value = getattr(text, "v_head_dim", None) or size
        return cls(
            name=config.model_type,
            parameters=_count_numbers(backbone.parameters()),
            trained=_count_numbers(p for p in backbone.parameters() if p.requires_grad),
            quantizable=_count_quantizable(backbone.base_model, head),
            layer_weights=sum(used_weights),
            trained_layer_weights=sum(trained_weights),
            head_weights=head.numel(),
            head_trained=head.requires_grad,
            tied=head is embedding,
            largest_layer=max(_count_numbers(layer.parameters()) for layer in layers),
            vocabulary=head.shape[0],
            output_width=text.num_attention_heads * value,
            pair_flops=2 * text.num_attention_heads * (query + value),
            checkpointed=sum(isinstance(layer, GradientCheckpointingLayer) for layer in layers),
            windows=windows,
        )


def _find_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """Return the decoder's layers, its only list of this length."""
    return next(part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == count)


def _count_numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _count_quantizable(model: nn.Module, head: Tensor) -> int:
    """Count the weights of linear layers except those of the head and of adapters."""
    count = 0
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) and part.weight is not head and "lora_" not in name:
            count += part.weight.numel()
    return count


def has_experts(config: PreTrainedConfig) -> bool:
    """Return whether a model has experts, whose products have the type of their weights, also in autocast."""
    text = config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in _EXPERTS)


def _layer_weights(layer: nn.Module, config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of a layer's weights that a token is multiplied with, and of the trained ones among them."""
    active = 0.0
    trained = 0.0
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            continue
        size = parameter.numel() * _chosen_share(name, config)
        active += size
        trained += size * parameter.requires_grad
    return round(active), round(trained)


def _first_value(config: PreTrainedConfig, names: Sequence[str]) -> Any:
    """Return the first value under one of the names that is neither missing nor 0."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return None


def _chosen_share(name: str, config: PreTrainedConfig) -> float:
    """Return the fraction of a weight that a token is multiplied with: below 1 for experts."""
    if not re.search(r"(^|\.)experts(\.|$)", name):
        return 1.0
    chosen = _first_value(config, _CHOSEN_EXPERTS)
    experts = _first_value(config, _EXPERTS)
    if not chosen or not experts:
        raise ValueError(f"The config of `{config.model_type}` lacks the number of experts, which `longce plan` needs.")
    return chosen / experts


def _attention_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return how many tokens each layer attends to."""
    if not getattr(config, "num_attention_heads", None):
        raise ValueError(f"A model of type `{config.model_type}` has no attention heads, which `longce plan` needs.")
    rope = global_parameters(config)
    seen = None  # of a layer that sees the whole text
    pattern = PATTERN_SETTINGS.get(rope.get("rope_type", ""))
    if pattern is not None and pattern.keys is not None:
        seen = pattern.keys(rope)
    window = getattr(config, "sliding_window", None)
    default = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or default
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ValueError(
            f"`longce plan` supports full and sliding-window attention only, not layers of type '{unknown[0]}'."
        )
    return tuple(window if kind == "sliding_attention" else seen for kind in kinds)
