"""Methods that extend a model's context through the RoPE parameters of its config, and their options."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from lightning_modules.models.context_extension.architectures import (
    ARCHITECTURES,
    DYNAMIC_ARCHITECTURES,
    EABF_ARCHITECTURES,
    PATTERN_ARCHITECTURES,
)
from lightning_modules.models.context_extension.eabf import EABF
from lightning_modules.models.context_extension.frequencies import (
    Parameters,
    rotary_width,
)
from lightning_modules.models.context_extension.patterns.settings import PATTERN_OPTIONS, PATTERN_SETTINGS


@dataclass(frozen=True)
class ContextExtension:
    r"""Extension of a model from one context length to another.

    With :math:`s` = ``target_length / original_length`` and :math:`d` rotated components per head, the methods are

    - ``none``: unchanged frequencies;
    - ``pi``: position interpolation, positions divided by s (Chen et al., 2023, https://arxiv.org/abs/2306.15595);
    - ``abf``: a higher base, ``base`` (Xiong et al., 2023, https://arxiv.org/abs/2309.16039);
    - ``eabf``: ABF, and attention logits scaled by ``max(1, log(position + 1) / log(original_length))`` in all
      layers but the first two (Zhang et al., 2024, https://arxiv.org/abs/2401.07004);
    - ``ntk``: the base times :math:`s^{d / (d - 2)}`; ``dynamic_ntk``: the same with s from the length of each text,
      for inference only;
    - ``ntk_by_parts`` and ``yarn``: low frequencies are interpolated and high ones kept, with a linear ramp over
      dimensions as in the authors' code (Peng et al., 2023, https://arxiv.org/abs/2309.00071); ``yarn`` also multiplies
      cos and sin by :math:`0.1 \ln s + 1`;
    - ``llama3``: the method of Llama 3.1, with a linear ramp over frequencies;
    - ``longrope``: one divisor per frequency, for all lengths of a text (Ding et al., 2024,
      https://arxiv.org/abs/2402.13753, whose models use them only beyond the original length);
    - ``eabf_authors`` and ``pi_authors``: what the code released with LongCE computes for Llama and Mistral: EABF
      scales all layers, and neither EABF nor PI changes the frequencies of Mistral.

    Attention patterns (see `patterns`) need the attention ``document_sdpa`` (used for ``auto`` and ``sdpa``) or
    ``sdpa``. These work without training, because no distance exceeds the original length, and can be trained:

    - ``streaming_llm``: attention to the first ``sinks`` tokens and the last ``window``;
    - ``lm_infinite``: to the first ``sinks`` tokens, with limited distances, and the last ``original_length``;
    - ``rerope``: to all tokens, with distances up to ``window``;
    - ``self_extend``: to all tokens; beyond ``window``, groups of ``group`` tokens share a position;
    - ``dual_chunk``: to all tokens, with distances inside a ``chunk``, to the previous one, and to all others.

    For training only: ``alibi`` (a linear penalty on distances instead of RoPE), ``xpos`` (RoPE that decays with the
    distance), ``longnet`` (dilated attention in segments).

    Args:
        method: One of the above.
        original_length: Length of the pre-training sequences in tokens, which often differs from that of the config.
        target_length: Length to extend the model to, in tokens.
        base: RoPE base for ``abf`` and ``eabf``; 500 000.
        beta_fast: ``yarn``, ``ntk_by_parts``: components with more turns in the original length are kept; 32.
        beta_slow: ``yarn``, ``ntk_by_parts``: components with fewer turns are fully interpolated; 1.
        low_freq_factor: ``llama3``: components with fewer turns in the original length are fully interpolated; 1.
        high_freq_factor: ``llama3``: components with more turns are kept; 4.
        long_factor: ``longrope``: divisor of each of the d / 2 frequencies.
        attention_factor: ``yarn``, ``longrope``: factor of cos and sin that replaces the method's.
        sinks: ``streaming_llm``, ``lm_infinite``: number of first tokens that all others attend to; 4 and 10.
        window: ``streaming_llm``: number of last tokens to attend to; the original length minus ``sinks``. ``rerope``,
            ``self_extend``: number of tokens with exact distances; 1/2 and 1/4 of the original length.
        group: ``self_extend``: number of tokens that share a position; the smallest that fits the target length.
        chunk: ``dual_chunk``: tokens in a chunk; 3/4 of the original length.
        segment_lengths: ``longnet``: each a multiple of the previous one; 2048, 4096, 8192, 16384, 32768.
        dilation_rates: ``longnet``: one for each segment length, the first of them 1; 1, 2, 4, 6, 12.
        full_attention: Disable sliding windows, as the paper does for Mistral; patterns require this.
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
        if self.method not in METHODS:
            raise ValueError(f"`context_extension.method` must be one of {', '.join(METHODS)}, got '{self.method}'.")
        self._check_numbers()
        if self.target_length < self.original_length or (self.factor == 1 and self.method != "none"):
            raise ValueError(
                f"`context_extension.target_length` = {self.target_length} must be above"
                f" `original_length` = {self.original_length}."
            )
        if self.method.endswith("_authors") and self.original_length != AUTHORS_LENGTH:
            raise ValueError(
                f"`original_length` of '{self.method}' must be {AUTHORS_LENGTH}, as in the released code, got"
                f" {self.original_length}: use '{self.method.removesuffix('_authors')}' for other lengths."
            )
        options = METHODS[self.method].options
        for name in OPTIONS:
            if getattr(self, name) is not None and name not in options:
                raise ValueError(
                    f"`context_extension.{name}` is not an option of the method '{self.method}', whose options are"
                    f" {list(options)}: remove it."
                )
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            smaller, larger = self.options(low, high).values()
            if not smaller < larger:
                raise ValueError(f"`{low}` = {smaller} must be below `{high}` = {larger}.")

    def _check_numbers(self) -> None:
        for name, least in {"original_length": 1, "target_length": 1, **dict.fromkeys(OPTIONS, 0)}.items():
            value = getattr(self, name)
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not least < number < math.inf:  # also for NaN
                    raise ValueError(f"`context_extension.{name}` must be above {least}, got {number}.")

    @classmethod
    def parse(cls, settings: "Mapping[str, Any] | ContextExtension") -> "ContextExtension":
        """Parse a mapping from YAML; raise a ``ValueError`` for unknown or missing keys and wrong values."""
        if isinstance(settings, ContextExtension):
            return settings
        # Imported here, because a machine that only trains may not have it.
        from jsonargparse import ArgumentError, ArgumentParser

        # jsonargparse checks names and types. Configs keep the mapping, so that files can override single keys.
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--context_extension", type=cls)
        if not isinstance(settings, Mapping):  # jsonargparse would read a file with this name
            raise ValueError(f"`context_extension` must be a mapping such as {{method: yarn, ..}}, got {settings!r}.")
        try:
            parsed = parser.parse_object({"context_extension": dict(settings)})
            return parser.instantiate_classes(parsed)["context_extension"]
        except (ArgumentError, TypeError) as error:
            raise ValueError(f"`context_extension` = {settings}: {' '.join(str(error).split())}") from error

    @property
    def factor(self) -> float:
        """Return the ratio of target length to original length."""
        return self.target_length / self.original_length

    def options(self, *names: str) -> dict[str, float]:
        """Return these options, or their defaults."""
        # None means the default, so that a saved config shows only the user's settings.
        return {name: DEFAULTS[name] if getattr(self, name) is None else getattr(self, name) for name in names}

    def chosen_options(self) -> dict[str, Any]:
        """Return the options of the method that were set."""
        values = {name: getattr(self, name) for name in METHODS[self.method].options}
        return {name: value for name, value in values.items() if value is not None}


class Method(NamedTuple):
    """A method: values for ``rope_parameters`` from those of plain RoPE, options and supported model types."""

    rope: Callable[[ContextExtension, PreTrainedConfig, Parameters], dict[str, Any]]
    options: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ARCHITECTURES


def _scale_rope(extension: ContextExtension, rope_type: str, **values: Any) -> dict[str, Any]:
    # The default of transformers is `max_position_embeddings`, which is already the target length.
    lengths = {"factor": extension.factor, "original_max_position_embeddings": extension.original_length}
    return {"rope_type": rope_type, **lengths, **values}


def _make_yarn(extension: ContextExtension, attention_factor: float | None) -> dict[str, Any]:
    # YaRN's recommended factor of cos and sin, which the paper fitted to Llama models.
    factor = attention_factor or 0.1 * math.log(extension.factor) + 1
    return _scale_rope(extension, "yarn", **extension.options(*BETAS), attention_factor=factor)


def _make_longrope(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> dict[str, Any]:
    divisors = check_divisors(extension.long_factor, config, present)
    attention_factor = extension.attention_factor or longrope_attention_factor(extension)
    # Short texts have the same factors, so that the long and short contexts of a token can be compared.
    factors = {"short_factor": divisors, "long_factor": divisors}
    return _scale_rope(extension, "longrope", **factors, attention_factor=attention_factor)


def longrope_attention_factor(extension: "ContextExtension") -> float:
    r"""Return LongRoPE's factor of cos and sin, :math:`\sqrt{1 + \ln s / \ln L}`."""
    return math.sqrt(1 + math.log(extension.factor) / math.log(extension.original_length))


def check_divisors(divisors: list[float] | None, config: PreTrainedConfig, present: Parameters) -> list[float]:
    """Return ``long_factor`` as floats; raise a ``ValueError`` unless it has one for each pair of components."""
    wanted = rotary_width(config, present) // 2
    found = [float(divisor) for divisor in divisors or []]
    if len(found) != wanted:
        raise ValueError(f"`context_extension.long_factor` has {len(found)} divisors; this model needs {wanted}.")
    return found


def check_ntk_width(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> int:
    """Return d, the number of rotated components of a head; raise a ``ValueError`` if it has only one frequency."""
    width = rotary_width(config, present)
    if width <= 2:
        raise ValueError(
            f"The `context_extension` '{extension.method}' keeps the highest frequency and interpolates the lowest, but"
            f" the heads of this model rotate only {width} components, which have one frequency: use 'pi'."
        )
    return width


def _make_ntk(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> dict[str, Any]:
    width = check_ntk_width(extension, config, present)
    # The lowest frequency is then divided by s, as in position interpolation, and the highest kept.
    return {"rope_theta": present["rope_theta"] * extension.factor ** (width / (width - 2))}


def _make_dynamic_ntk(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> dict[str, Any]:
    check_ntk_width(extension, config, present)
    return {"rope_type": "dynamic", "factor": 1.0}


def _make_abf(extension: ContextExtension, _: PreTrainedConfig, present: Parameters) -> dict[str, Any]:
    base = extension.options("base")["base"]
    current = present["rope_theta"]
    if base < current:
        raise ValueError(
            f"`context_extension.base` = {base:g} is below the model's RoPE base of {current:g}, which would shorten"
            " its context: set a higher one."
        )
    return {"rope_theta": base}


def _make_eabf(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> dict[str, Any]:
    length = {"original_max_position_embeddings": extension.original_length}
    return {"rope_type": EABF, "unscaled_layers": UNSCALED_LAYERS, **length, **_make_abf(extension, config, present)}


def _make_authors_eabf(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> dict[str, Any]:
    # The released code sets the base of Llama only.
    base = DEFAULTS["base"] if config.model_type == "llama" else present["rope_theta"]
    length = {"original_max_position_embeddings": extension.original_length}
    return {"rope_type": EABF, "rope_theta": base, "unscaled_layers": 0, **length}


def _make_pi(extension: ContextExtension, *_: Any) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": extension.factor}


def _make_authors_pi(extension: ContextExtension, config: PreTrainedConfig, _: Parameters) -> dict[str, Any]:
    # The released code interpolates the positions of Llama only.
    return _make_pi(extension) if config.model_type == "llama" else {}


AUTHORS_LENGTH = 4096
BETAS = ("beta_fast", "beta_slow")
FREQ_FACTORS = ("low_freq_factor", "high_freq_factor")
UNSCALED_LAYERS = 2
DEFAULTS = {"base": 500_000.0, "beta_fast": 32.0, "beta_slow": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OPTIONS = (*DEFAULTS, "long_factor", "attention_factor", *PATTERN_OPTIONS)
WITHOUT_SMOLLM3 = tuple(name for name in PATTERN_ARCHITECTURES if name != "smollm3")
METHODS: dict[str, Method] = {
    "none": Method(lambda *_: {}),
    "pi": Method(_make_pi),
    "abf": Method(_make_abf, ("base",)),
    "eabf": Method(_make_eabf, ("base",), EABF_ARCHITECTURES),
    "ntk": Method(_make_ntk),
    "ntk_by_parts": Method(lambda e, *_: _make_yarn(e, 1.0), BETAS),
    "yarn": Method(lambda e, *_: _make_yarn(e, e.attention_factor), (*BETAS, "attention_factor")),
    "dynamic_ntk": Method(_make_dynamic_ntk, (), DYNAMIC_ARCHITECTURES),
    "llama3": Method(lambda e, *_: _scale_rope(e, "llama3", **e.options(*FREQ_FACTORS)), FREQ_FACTORS),
    "longrope": Method(_make_longrope, ("long_factor", "attention_factor")),
    "eabf_authors": Method(_make_authors_eabf, (), ("llama", "mistral")),
    "pi_authors": Method(_make_authors_pi, (), ("llama", "mistral")),
    **{
        name: Method(settings.rope_parameters, settings.options, PATTERN_ARCHITECTURES)
        for name, settings in PATTERN_SETTINGS.items()
    },
    # Both would add distances to the layers of SmolLM3 that have no positions.
    **{name: Method(PATTERN_SETTINGS[name].rope_parameters, (), WITHOUT_SMOLLM3) for name in ("alibi", "xpos")},
}
