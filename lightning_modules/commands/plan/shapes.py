"""What the cost of a model depends on, read off its config and its modules on the meta device."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from lightning_modules.commands.plan.fake import decoder_layers, meta_backbone
from lightning_modules.models.adapters import active_module
from lightning_modules.models.context_extension.patterns.settings import PATTERN_SETTINGS

_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM.

    Attributes:
        name: Its ``model_type``.
        parameters: All, each once.
        trained: Those with a gradient: all, or those of LoRA.
        quantizable: Those of linear layers but the head, which ``model.quantization`` holds in 4 or 8 bits.
        layer_weights: Weights of the decoder's layers that a token is multiplied with; of experts only the chosen ones.
        trained_layer_weights: Those of them that are trained.
        tail_weights: Those of them in the last layer that only tokens need whose output is read: all but key and value.
        head_weights: Vocabulary x hidden size.
        head_trained: Whether the output head is trained.
        tied: Whether head and embedding are one.
        largest_layer: Parameters of the largest layer, with all its experts.
        hidden_size: Width of the hidden states.
        vocabulary: Rows of the head.
        heads: Query heads of a layer.
        query_size: Width of a query and key head.
        value_size: Width of a value head.
        windows: For each layer how many tokens it looks back on, itself included; None for all.
    """

    name: str
    parameters: int
    trained: int
    quantizable: int
    layer_weights: int
    trained_layer_weights: int
    tail_weights: int
    head_weights: int
    head_trained: bool
    tied: bool
    largest_layer: int
    hidden_size: int
    vocabulary: int
    heads: int
    query_size: int
    value_size: int
    windows: tuple[int | None, ...]

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    @classmethod
    def of(cls, config: PreTrainedConfig, lora: dict[str, Any] | None = None) -> "ModelShape":
        """Sizes of the model that a config describes; nothing is loaded.

        Args:
            config: Of a causal LM of attention layers, each full or with a sliding window.
            lora: Arguments of ``peft.LoraConfig``; the other weights are frozen.

        Raises:
            ValueError: If it is no causal LM, or has layers or experts of another kind.
        """
        text = config.get_text_config(decoder=True)
        windows = _windows(text)
        backbone = meta_backbone(config, lora=lora)
        layers = decoder_layers(backbone)[2]
        heads, query_size, value_size = _heads(text)
        weights = [_LayerWeights.of(layer, text) for layer in layers]
        embedding = active_module(backbone.base_model.get_input_embeddings()).weight
        head = next(p for p in active_module(backbone.base_model.get_output_embeddings()).parameters() if p.ndim == 2)
        key_and_value = text.hidden_size * (query_size + value_size) * _key_value_heads(text)
        return cls(
            name=config.model_type,
            parameters=sum(p.numel() for p in backbone.parameters()),
            trained=sum(p.numel() for p in backbone.parameters() if p.requires_grad),
            quantizable=_quantizable(backbone.base_model),
            layer_weights=sum(part.active for part in weights),
            trained_layer_weights=sum(part.trained for part in weights),
            tail_weights=max(weights[-1].active - key_and_value, 0),
            head_weights=head.numel(),
            head_trained=head.requires_grad,
            tied=head is embedding,
            largest_layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            hidden_size=text.hidden_size,
            vocabulary=head.shape[0],
            heads=heads,
            query_size=query_size,
            value_size=value_size,
            windows=windows,
        )


def _quantizable(model: nn.Module) -> int:
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = (
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not {"lora_A", "lora_B"} & set(name.split("."))
    )
    return sum(module.weight.numel() for module in linear)


@dataclass(frozen=True)
class _LayerWeights:
    active: int
    trained: int

    @classmethod
    def of(cls, layer: nn.Module, config: PreTrainedConfig) -> "_LayerWeights":
        """Weights of a layer that a token is multiplied with, and those that are trained."""
        weights = list(_matrices(layer, config))
        return cls(round(sum(n for n, _ in weights)), round(sum(n for n, trained in weights if trained)))


def _matrices(layer: nn.Module, config: PreTrainedConfig) -> Iterator[tuple[float, bool]]:
    """Size of each matrix product per token, and whether its weight is trained."""
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            continue
        if parameter.ndim > 3 or (parameter.ndim == 3 and "experts" not in name):
            raise ValueError(f"The weight `{name}` {list(parameter.shape)} is no matrix: the model cannot be planned.")
        yield parameter.numel() * _chosen_share(name, config), parameter.requires_grad


def _chosen_share(name: str, config: PreTrainedConfig) -> float:
    if not re.search(r"(^|\.)experts(\.|$)", name):
        return 1.0
    chosen, experts = (_first(config, names) for names in (_CHOSEN_EXPERTS, _EXPERTS))
    if not chosen or not experts:
        missing = "how many experts a token chooses" if experts else "how many experts there are"
        raise ValueError(f"The config of `{config.model_type}` does not say {missing}: the model cannot be planned.")
    return chosen / experts


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _heads(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Query heads and the width of their queries and of their values."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query = getattr(config, "qk_head_dim", None) or size  # DeepSeek's latent attention
    return config.num_attention_heads, query, getattr(config, "v_head_dim", None) or size


def _key_value_heads(config: PreTrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """How far each layer looks back."""
    if not getattr(config, "num_attention_heads", None):
        raise ValueError(f"A model of type `{config.model_type}` has no attention heads: it cannot be planned.")
    rope = getattr(config, "rope_parameters", None) or {}
    if (pattern := PATTERN_SETTINGS.get(rope.get("rope_type", ""))) is not None:
        return (pattern.keys and pattern.keys(rope),) * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    default = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or default
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise ValueError(f"Layers of type '{unknown[0]}' cannot be planned, only full and sliding-window attention.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
