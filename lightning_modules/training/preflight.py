"""Checks before training, so that a run that would fail does so immediately."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import PreTrainedConfig

from lightning_modules.functional.checks import MAX_PROCESSES, check_count
from lightning_modules.models.attention import DOCUMENT_SDPA
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.frequencies import global_parameters
from lightning_modules.models.context_extension.patterns import PATTERNS
from lightning_modules.models.context_extension.rotary_checks import (
    check_rotary,
    check_static,
    depends_on_length,
    rope_parameter_sets,
)
from lightning_modules.models.loading.adapters import find_adapters, quantization_config
from lightning_modules.models.loading.checks import check_scoring, has_training_noise
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.dtypes import SLOW_WEIGHTS_REMEDY, warn_of_slow_dtype
from lightning_modules.models.loading.load import (
    check_model,
    check_quantization,
    choose_attention,
    has_weights,
    load_backbone,
    register_attention,
)
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.sequence_group import SequenceGroup
from lightning_modules.models.short_context import ShortContextConfig
from lightning_modules.models.tokenization.tokenizer import warn_of_other_tokenizer
from lightning_modules.objectives import Objective, unwrap
from lightning_modules.training.facts import loaded_tokenizer


def check_early(
    objective: Objective,
    short_context: ShortContextConfig,
    loading: ModelConfig,
    sequence_length: int | None,
    sequence_parallel_size: int = 1,
    skips_to: int | None = None,
) -> None:
    """Check settings before text is tokenized or weights are loaded.

    ``sequence_length`` is None without training, and ``skips_to``, the target length of PoSE, without PoSE.
    """
    if sequence_length is not None and objective.uses_short_context:
        short_context.check_sequence(sequence_length)
    config = check_model(loading)
    if config is None:
        if sequence_length is not None:
            raise ValueError(f"'{loading.pretrained_model_name_or_path}' is a server, whose model cannot be trained.")
        return
    check_sequence_parallelism(config, sequence_parallel_size, loading.attn_implementation)
    check_sparse_attention(config, loading, sequence_length, sequence_parallel_size)
    if skips_to is not None:
        check_skipped_positions(config, register_attention(choose_attention(loading, config), config), skips_to)
    if sequence_length is not None and find_adapters(loading.pretrained_model_name_or_path) is not None:
        raise ValueError(
            f"'{loading.pretrained_model_name_or_path}' has adapters, which cannot be trained further without their"
            " checkpoint: resume from it (`--ckpt_path`), or export it merged."
        )
    if loading.lora is not None:  # peft checks names and values only when it builds the adapters
        load_backbone(replace(loading, quantization=None), with_weights=False)
    _check_quantization(loading, config)
    if sequence_length is not None:
        check_trainable(loading, config)
        check_static(config, compares=objective.uses_short_context)


def check_loaded(backbone: Scorer, trainer: Trainer, group: SequenceGroup | None = None) -> None:
    """Check the scores of a loaded model on its device; a served one was probed when it was connected."""
    if not isinstance(backbone, Backbone):
        return
    check_rotary(backbone.base_model)
    with trainer.precision_plugin.forward_context():  # flash attention does not support float32
        if trainer.is_global_zero:
            _warn_of_slow_dtype(backbone, str(trainer.precision))
        check_scoring(backbone)
        if group is not None:
            group.check_backbone(backbone)


def warn_of_noise(objective: Objective, backbone: Backbone, trainer: Trainer) -> None:
    """Warn about dropout and other noise of a model in training mode, which would count as an effect of the context."""
    with trainer.precision_plugin.forward_context():
        is_noisy = objective.uses_short_context and has_training_noise(backbone)
    if is_noisy:
        rank_zero_warn(
            "The model has dropout or noise in its router, which adds noise to every token weight: it is on in the long"
            " pass and off in the short one. Set the keys of `model.model_config` for it (`attention_dropout`,"
            " `router_jitter_noise`) and `lora_dropout` to 0."
        )


def _warn_of_slow_dtype(backbone: Backbone, precision: str) -> None:
    mixed = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if mixed else backbone.base_model.dtype
    remedy = SLOW_WEIGHTS_REMEDY if precision.startswith("32") else "`trainer.precision: 32-true`"
    warn_of_slow_dtype(backbone.device.type, dtype, remedy)


def _check_quantization(loading: ModelConfig, config: PreTrainedConfig) -> None:
    """Raise a ``ValueError`` for unknown arguments of quantization, or without weights to quantize."""
    if loading.quantization is not None:
        check_quantization(loading.pretrained_model_name_or_path, config)
        quantization_config(loading.quantization, compute_dtype=torch.float32)


def check_trainable(loading: ModelConfig, config: PreTrainedConfig) -> None:
    """Raise a ``ValueError`` for training that does not fit a model's config.

    This is full training of quantized weights, a loss that balances experts, and more checkpointed layers than it has.
    """
    text: Any = config.get_text_config(decoder=True)
    layers = loading.checkpointed_layers
    if layers is not None and layers > text.num_hidden_layers:
        raise ValueError(
            f"`model.checkpointed_layers` = {layers} exceeds the {text.num_hidden_layers} layers of the model: lower"
            " it, or remove it."
        )
    if getattr(text, "output_router_logits", False):
        raise ValueError(
            "The model's config enables the auxiliary loss of its router, which is not computed here: set"
            " `output_router_logits` to false in `model.model_config` to train without it."
        )
    quantized = loading.quantization is not None or getattr(config, "quantization_config", None) is not None
    if quantized and loading.lora is None:
        raise ValueError("Quantized weights cannot be trained: set `model.lora` to train adapters instead.")


def check_fit(objective: Objective, loading: ModelConfig, backbone: Backbone, data: Any) -> None:
    """Check the loaded model and its data module at the start of training, and warn about settings that add noise."""
    check_stored(objective, getattr(data, "stored_influence", None))
    check_trainable(loading, backbone.base_model.config)
    pose = getattr(data, "pose", None)
    if pose is not None:
        check_skipped_positions(backbone.base_model.config, backbone.attention, pose.target_length)
    check_static(backbone.base_model.config, compares=objective.uses_short_context)
    largest = getattr(data, "largest_token", None)
    if largest is not None and largest >= backbone.vocabulary_size:
        raise ValueError(
            f"The training documents have token id {largest}, but the embedding of"
            f" '{loading.pretrained_model_name_or_path}' has {backbone.vocabulary_size} tokens: set `data.tokenizer` to"
            " the model's, or use token ids from this tokenizer (`data.token_column`)."
        )
    tokenizer = loaded_tokenizer(data)
    if tokenizer is not None and has_weights(path := loading.pretrained_model_name_or_path):
        warn_of_other_tokenizer(tokenizer, path, loading.revision)


def raise_not_finite(losses: Mapping[int, Tensor], module: LightningModule) -> NoReturn:
    """Raise a ``FloatingPointError`` in all processes, after an optimizer step whose mean loss is not finite.

    It names the batch if it is one of this process's ``losses``, which are by batch index.
    """
    for batch_idx, loss in zip(losses, torch.stack(list(losses.values())).tolist(), strict=True):
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"The loss is {loss} at step {module.global_step}, batch {batch_idx} of epoch"
                f" {module.current_epoch} (process {module.global_rank}). Training stops here: lower the learning rate,"
                " clip gradients (`trainer.gradient_clip_val`) or check the data of the batch."
            )
    raise FloatingPointError(
        f"The loss of another process is not finite at step {module.global_step}: see its message. After the change"
        " that it asks for, resume with `--ckpt_path RUN_FOLDER`."
    )


def check_influence(objective: Objective, influence: str | None) -> None:
    """Raise a ``ValueError`` if the objective ignores the stored values of tokens, or needs values that are missing.

    ``influence`` describes where the values are stored; None without stored values.
    """
    if (objective.uses_stored is not None) == (influence is not None):
        return
    if influence is None:
        problem = (
            f"needs stored {objective.uses_stored}, which the data module lacks: compute them with `longce influence`"
            " and set `data.influence` to their folder, or choose another `model.objective`"
        )
    else:
        problem = (
            f"would ignore the values of `longce influence` {influence}: set `model.objective` to StoredInfluence or"
            " Rho1, or remove `data.influence`"
        )
    raise ValueError(f"The objective {type(objective).__name__} {problem}.")


def check_stored(objective: Objective, made_from: Mapping[str, Any] | None) -> None:
    """Raise a ``ValueError`` for stored values of another kind, or weights with a cap below the objective's.

    ``made_from`` has everything that the stored values depend on; for reference losses, ``gamma`` is None.
    """
    objective = unwrap(objective)
    if made_from is None or objective.uses_stored is None:
        return
    stored = made_from["gamma"]
    kind = "reference losses" if stored is None else "weights"
    if kind != objective.uses_stored:
        raise ValueError(
            f"`data.influence` has {kind}, and the objective {type(objective).__name__} needs {objective.uses_stored}:"
            " run `longce influence` with this objective, or choose the other one (StoredInfluence or Rho1)."
        )
    cap = objective.largest_weight
    if stored is not None and cap is not None and stored < cap:
        raise ValueError(
            f"The stored token weights were capped at {stored:g}, below the `gamma` {cap:g} of the objective: set"
            f" `model.objective.gamma` to {stored:g}, or run `longce influence` again with the larger one."
        )


def check_sequence_parallelism(config: PreTrainedConfig, size: int, attn_implementation: str = "auto") -> None:
    """Raise a ``ValueError`` unless ``size`` divides the heads, and layers have causal `sdpa` attention or windows."""
    if size == 1:
        return
    text: Any = config.get_text_config(decoder=True)
    if attn_implementation not in ("auto", "sdpa", DOCUMENT_SDPA):
        raise ValueError(
            f"Sequence parallelism supports torch's `sdpa` only, which includes flash attention, not"
            f" '{attn_implementation}': set `attn_implementation: sdpa`."
        )
    # Other models attend by a function of transformers, which does not know the exchange.
    if register_attention(choose_attention(ModelConfig(), config), config) != DOCUMENT_SDPA:
        raise ValueError(
            f"Sequence parallelism needs a model with our `sdpa` attention, which '{text.model_type}' does not support:"
            " use another model, or a `trainer.strategy` without `sequence_parallel_size`."
        )
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or (key_heads % size and size % key_heads):
        raise ValueError(
            f"`sequence_parallel_size` = {size} must divide the model's {heads} attention heads, and divide its"
            f" {key_heads} key-value heads or be a multiple of them."
        )
    # A process would choose frequencies by the positions of its shard.
    _check_plain_attention(config, "Sequence parallelism", windows=True)


def check_skipped_positions(config: PreTrainedConfig, attention: str, target_length: int) -> None:
    """Raise a ``ValueError`` unless a model can be trained on positions that skip, up to ``target_length`` (PoSE)."""
    text: Any = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if getattr(text, "rope_parameters", None) is None:
        raise ValueError(f"`data.pose` needs rotary positions (RoPE), which '{text.model_type}' lacks: remove it.")
    if limit is not None and target_length > limit:
        raise ValueError(
            f"`data.pose.target_length` = {target_length} exceeds the {limit} positions of the model: extend its"
            " context to this length (`model.context_extension`), or lower it."
        )
    # transformers treats skipped positions as the beginning of another document, unless it does not check them.
    if attention != DOCUMENT_SDPA:
        raise ValueError(
            f"`data.pose` needs `model.attn_implementation: sdpa` in a model that supports our attention, got"
            f" '{attention}' of '{text.model_type}', which may mistake skipped positions for another document."
        )
    # A layer with a window would see distances that it never sees in a long text; patterns count tokens, not positions.
    _check_plain_attention(config, "`data.pose`")


def check_sparse_attention(
    config: PreTrainedConfig, loading: ModelConfig, sequence_length: int | None, sequence_parallel_size: int = 1
) -> None:
    """Raise a ``ValueError`` unless a model can be trained with shifted sparse attention on these sequences, if any."""
    group = loading.shifted_sparse_attention
    if group is None:
        return
    text: Any = config.get_text_config(decoder=True)
    name = "`model.shifted_sparse_attention`"
    if sequence_length is not None and group >= sequence_length:
        raise ValueError(
            f"{name} = {group} must be below `data.sequence_length` = {sequence_length}, or no group is shorter than a"
            " sequence: lower it."
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % 2:
        raise ValueError(f"{name} needs an even number of key-value heads, of which half are shifted, got {heads}.")
    if sequence_parallel_size > 1:
        raise ValueError(f"{name} does not support `sequence_parallel_size` = {sequence_parallel_size}: set it to 1.")
    attention = register_attention(choose_attention(loading, config), config)
    if attention != DOCUMENT_SDPA:
        raise ValueError(
            f"{name} needs `model.attn_implementation: sdpa` in a model that supports our attention, got '{attention}'"
            f" of '{text.model_type}'."
        )
    _check_plain_attention(config, name)


def _check_plain_attention(config: PreTrainedConfig, feature: str, *, windows: bool = False) -> None:
    """Raise a ``ValueError`` unless all layers have full attention, or ``windows``, rotated by positions only."""
    text: Any = config.get_text_config(decoder=True)
    rope_type = global_parameters(text).get("rope_type")
    layers = set(getattr(text, "layer_types", None) or ())
    window = None if layers or windows else getattr(text, "sliding_window", None)
    kinds = sorted(layers - {"full_attention", *(["sliding_attention"] if windows else [])})
    kinds += [f"the attention pattern '{rope_type}'"] if rope_type in PATTERNS else []
    kinds += [f"a sliding window of {window}"] if window is not None else []
    kinds += [f"RoPE of type '{each['rope_type']}'" for each in rope_parameter_sets(config) if depends_on_length(each)]
    if kinds:
        supported = "full attention and sliding windows" if windows else "full attention"
        remedy = "" if windows else " set `context_extension.full_attention: true` for a sliding window,"
        raise ValueError(
            f"{feature} supports {supported} only, and this model has {', '.join(kinds)}:{remedy} extend the context"
            " by a method without a pattern, or use another model."
        )


def check_trainer(options: Any) -> None:
    """Raise a ``ValueError`` for numbers that Lightning's Trainer accepts but that make no sense for training."""
    for name in ("accumulate_grad_batches", "val_check_interval", "gradient_clip_val", "limit_train_batches"):
        value = options.get(name)
        if isinstance(value, int | float) and (value < 0 or (value == 0 and name != "gradient_clip_val")):
            wanted = "0 or more" if name == "gradient_clip_val" else "above 0"
            raise ValueError(f"`trainer.{name}` must be {wanted}, got {value}. Remove it to use Lightning's default.")
    devices = str(options.get("devices"))
    if devices.isdecimal():
        check_count("`trainer.devices`", int(devices), maximum=MAX_PROCESSES)


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Raise a ``ValueError`` for callbacks that average weights: they copy the module before it has any."""
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"The callback `{type(callback).__name__}` is not supported: Lightning's weight averaging copies the"
                " module before its weights are loaded, sharded or resumed. Remove it from `trainer.callbacks`, and let"
                " `model.lr_scheduler` lower the learning rate to 0 instead."
            )
