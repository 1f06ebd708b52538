"""Extending the context that a model was pre-trained on, by what its config says of rotary positions (RoPE).

Everything is a change of the config before the weights are loaded, so that a saved model carries its extension. A
change of the config of a model that exists already would be saved and have no effect.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn
from transformers import PreTrainedConfig

from lightning_modules.batch import LONGEST_ROW
from lightning_modules.models.context_extension.eabf import EABF
from lightning_modules.models.context_extension.patterns.settings import PATTERN_OPTIONS, PATTERN_SETTINGS
from lightning_modules.models.context_extension.rope_types import (
    TYPE_ARCHITECTURES,
    check_parameters,
    own_type,
    register_rope_types,
    rotary_width,
)
from lightning_modules.models.context_extension.rotary_checks import ARCHITECTURES

ANY_ROPE_TYPE = tuple(name for name in ARCHITECTURES if name != "phi3")
"""Of Phi-3 transformers takes the types ``default`` and ``longrope`` only."""


@dataclass(frozen=True)
class ContextExtension:
    r"""How a model is extended from one context length to another.

    With :math:`s` = ``target_length / original_length`` and :math:`d` rotated components per head, the methods are

    - ``none``: the frequencies stay;
    - ``pi``: position interpolation, positions divided by s (Chen et al., 2023, https://arxiv.org/abs/2306.15595);
    - ``abf``: a higher base, ``base`` (Xiong et al., 2023, https://arxiv.org/abs/2309.16039);
    - ``eabf``: the same, and attention logits scaled by ``max(1, log(position + 1) / log(original_length))`` in all
      layers but the first two (Zhang et al., 2024, https://arxiv.org/abs/2401.07004);
    - ``ntk``: the base times :math:`s^{d / (d - 2)}`;
    - ``ntk_by_parts`` and ``yarn``: low frequencies are interpolated, high ones kept, with a ramp between them that is
      linear in the dimension as in the authors' code (Peng et al., 2023, https://arxiv.org/abs/2309.00071); ``yarn``
      multiplies cos and sin by :math:`0.1 \ln s + 1` as well;
    - ``dynamic_ntk``: ``ntk`` with the length of the text in place of the target length: for inference only;
    - ``llama3``: that of Llama 3.1, with a ramp linear in the frequency;
    - ``longrope``: one divisor per frequency, at every length of the text (Ding et al., 2024,
      https://arxiv.org/abs/2402.13753, whose models switch to them beyond the original length);
    - ``eabf_authors`` and ``pi_authors``: what the code released with LongCE computes for Llama and Mistral. EABF
      leaves no layer unscaled, and for Mistral neither EABF nor PI changes the frequencies.

    Attention patterns (`lightning_modules.models.context_extension.patterns`), for the attention ``document_sdpa``
    (what ``auto`` and ``sdpa`` become) or ``sdpa``. Training-free, at distances that the model knows, and trainable:

    - ``streaming_llm``: the first ``sinks`` tokens and the last ``window``;
    - ``lm_infinite``: the first ``sinks`` tokens, at distances up to the original length, and as many last ones;
    - ``rerope``: all tokens, at distances up to ``window``;
    - ``self_extend``: all tokens, those beyond ``window`` by positions of groups of ``group`` tokens;
    - ``dual_chunk``: all tokens, at distances within a ``chunk``, to the one before, and to all others.

    For training only, for they change what a model sees at every distance:

    - ``alibi``: logits that fall linearly with the distance, and no rotation;
    - ``xpos``: RoPE that decays with the distance;
    - ``longnet``: dilated attention in segments of several lengths.

    Args:
        method: One of the above.
        original_length: Length of the rows that the model was pre-trained on, in tokens; configs often say otherwise.
        target_length: Length to be reached, in tokens.
        base: RoPE base for ``abf`` and ``eabf``, 500 000 by default.
        beta_fast: ``yarn``, ``ntk_by_parts``: components with more turns in the original length are kept; 32.
        beta_slow: ``yarn``, ``ntk_by_parts``: components with fewer turns are interpolated in full; 1.
        low_freq_factor: ``llama3``: components with fewer turns in the original length are interpolated in full; 1.
        high_freq_factor: ``llama3``: components with more turns are kept; 4.
        long_factor: ``longrope``: divisor of each of the d / 2 frequencies.
        attention_factor: ``yarn``, ``longrope``: what cos and sin are multiplied by, instead of the method's own.
        sinks: ``streaming_llm``, ``lm_infinite``: first tokens that all others see; 4 and 10.
        window: ``streaming_llm``: last tokens that are seen; the original length less ``sinks``. ``rerope``,
            ``self_extend``: tokens with distances of their own; 1/2 and 1/4 of the original length.
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
        self._check_options()

    def _check_options(self) -> None:
        method = METHODS[self.method]
        for name in OPTIONS:
            if getattr(self, name) is not None and name not in method.options:
                takes = f"it takes {' and '.join(f'`{option}`' for option in method.options)}" if method.options else ""
                raise ValueError(
                    f"`context_extension.{name}` is nothing that the method '{self.method}' uses: remove it"
                    f"{' (' + takes + ')' if takes else ''}."
                )
            _check_positive(name, getattr(self, name))
        if self.method == "longrope" and self.long_factor is None:
            raise ValueError("The method 'longrope' needs `context_extension.long_factor`, a divisor per frequency.")
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            if not self._option(low) < self._option(high):
                raise ValueError(f"`{low}` = {self._option(low)} must be below `{high}` = {self._option(high)}.")
        if self.base is not None and self.base <= 1:
            raise ValueError(f"`context_extension.base` must be above 1, got {self.base}.")

    @classmethod
    def parse(cls, settings: "Mapping[str, Any] | ContextExtension") -> "ContextExtension":
        """From a mapping, as a YAML file gives it.

        Raises:
            ValueError: If a key is unknown or missing, or a value wrong.
        """
        if isinstance(settings, ContextExtension):
            return settings
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"Did you mean '{near[0]}'?" if near else f"It takes {', '.join(known)}."
                raise ValueError(f"`context_extension` has no key '{name}'. {hint}")
        for name in ("method", "original_length", "target_length"):
            if settings.get(name) is None:
                raise ValueError(f"`context_extension` lacks `{name}`, which is never guessed: set it.")
        return cls(**settings)

    @property
    def factor(self) -> float:
        """By what the context grows."""
        return self.target_length / self.original_length

    def apply(self, config: PreTrainedConfig) -> None:
        """Change a config, before a model is built from it.

        Raises:
            ValueError: If the method does not fit the model, or the model is extended already.
        """
        self._check_fits(config)
        if getattr(config, "head_dim", 0) is None:  # Mixtral: transformers' YaRN and LongRoPE would fail
            config.head_dim = config.hidden_size // config.num_attention_heads
        config.rope_parameters = {**config.rope_parameters, **METHODS[self.method].rope(self, config)}
        # Dynamic NTK measures the length of a text against this value.
        config.max_position_embeddings = self.original_length if self.method == "dynamic_ntk" else self.target_length
        if hasattr(config, "original_max_position_embeddings"):  # Phi-3: goes before the one in `rope_parameters`
            config.original_max_position_embeddings = self.original_length
        if self.full_attention or self.method.endswith("_authors"):
            _switch_sliding_windows_off(config)
        config.validate()

    def _check_lengths(self) -> None:
        for name in ("original_length", "target_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 2:
                raise ValueError(f"`context_extension.{name}` must be a number of tokens, 2 or more, got {value!r}.")
            if value > LONGEST_ROW:
                raise ValueError(f"`context_extension.{name}` must be at most {LONGEST_ROW:,} tokens.")
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

    def _option(self, name: str) -> float:
        value = getattr(self, name)
        return DEFAULTS[name] if value is None else value

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
            why = " (transformers takes no such RoPE type for it)" if config.model_type == "phi3" else ""
            raise ValueError(
                f"The method '{self.method}' is for {', '.join(supported)} and not for '{config.model_type}'{why}:"
                f" choose one of {', '.join(fit)}."
            )
        if self.method in PATTERN_SETTINGS and not self.full_attention and _has_sliding_windows(config):
            raise ValueError(
                f"The model has sliding windows of {config.sliding_window} tokens, which the pattern '{self.method}'"
                " takes the place of: set `context_extension.full_attention: true`."
            )
        present = config.rope_parameters["rope_type"]
        if present != "default" and self.method != "none":
            raise ValueError(
                f"The model is extended already, by the RoPE type '{present}': remove `context_extension`, or extend"
                " the model that this one was made from."
            )


class Method(NamedTuple):
    """What a method does to ``rope_parameters``, which options it takes and which model types it is for."""

    rope: Callable[[ContextExtension, PreTrainedConfig], dict[str, Any]]
    options: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ANY_ROPE_TYPE


def _yarn(extension: ContextExtension, attention_factor: float | None) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": extension.factor,
        # transformers would take `max_position_embeddings`, which is the target length by then.
        "original_max_position_embeddings": extension.original_length,
        "beta_fast": extension._option("beta_fast"),
        "beta_slow": extension._option("beta_slow"),
        "attention_factor": 0.1 * math.log(extension.factor) + 1 if attention_factor is None else attention_factor,
    }


def _llama3(extension: ContextExtension, _: PreTrainedConfig) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": extension.factor,
        "original_max_position_embeddings": extension.original_length,
        "low_freq_factor": extension._option("low_freq_factor"),
        "high_freq_factor": extension._option("high_freq_factor"),
    }


def _longrope(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    divisors = [float(divisor) for divisor in extension.long_factor or []]
    if len(divisors) != (wanted := rotary_width(config) // 2):
        raise ValueError(f"`context_extension.long_factor` has {len(divisors)} divisors; this model needs {wanted}.")
    default = math.sqrt(1 + math.log(extension.factor) / math.log(extension.original_length))
    return {
        "rope_type": "longrope",
        "factor": extension.factor,
        "original_max_position_embeddings": extension.original_length,
        # The same for short texts: a long and a short context of a token could not be compared otherwise.
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": default if extension.attention_factor is None else extension.attention_factor,
    }


def _ntk(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    width = rotary_width(config)
    if width <= 2:
        raise ValueError(f"The method 'ntk' needs more than 2 rotated components per head, and the model has {width}.")
    return {"rope_theta": config.rope_parameters["rope_theta"] * extension.factor ** (width / (width - 2))}


def _higher_base(extension: ContextExtension, config: PreTrainedConfig) -> float:
    base, own = extension._option("base"), config.rope_parameters["rope_theta"]
    if base < own:
        raise ValueError(
            f"`base` = {base:g} of '{extension.method}' is below the model's own RoPE base of {own:g}, which would"
            " shorten its context: set a higher `context_extension.base`."
        )
    return base


def _paper_eabf(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    if config.num_hidden_layers <= UNSCALED_LAYERS:
        rank_zero_warn(
            f"EABF scales attention in all layers but the first {UNSCALED_LAYERS}, and this model has"
            f" {config.num_hidden_layers}: it will compute what 'abf' computes."
        )
    return _eabf(extension, _higher_base(extension, config), unscaled_layers=UNSCALED_LAYERS)


def _eabf(extension: ContextExtension, base: float, unscaled_layers: int) -> dict[str, Any]:
    return {
        "rope_type": EABF,
        "rope_theta": base,
        "original_max_position_embeddings": extension.original_length,
        "unscaled_layers": unscaled_layers,
    }


def _pi(extension: ContextExtension, _: PreTrainedConfig) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": extension.factor}


def _eabf_authors(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    released = {"llama": DEFAULTS["base"], "mistral": config.rope_parameters["rope_theta"]}
    return _eabf(extension, released[config.model_type], unscaled_layers=0)


def _pi_authors(extension: ContextExtension, config: PreTrainedConfig) -> dict[str, Any]:
    return _pi(extension, config) if config.model_type == "llama" else {}


def _pattern(extension: ContextExtension, _: PreTrainedConfig) -> dict[str, Any]:
    settings = PATTERN_SETTINGS[extension.method]
    options = {name: getattr(extension, name) for name in settings.options}
    parameters = settings.parameters(extension.original_length, extension.target_length, **options)
    return {"rope_type": extension.method, **parameters}


AUTHORS_LENGTH = 4096
UNSCALED_LAYERS = 2
DEFAULTS: dict[str, float] = {
    "base": 500_000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
OPTIONS = (*DEFAULTS, "long_factor", "attention_factor", *PATTERN_OPTIONS)
LISTS = ("long_factor", "segment_lengths", "dilation_rates")

METHODS: dict[str, Method] = {
    "none": Method(lambda *_: {}, (), ARCHITECTURES),
    "pi": Method(_pi),
    "abf": Method(lambda *arguments: {"rope_theta": _higher_base(*arguments)}, ("base",), ARCHITECTURES),
    "eabf": Method(_paper_eabf, ("base",), TYPE_ARCHITECTURES),
    "ntk": Method(_ntk, (), ARCHITECTURES),
    "ntk_by_parts": Method(lambda extension, _: _yarn(extension, 1.0), ("beta_fast", "beta_slow")),
    "yarn": Method(
        lambda extension, _: _yarn(extension, extension.attention_factor),
        ("beta_fast", "beta_slow", "attention_factor"),
    ),
    "dynamic_ntk": Method(lambda *_: {"rope_type": "dynamic", "factor": 1.0}),
    "llama3": Method(_llama3, ("low_freq_factor", "high_freq_factor")),
    "longrope": Method(_longrope, ("long_factor", "attention_factor"), ARCHITECTURES),
    "eabf_authors": Method(_eabf_authors, (), ("llama", "mistral")),
    "pi_authors": Method(_pi_authors, (), ("llama", "mistral")),
    **{name: Method(_pattern, settings.options, TYPE_ARCHITECTURES) for name, settings in PATTERN_SETTINGS.items()},
}


def extend_config(config: PreTrainedConfig, settings: Mapping[str, Any] | ContextExtension | None) -> None:
    """Extend a config if there are settings, and make the RoPE type that it carries known to transformers.

    Raises:
        ValueError: If the settings are wrong or do not fit the model.
    """
    if settings is not None:
        ContextExtension.parse(settings).apply(config)
    if own_type(text := config.get_text_config(decoder=True)) is not None:
        check_parameters(text.rope_parameters)
        register_rope_types()


def _has_sliding_windows(config: PreTrainedConfig) -> bool:
    window = getattr(config, "sliding_window", None)
    return window is not None and getattr(config, "use_sliding_window", True)


def _switch_sliding_windows_off(config: PreTrainedConfig) -> None:
    if hasattr(config, "sliding_window"):
        config.sliding_window = None
    if hasattr(config, "use_sliding_window"):
        config.use_sliding_window = False
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * config.num_hidden_layers


def _check_positive(name: str, value: Any) -> None:
    kinds: Any = int if (whole := name in PATTERN_OPTIONS) else int | float
    if value is not None and isinstance(value, list) != (name in LISTS):
        wanted = "a list of numbers, one or more" if name in LISTS else "one number"
        raise ValueError(f"`context_extension.{name}` must be {wanted}, got {value!r}.")
    for number in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(number, kinds) or isinstance(number, bool) or not 0 < number < math.inf:
            wanted = "whole numbers of 1 or more" if whole else "numbers above 0"
            raise ValueError(f"`context_extension.{name}` must hold {wanted}, got {number!r}.")
