"""How SmolLM2 reads beyond its 8,192 positions without training, by each method of context extension.

The protocol, with hypotheses and decision rules, is in `benchmarks/real_models/PROTOCOL.md`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.real_models.systems import System, read_answers, read_scores
from benchmarks.real_models.texts import Text
from lightning_modules.scoring.key_tokens import Tokens, find_key_tokens
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.utilities.statistics import weighted_mean_interval

MODEL, LENGTH, TARGET = "smollm2-135m", 8192, 16384

RANGES = {"below 8k": (1, 8192), "8k to 12k": (8192, 12288), "12k to 16k": (12288, 16384), "beyond 8k": (8192, 16384)}
"""Positions of the tokens of which numbers are the mean."""


def _extend(method: str, **options: Any) -> dict[str, Any]:
    return {"method": method, "original_length": LENGTH, "target_length": TARGET, **options}


METHODS = (
    System(MODEL, "none"),
    System(MODEL, "PI", _extend("pi")),
    System(MODEL, "NTK", _extend("ntk")),
    System(MODEL, "YaRN", _extend("yarn")),
    System(MODEL, "EABF", _extend("eabf")),
    System(MODEL, "StreamingLLM", _extend("streaming_llm", sinks=4, window=4092)),
    System(MODEL, "Dual Chunk", _extend("dual_chunk", chunk=6144)),
    System(MODEL, "ReRoPE", _extend("rerope", window=4096)),
    System(MODEL, "Self-Extend", _extend("self_extend", group=4, window=1024)),
)
"""The first is the model as it is."""


def measure_method(
    method: System, books: Sequence[Text], evaluator: Mapping[str, TokenScores], sheets: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Return the answers of a method, and its losses, from what `score_system` stored.

    A loss is ``[book, range, kind of tokens, sum in nats, number of tokens]``.
    """
    rows = []
    for book in books:
        own = read_scores(method, book, folder)
        loss = -own["log_likelihood"].double().numpy()
        tokens = Tokens(own["token_ids"].long(), own["offsets"].long())
        key = find_key_tokens(evaluator[book.name], tokens).mask.numpy()
        for name, (first, stop) in RANGES.items():
            place = slice(first, stop)
            rows.append([book.name, name, "perplexity", float(loss[place].sum()), len(loss[place])])
            rows.append([book.name, name, "longppl", float(loss[place][key[place]].sum()), int(key[place].sum())])
    return {"losses": rows, "right": [right for sheet in sheets for right in read_answers(method, sheet, folder)]}


def compare_methods(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return LongPPL and perplexity by method and range, their ratios to the first method, and right answers.

    ``measured`` are the results of `measure_method` by the method's name.
    """
    columns = ["book", "range", "kind", "loss", "tokens"]
    tables = {name: pd.DataFrame(each["losses"], columns=columns) for name, each in measured.items()}
    baseline = next(iter(tables.values()))
    found: dict[str, Any] = {"methods": {}}
    for method, table in tables.items():
        answers = measured[method]["right"]
        ranges = {name: _measure_range(table, baseline, name) for name in RANGES}
        found["methods"][method] = {"ranges": ranges, "right": sum(answers), "questions": len(answers)}
    for kind in ("longppl", "perplexity"):
        values = [each["ranges"]["beyond 8k"][kind] for each in found["methods"].values()]
        found[f"spread of log {kind} beyond 8k"] = float(np.std(np.log(values), ddof=1))
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
