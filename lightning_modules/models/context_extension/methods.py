"""Methods that extend the context of a model by the rotary positions (RoPE) of its config.

The config changes before the weights are loaded; a later change would be saved without effect.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from lightning_modules.batch import MAX_SEQUENCE_LENGTH
from lightning_modules.models.context_extension.eabf import EABF
from lightning_modules.models.context_extension.patterns.settings import (
    PATTERN_OPTIONS,
    PATTERN_SETTINGS,
    check_positive,
)
from lightning_modules.models.context_extension.rope_types import (
    TYPE_ARCHITECTURES,
    check_parameters,
    own_type,
    register_rope_types,
    rotary_width,
)
from lightning_modules.models.context_extension.rotary_checks import ARCHITECTURES
from lightning_modules.utilities.errors import did_you_mean

ANY_ROPE_TYPE = tuple(name for name in ARCHITECTURES if name != "phi3")  # only `default` and `longrope` there


@dataclass(frozen=True)
class ContextExtension:
    r"""How a model is extended from one context length to another.

    With :math:`s` = ``target_length / original_length`` and :math:`d` rotated components per head, the methods are

    - ``none``: the frequencies stay;
    - ``pi``: position interpolation, positions divided by s (Chen et al., 2023, https://arxiv.org/abs/2306.15595);
    - ``abf``: a higher base, ``base`` (Xiong et al., 2023, https://arxiv.org/abs/2309.16039);
    - ``eabf``: the same, and attention logits scaled by ``max(1, log(position + 1) / log(original_length))`` in all
      layers but the first two (Zhang et al., 2024, https://arxiv.org/abs/2401.07004);
    - ``ntk``: the base times :math:`s^{d / (d - 2)}`; ``dynamic_ntk``: the same for the length of each text, for
      inference only;
    - ``ntk_by_parts`` and ``yarn``: low frequencies are interpolated, high ones kept, with a ramp linear in the
      dimension as in the authors' code (Peng et al., 2023, https://arxiv.org/abs/2309.00071); ``yarn`` also multiplies
      cos and sin by :math:`0.1 \ln s + 1`;
    - ``llama3``: that of Llama 3.1, with a ramp linear in the frequency;
    - ``longrope``: one divisor per frequency, at every length of the text (Ding et al., 2024,
      https://arxiv.org/abs/2402.13753, whose models switch to them beyond the original length);
    - ``eabf_authors`` and ``pi_authors``: what the code released with LongCE computes for Llama and Mistral. EABF
      leaves no layer unscaled, and for Mistral neither EABF nor PI changes the frequencies.

    Attention patterns (see `patterns`), for the attention ``document_sdpa`` (the choice of ``auto`` and ``sdpa``) or
    ``sdpa``. Training-free, at distances that the model knows, and trainable:

    - ``streaming_llm``: the first ``sinks`` tokens and the last ``window``;
    - ``lm_infinite``: the first ``sinks`` tokens, at distances up to the original length, and that many last ones;
    - ``rerope``: all tokens, at distances up to ``window``;
    - ``self_extend``: all tokens, those beyond ``window`` by positions of groups of ``group`` tokens;
    - ``dual_chunk``: all tokens, at distances within a ``chunk``, to the one before, and to all others.

    For training only: ``alibi`` (logits that fall linearly with the distance, and no rotation), ``xpos`` (RoPE that
    decays with the distance), ``longnet`` (dilated attention in segments).

    Args:
        method: One of the above.
        original_length: Length of the rows that the model was pre-trained on, in tokens; often not that of the config.
        target_length: Length to be reached, in tokens.
        base: RoPE base for ``abf`` and ``eabf``; 500 000.
        beta_fast: ``yarn``, ``ntk_by_parts``: components with more turns in the original length are kept; 32.
        beta_slow: ``yarn``, ``ntk_by_parts``: components with fewer turns are interpolated in full; 1.
        low_freq_factor: ``llama3``: components with fewer turns in the original length are interpolated in full; 1.
        high_freq_factor: ``llama3``: components with more turns are kept; 4.
        long_factor: ``longrope``: divisor of each of the d / 2 frequencies.
        attention_factor: ``yarn``, ``longrope``: factor of cos and sin in place of the method's.
        sinks: ``streaming_llm``, ``lm_infinite``: first tokens that all others see; 4 and 10.
        window: ``streaming_llm``: last tokens that are seen; the original length less ``sinks``. ``rerope``,
            ``self_extend``: tokens with exact distances; 1/2 and 1/4 of the original length.
        group: ``self_extend``: tokens that share a position; the smallest number by which the target length fits.
        chunk: ``dual_chunk``: tokens in a chunk; 3/4 of the original length.
        segment_lengths: ``longnet``: each a multiple of the one before; 2048, 4096, 8192, 16384, 32768.
        dilation_rates: ``longnet``: for each segment length one, the first 1; 1, 2, 4, 6, 12.
        full_attention: Switch sliding windows off, as the paper does for Mistral; patterns need it where there are any.

    Raises:
        ValueError: If a value is missing, out of range or not one of the method's.
    """

    method: str
    original_length: int
    target_length: int
    base: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    long_factor: list[float] | None = None
    attention_factor: float | None = None
    sinks: int | None = None
    window: int | None = None
    group: int | None = None
    chunk: int | None = None
    segment_lengths: list[int] | None = None
    dilation_rates: list[int] | None = None
    full_attention: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise ValueError(f"`context_extension.method` is '{self.method}': choose one of {', '.join(METHODS)}.")
        self._check_lengths()
        if not isinstance(self.full_attention, bool):
            raise ValueError(f"`context_extension.full_attention` must be true or false, got {self.full_attention!r}.")
        self._check_options(METHODS[self.method].options)

    def _check_options(self, options: tuple[str, ...]) -> None:
        for name in OPTIONS:
            if getattr(self, name) is not None and name not in options:
                takes = f" (it takes {' and '.join(f'`{option}`' for option in options)})" if options else ""
                raise ValueError(
                    f"`context_extension.{name}` is nothing that the method '{self.method}' uses: remove it{takes}."
                )
            check_positive(name, getattr(self, name))
        if self.method == "longrope" and self.long_factor is None:
            raise ValueError("The method 'longrope' needs `context_extension.long_factor`, a divisor per frequency.")
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            smaller, larger = self.options(low, high).values()
            if not smaller < larger:
                raise ValueError(f"`{low}` = {smaller} must be below `{high}` = {larger}.")
        if self.base is not None and self.base <= 1:
            raise ValueError(f"`context_extension.base` must be above 1, got {self.base}.")

    def _check_lengths(self) -> None:
        for name in ("original_length", "target_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 2 <= value <= MAX_SEQUENCE_LENGTH:
                raise ValueError(
                    f"`context_extension.{name}` must be from 2 to {MAX_SEQUENCE_LENGTH:,} tokens, got {value!r}."
                )
        if self.target_length < self.original_length or (self.factor == 1 and self.method != "none"):
            raise ValueError(
                f"`context_extension.target_length` = {self.target_length} must be above"
                f" `original_length` = {self.original_length}."
            )
        if self.method.endswith("_authors") and self.original_length != AUTHORS_LENGTH:
            raise ValueError(
                f"`original_length` of '{self.method}' must be {AUTHORS_LENGTH}, which the released code has built in,"
                f" got {self.original_length}: use '{self.method.removesuffix('_authors')}' for others."
            )

    @classmethod
    def parse(cls, settings: "Mapping[str, Any] | ContextExtension") -> "ContextExtension":
        """Parse a mapping of a YAML file; a ``ValueError`` if a key is unknown or missing, or a value wrong."""
        if isinstance(settings, ContextExtension):
            return settings
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise ValueError(f"`context_extension` has no key '{name}'. {did_you_mean(name, known)}")
        for name in ("method", "original_length", "target_length"):
            if settings.get(name) is None:
                raise ValueError(f"`context_extension` lacks `{name}`, which is never guessed: set it.")
        return cls(**settings)

    @property
    def factor(self) -> float:
        """Target length over original length."""
        return self.target_length / self.original_length

    def options(self, *names: str) -> dict[str, float]:
        """Return options or their defaults."""
        return {name: DEFAULTS[name] if getattr(self, name) is None else getattr(self, name) for name in names}

    def apply(self, config: PreTrainedConfig) -> None:
        """Change a config before a model is built from it; a ``ValueError`` if the method does not fit the model."""
        self._check_fits(config)
        if getattr(config, "head_dim", 0) is None:  # Mixtral: transformers' YaRN and LongRoPE would fail
            config.head_dim = config.hidden_size // config.num_attention_heads
        config.rope_parameters = {**config.rope_parameters, **METHODS[self.method].rope(self, config)}
        # Dynamic NTK measures the length of a text against this value.
        config.max_position_embeddings = self.original_length if self.method == "dynamic_ntk" else self.target_length
        if hasattr(config, "original_max_position_embeddings"):  # Phi-3: has priority over `rope_parameters`
            config.original_max_position_embeddings = self.original_length
        if self.full_attention or self.method.endswith("_authors"):
            layers = ["full_attention"] * config.num_hidden_layers
            for name, value in (("sliding_window", None), ("use_sliding_window", False), ("layer_types", layers)):
                if hasattr(config, name):
                    setattr(config, name, value)
        config.validate()

    def _check_fits(self, config: PreTrainedConfig) -> None:
        if config.model_type not in ARCHITECTURES:
            raise ValueError(
                f"Context extension is not known to be right for models of type '{config.model_type}', only for"
                f" {', '.join(ARCHITECTURES)}: others rotate otherwise, or differently in each layer. Remove"
                " `context_extension`, or set the `rope_parameters` of `model_config` yourself."
            )
        supported = METHODS[self.method].architectures
        if config.model_type not in supported:
            fit = [name for name, method in METHODS.items() if config.model_type in method.architectures]
            raise ValueError(
                f"The method '{self.method}' is for {', '.join(supported)} and not for '{config.model_type}':"
                f" choose one of {', '.join(fit)}."
            )
        windows = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        if self.method in PATTERN_SETTINGS and not self.full_attention and windows:
            raise ValueError(
                f"The model has sliding windows of {config.sliding_window} tokens, which the pattern '{self.method}'"
                " replaces: set `context_extension.full_attention: true`."
            )
        present = config.rope_parameters["rope_type"]
        if present != "default" and self.method != "none":
            raise ValueError(
                f"The model is extended already, by the RoPE type '{present}': remove `context_extension`, or extend"
                " the model that this one was made from."
            )


class Method(NamedTuple):
    """Values that a method writes into ``rope_parameters``, its options and the model types that it supports."""

    rope: Callable[[ContextExtension, PreTrainedConfig], dict[str, Any]]
    options: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ANY_ROPE_TYPE


def _scaled(extension: ContextExtension, rope_type: str, **values: Any) -> dict[str, Any]:
    # Without the original length transformers takes `max_position_embeddings`, which is the target length by then.
    lengths = {"factor": extension.factor, "original_max_position_embeddings": extension.original_length}
    return {"rope_type": rope_type, **lengths, **values}


def _yarn(extension: ContextExtension, attention_factor: float | None) -> dict[str, Any]:
    factor = attention_factor or 0.1 * math.log(extension.factor) + 1
    return _scaled(extension, "yarn", **extension.options(*BETAS), attention_factor=factor)


def _longrope(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    divisors = [float(divisor) for divisor in extension.long_factor or []]
    if len(divisors) != (wanted := rotary_width(config) // 2):
        raise ValueError(f"`context_extension.long_factor` has {len(divisors)} divisors; this model needs {wanted}.")
    default = math.sqrt(1 + math.log(extension.factor) / math.log(extension.original_length))
    # The same for short texts: a long and a short context of a token could not be compared otherwise.
    factors = {"short_factor": divisors, "long_factor": divisors}
    return _scaled(extension, "longrope", **factors, attention_factor=extension.attention_factor or default)


def _ntk(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    width = rotary_width(config)
    return {"rope_theta": config.rope_parameters["rope_theta"] * extension.factor ** (width / (width - 2))}


def _abf(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    base, own = extension.options("base")["base"], config.rope_parameters["rope_theta"]
    if base < own:
        raise ValueError(
            f"`base` = {base:g} of '{extension.method}' is below the model's RoPE base of {own:g}, which would shorten"
            " its context: set a higher `context_extension.base`."
        )
    return {"rope_theta": base}


def _eabf(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    return _authors_eabf(extension, config) | _abf(extension, config) | {"unscaled_layers": UNSCALED_LAYERS}


def _authors_eabf(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    base = DEFAULTS["base"] if config.model_type == "llama" else config.rope_parameters["rope_theta"]
    length = {"original_max_position_embeddings": extension.original_length}
    return {"rope_type": EABF, "rope_theta": base, "unscaled_layers": 0, **length}


def _pi(extension: ContextExtension, _: PreTrainedConfig) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": extension.factor}


AUTHORS_LENGTH = 4096
BETAS, FREQ_FACTORS = ("beta_fast", "beta_slow"), ("low_freq_factor", "high_freq_factor")
UNSCALED_LAYERS = 2
DEFAULTS = {"base": 500_000.0, "beta_fast": 32.0, "beta_slow": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OPTIONS = (*DEFAULTS, "long_factor", "attention_factor", *PATTERN_OPTIONS)

METHODS: dict[str, Method] = {
    "none": Method(lambda *_: {}, (), ARCHITECTURES),
    "pi": Method(_pi),
    "abf": Method(_abf, ("base",), ARCHITECTURES),
    "eabf": Method(_eabf, ("base",), TYPE_ARCHITECTURES),
    "ntk": Method(_ntk, (), ARCHITECTURES),
    "ntk_by_parts": Method(lambda e, _: _yarn(e, 1.0), BETAS),
    "yarn": Method(lambda e, _: _yarn(e, e.attention_factor), (*BETAS, "attention_factor")),
    "dynamic_ntk": Method(lambda *_: {"rope_type": "dynamic", "factor": 1.0}),
    "llama3": Method(lambda e, _: _scaled(e, "llama3", **e.options(*FREQ_FACTORS)), FREQ_FACTORS),
    "longrope": Method(_longrope, ("long_factor", "attention_factor"), ARCHITECTURES),
    "eabf_authors": Method(_authors_eabf, (), ("llama", "mistral")),
    "pi_authors": Method(lambda *args: _pi(*args) if args[1].model_type == "llama" else {}, (), ("llama", "mistral")),
    **{
        name: Method(settings.rope_parameters, settings.options, TYPE_ARCHITECTURES)
        for name, settings in PATTERN_SETTINGS.items()
    },
}


def extend_config(config: PreTrainedConfig, settings: Mapping[str, Any] | ContextExtension | None) -> None:
    """Extend a config if there are settings that fit it, and register the RoPE type that it carries."""
    if settings is not None:
        ContextExtension.parse(settings).apply(config)
    if own_type(text := config.get_text_config(decoder=True)) is not None:
        check_parameters(text.rope_parameters)
        register_rope_types()
