"""What each pattern writes into ``rope_parameters``: its numbers, checked and with their defaults."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_modules.models.context_extension.patterns.dilated import check_dilation, longnet_keys

PATTERN_OPTIONS = ("sinks", "window", "group", "chunk", "segment_lengths", "dilation_rates")
"""Counts of tokens, each 1 or more; the last two lists of them."""


class PatternSettings(NamedTuple):
    """What a pattern takes and gives.

    Attributes:
        parameters: From original and target length and the options to the parameters.
        options: Their names.
        keys: From the parameters to the largest number of keys of a query, if it does not grow with the text.
    """

    parameters: Callable[..., dict[str, Any]]
    options: tuple[str, ...] = ()
    keys: Callable[[Mapping[str, Any]], int] | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the parameters, which do not depend on the lengths."""
        return tuple(self.parameters(4096, 32768, **dict.fromkeys(self.options)))


def _streaming_llm(original: int, _: int, sinks: int | None, window: int | None) -> dict[str, Any]:
    sinks = 4 if sinks is None else sinks
    window = max(1, original - sinks) if window is None else window
    if sinks + window > original:
        raise ValueError(
            f"`sinks` = {sinks} and `window` = {window} together must not be above `original_length` = {original}: the"
            " model knows no larger distances. Set smaller ones."
        )
    return {"sinks": sinks, "window": window}


def _lm_infinite(original: int, _: int, sinks: int | None) -> dict[str, Any]:
    return {"sinks": 10 if sinks is None else sinks, "original_max_position_embeddings": original}


def _rerope(original: int, _: int, window: int | None) -> dict[str, Any]:
    return {"window": _window(window, original, original // 2)}


def _self_extend(original: int, target: int, group: int | None, window: int | None) -> dict[str, Any]:
    window = _window(window, original, original // 4)

    def largest(group: int) -> int:
        return (target - 1) // group + window - window // group

    if group is None:  # the smallest that is large enough
        group = next(size for size in range(1, target + 1) if largest(size) < original)
    elif largest(group) >= original:
        raise ValueError(
            f"`group` = {group} puts token {target - 1} at position {largest(group)}, beyond `original_length` ="
            f" {original}: set a larger `group` or a smaller `window` than {window}."
        )
    return {"window": window, "group": group}


def _dual_chunk(original: int, _: int, chunk: int | None) -> dict[str, Any]:
    chunk = max(1, original * 3 // 4) if chunk is None else chunk
    if chunk >= original:
        raise ValueError(
            f"`chunk` = {chunk} must be below `original_length` = {original}, or neighbours in two chunks would not"
            " stand next to each other: set a smaller one."
        )
    return {"chunk": chunk, "original_max_position_embeddings": original}


def _longnet(_: int, __: int, segment_lengths: list[int] | None, dilation_rates: list[int] | None) -> dict[str, Any]:
    segments = [2048, 4096, 8192, 16384, 32768] if segment_lengths is None else list(segment_lengths)
    rates = [1, 2, 4, 6, 12] if dilation_rates is None else list(dilation_rates)
    check_dilation(segments, rates)
    return {"segment_lengths": segments, "dilation_rates": rates}


def _window(window: int | None, original: int, default: int) -> int:
    window = default if window is None else window
    if window >= original:
        raise ValueError(
            f"`window` = {window} must be below `original_length` = {original}, the distances that the model knows:"
            " set a smaller one."
        )
    return window


PATTERN_SETTINGS: dict[str, PatternSettings] = {
    "streaming_llm": PatternSettings(_streaming_llm, ("sinks", "window"), lambda p: p["sinks"] + p["window"]),
    "lm_infinite": PatternSettings(
        _lm_infinite, ("sinks",), lambda p: p["sinks"] + p["original_max_position_embeddings"]
    ),
    "rerope": PatternSettings(_rerope, ("window",)),
    "self_extend": PatternSettings(_self_extend, ("group", "window")),
    "dual_chunk": PatternSettings(_dual_chunk, ("chunk",)),
    "alibi": PatternSettings(lambda *_: {}),
    "xpos": PatternSettings(lambda *_: {}),
    "longnet": PatternSettings(
        _longnet,
        ("segment_lengths", "dilation_rates"),
        lambda p: longnet_keys(p["segment_lengths"], p["dilation_rates"]),
    ),
}
"""By the name of their RoPE type."""
