"""Pack arrays of a document for the page's script."""

import base64
import re
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from lightning_modules.functional import LikeliestTokens
from lightning_modules.visualization.page.alternatives import Alternatives

STEPS_PER_NAT = 512
"""Resolution of the alternatives' log-likelihoods, which are only displayed: 1/512 nat is 0.2 % of a probability."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def pack(arrays: Mapping[str, NDArray[np.generic]]) -> str:
    """Pack named arrays as text that needs no escaping in HTML: a safetensors file, deflated, in base64."""
    return base64.b64encode(zlib.compress(save(dict(arrays)))).decode("ascii")


def utf8(text: str) -> NDArray[np.uint8]:
    """Encode a text as UTF-8; a lone surrogate, which cannot be encoded, becomes the replacement character."""
    return np.frombuffer(_SURROGATE.sub("\ufffd", text).encode("utf-8"), dtype=np.uint8)


def span_arrays(text: str, offsets: Tensor) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Encode ``[N, 2]`` character spans as the distance of each start from the preceding one, and lengths.

    Both count UTF-16 units, as JavaScript does. A token without characters starts where the preceding token starts.
    """
    start, stop = offsets.long().unbind(-1)
    empty = start == stop
    so_far = torch.where(empty, 0, start).cummax(0).values
    start = torch.where(empty, so_far, start)
    stop = torch.where(empty, so_far, stop)
    code = np.frombuffer(_SURROGATE.sub("\ufffd", text).encode("utf-32-le"), dtype="<u4")
    units = np.concatenate([[0], np.cumsum(1 + (code >= 0x10000))])
    starts = units[start.numpy()]
    stops = units[stop.numpy()]
    return np.diff(starts, prepend=0).astype(np.uint32), (stops - starts).astype(np.uint32)


def numbered(vocabulary: Tensor, ids: Tensor) -> NDArray[np.uint32]:
    """Return the index of each id in ``[M]`` ascending ids, with the same shape."""
    return torch.searchsorted(vocabulary, ids.contiguous()).numpy().astype(np.uint32)


def alternative_arrays(
    alternatives: Alternatives, vocabulary: Tensor, first_short: int
) -> dict[str, NDArray[np.generic]]:
    """Return arrays of the likeliest tokens in both contexts; in the short one only from ``first_short`` on."""
    short = LikeliestTokens(*(part[first_short:] for part in alternatives.short))
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, found in (("long", alternatives.long), ("short", short)):
        steps = (found.log_likelihood.double() * -STEPS_PER_NAT).round().nan_to_num(65535.0).clamp(0, 65535)
        arrays[f"{name}_token"] = numbered(vocabulary, found.token_ids)
        arrays[f"{name}_steps"] = steps.numpy().astype(np.uint16)
    return arrays
