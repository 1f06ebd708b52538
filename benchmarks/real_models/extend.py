"""How SmolLM2, Gemma 3 and Qwen2.5 read beyond their positions without training, by each method of context extension.

The protocol, with hypotheses and decision rules, is in `benchmarks/real_models/PROTOCOL.md`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.real_models.systems import System, read_answers, read_scores
from benchmarks.real_models.texts import Text
from lightning_modules.functional import merge_spans
from lightning_modules.scoring.key_tokens import Tokens, key_spans
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.utilities.statistics import weighted_mean_interval

LENGTH, GEMMA_LENGTH, QWEN_LENGTH = 8192, 32768, 32768
"""Numbers of positions of SmolLM2, Gemma and Qwen, which read texts of up to twice these lengths."""


def _extend(model: str, length: int, name: str, method: str, **options: Any) -> System:
    settings = {"method": method, "original_length": length, "target_length": 2 * length, **options}
    return System(model, name, settings)


_smollm2 = partial(_extend, "smollm2-135m", LENGTH)

METHODS = (
    System("smollm2-135m", "none"),
    _smollm2("PI", "pi"),
    _smollm2("NTK", "ntk"),
    _smollm2("YaRN", "yarn"),
    _smollm2("EABF", "eabf"),
    _smollm2("StreamingLLM", "streaming_llm", sinks=4, window=4092),
    _smollm2("Dual Chunk", "dual_chunk", chunk=6144),
    _smollm2("ReRoPE", "rerope", window=4096),
    _smollm2("Self-Extend", "self_extend", group=4, window=1024),
)
"""The first is the model as it is."""

_gemma = partial(_extend, "gemma-3-270m", GEMMA_LENGTH)

GEMMA_METHODS = (System("gemma-3-270m", "none"), _gemma("YaRN", "yarn"), _gemma("EABF", "eabf", base=4_000_000))
"""The same for Gemma 3, whose layers with a sliding window are left as they are; their base is 1,000,000."""

QWEN = "qwen2.5-coder-0.5b"

QWEN_METHODS = (System(QWEN, "none"), _extend(QWEN, QWEN_LENGTH, "YaRN", "yarn"))


def position_ranges(length: int) -> dict[str, tuple[int, int]]:
    """Return by name the positions of the tokens of which numbers are the mean, for a model with ``length`` of them."""
    first, middle, last = (f"{tokens // 1024}k" for tokens in (length, length * 3 // 2, 2 * length))
    return {
        f"below {first}": (1, length),
        f"{first} to {middle}": (length, length * 3 // 2),
        f"{middle} to {last}": (length * 3 // 2, 2 * length),
        f"beyond {first}": (length, 2 * length),
    }


def key_spans_by_pieces(
    score: Callable[[str], TokenScores], text: str, offsets: Tensor, length: int = GEMMA_LENGTH
) -> Tensor:
    """Return the ``[M, 2]`` character spans of the key tokens of a text that is longer than its evaluator can read.

    Pieces of ``length`` tokens, whose ``[N, 2]`` offsets in the text are given, start half a piece apart. Each decides
    its second half, whose tokens have at least half a piece before them; the first one decides all of it.
    """
    found = []
    half = length // 2
    for start in range(0, max(len(offsets) - half, 1), half):
        # The text has a special token at the front, and the evaluator puts one before each piece: in place of a token.
        piece = offsets[start + 1 if start else 0 : start + length]
        first, last = int(piece[0, 0]), int(piece[-1, 1])
        decided = int(offsets[start + half, 0]) if start else 0
        spans = first + key_spans(score(text[first:last]))
        found.append(spans.clamp(min=decided))  # those that end before are empty
    return merge_spans(torch.cat(found))


def measure_method(
    method: System,
    books: Sequence[Text],
    find_keys: Callable[[Text, Tokens], Tensor],
    sheets: Sequence[str],
    folder: Path,
    ranges: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    """Return the answers of a method, and its losses, from what `score_system` stored.

    ``find_keys`` returns the mask of a text's key tokens. A loss is ``[book, range, kind of tokens, sum in nats, number
    of tokens]``.
    """
    rows = []
    for book in books:
        own = read_scores(method, book, folder)
        loss = -own["log_likelihood"].double().numpy()
        key = find_keys(book, Tokens(own["token_ids"].long(), own["offsets"].long())).numpy()
        for name, (first, stop) in ranges.items():
            place = slice(first, stop)
            rows.append([book.name, name, "perplexity", float(loss[place].sum()), len(loss[place])])
            rows.append([book.name, name, "longppl", float(loss[place][key[place]].sum()), int(key[place].sum())])
    return {"losses": rows, "right": [right for sheet in sheets for right in read_answers(method, sheet, folder)]}


def compare_methods(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return LongPPL and perplexity by method and range, their ratios to the first method, and right answers.

    ``measured`` are the results of `measure_method` by the method's name. The last range is that beyond the model's
    positions, of which the spread over methods is returned.
    """
    columns = ["book", "range", "kind", "loss", "tokens"]
    tables = {name: pd.DataFrame(each["losses"], columns=columns) for name, each in measured.items()}
    baseline = next(iter(tables.values()))
    ranges = list(dict.fromkeys(baseline["range"]))
    found: dict[str, Any] = {"methods": {}}
    for method, table in tables.items():
        answers = measured[method]["right"]
        by_range = {name: _measure_range(table, baseline, name) for name in ranges}
        found["methods"][method] = {"ranges": by_range, "right": sum(answers), "questions": len(answers)}
    for kind in ("longppl", "perplexity"):
        values = [each["ranges"][ranges[-1]][kind] for each in found["methods"].values()]
        found[f"spread of log {kind} {ranges[-1]}"] = float(np.std(np.log(values), ddof=1))
    return found


def _measure_range(table: pd.DataFrame, baseline: pd.DataFrame, name: str) -> dict[str, Any]:
    """Return both numbers of a range, and their ratios to the baseline's with intervals over books."""
    found: dict[str, Any] = {}
    for kind in ("longppl", "perplexity"):
        chosen, other = (each[(each["range"] == name) & (each["kind"] == kind)] for each in (table, baseline))
        loss, tokens = chosen["loss"].to_numpy(), chosen["tokens"].to_numpy(dtype=np.float64)
        found[kind] = math.exp(loss.sum() / tokens.sum())
        found[f"{kind} tokens"] = int(tokens.sum())
        found[f"{kind} ratio"] = list(loss_ratio(loss, tokens, other["loss"].to_numpy()))
    return found


def loss_ratio(
    loss: NDArray[np.float64], tokens: NDArray[np.float64], baseline: NDArray[np.float64]
) -> tuple[float, float | None, float | None]:
    """Return the ratio of a perplexity to the baseline's with its 95% interval, from summed losses by document."""
    counted = tokens > 0
    differences = (loss - baseline)[counted] / tokens[counted]
    interval = weighted_mean_interval(differences, tokens[counted])
    low, high = map(math.exp, interval) if interval else (None, None)
    return math.exp(np.average(differences, weights=tokens[counted])), low, high
