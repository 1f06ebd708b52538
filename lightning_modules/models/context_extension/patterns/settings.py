"""Parameters of each pattern in ``rope_parameters``, with checks and defaults."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_modules.models.context_extension.patterns.trained import check_dilation, longnet_keys

PATTERN_OPTIONS = ("sinks", "window", "group", "chunk", "segment_lengths", "dilation_rates")
"""Options that are integers of 1 or more; the last two are lists of them."""


class PatternSettings(NamedTuple):
    """Settings of an attention pattern."""

    parameters: Callable[..., dict[str, Any]]  # from original length, target length and options
    options: tuple[str, ...] = ()
    keys: Callable[[Mapping[str, Any]], int] | None = None  # most keys of a query; None if it grows with the text

    def rope_parameters(self, extension: Any, *_: Any) -> dict[str, Any]:
        """Return the values of ``rope_parameters`` for a `ContextExtension`."""
        options = {name: getattr(extension, name) for name in self.options}
        parameters = self.parameters(extension.original_length, extension.target_length, **options)
        return {"rope_type": extension.method, **parameters}

    @property
    def written(self) -> tuple[str, ...]:
        """Return the names of the parameters, which are the same for all lengths."""
        return tuple(self.parameters(4096, 32768, **dict.fromkeys(self.options)))


def _streaming_llm(original: int, _: int, sinks: int | None, window: int | None) -> dict[str, Any]:
    sinks = 4 if sinks is None else sinks
    window = max(1, original - sinks) if window is None else window
    if sinks + window > original:
        raise ValueError(
            f"`sinks` + `window` = {sinks} + {window} must not exceed `original_length` = {original}, the largest"
            " distance in pre-training: set smaller ones."
        )
    return {"sinks": sinks, "window": window}


def _lm_infinite(original: int, _: int, sinks: int | None) -> dict[str, Any]:
    return {"sinks": 10 if sinks is None else sinks, "original_max_position_embeddings": original}


def _rerope(original: int, _: int, window: int | None) -> dict[str, Any]:
    return {"window": _resolve_window(window, original, original // 2)}


def _self_extend(original: int, target: int, group: int | None, window: int | None) -> dict[str, Any]:
    window = _resolve_window(window, original, original // 4)

    # Position of the last query relative to key 0, the largest distance.
    def last_position(group: int) -> int:
        return (target - 1) // group + window - window // group

    if group is None:  # the smallest with which the target length fits
        # Larger groups are coarser, so the smallest that fits is the best.
        group = next(size for size in range(1, target + 1) if last_position(size) < original)
    elif last_position(group) >= original:
        raise ValueError(
            f"`group` = {group} puts token {target - 1} at position {last_position(group)}, beyond `original_length` ="
            f" {original}: set a larger `group` or a smaller `window` than {window}."
        )
    return {"window": window, "group": group}


def _dual_chunk(original: int, _: int, chunk: int | None) -> dict[str, Any]:
    # The rest of the original length is for neighbors in the previous chunk.
    chunk = max(1, original * 3 // 4) if chunk is None else chunk
    # The last positions are for queries that look into the previous chunk.
    if chunk >= original:
        raise ValueError(
            f"`chunk` = {chunk} must be below `original_length` = {original}, so that tokens on both sides of a chunk"
            " boundary stay neighbors: set a smaller one."
        )
    return {"chunk": chunk, "original_max_position_embeddings": original}


def _longnet(_: int, __: int, segment_lengths: list[int] | None, dilation_rates: list[int] | None) -> dict[str, Any]:
    segments = [2048, 4096, 8192, 16384, 32768] if segment_lengths is None else list(segment_lengths)
    rates = [1, 2, 4, 6, 12] if dilation_rates is None else list(dilation_rates)
    check_dilation(segments, rates)
    return {"segment_lengths": segments, "dilation_rates": rates}


def _resolve_window(window: int | None, original: int, default: int) -> int:
    window = default if window is None else window
    if window >= original:
        raise ValueError(
            f"`window` = {window} must be below `original_length` = {original}, the largest distance in pre-training:"
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
"""Settings by the name of the pattern's RoPE type."""
