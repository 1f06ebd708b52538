"""Numbers of context extensions by position, against sums over a list of tokens."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.real_models import extend as module
from benchmarks.real_models.extend import compare_methods, measure_method
from benchmarks.real_models.figures import draw_extend
from benchmarks.real_models.systems import System
from benchmarks.real_models.texts import Text
from lightning_modules.scoring.token_scores import TokenScores


def test_ranges_and_ratios_by_hand(tmp_path, monkeypatch):
    methods = (System("tiny", "none"), System("tiny", "yarn"))
    monkeypatch.setattr(module, "RANGES", {"near": (1, 6), "beyond 8k": (6, 10)})
    text = "abcdefghij"
    offsets = torch.tensor([[n, n + 1] for n in range(10)])
    books = [Text(f"book {number}", "books", text) for number in range(6)]
    key = torch.tensor([0, 0, 1, 0, 0, 0, 1, 1, 0, 1], dtype=torch.bool)
    short = torch.where(key, -9.0, -1.0)
    scores = TokenScores("", "", 1, 1, torch.arange(10), offsets, torch.full((10,), -1.0), short)
    losses = {}
    draw = torch.Generator().manual_seed(0)
    for method in methods:
        (tmp_path / method.path).mkdir(parents=True)
        for number in range(6):
            losses[method.name, number] = torch.rand(10, generator=draw)
            tensors = {
                "log_likelihood": -losses[method.name, number],
                "offsets": offsets,
                "token_ids": torch.arange(10),
            }
            save_file(tensors, tmp_path / method.path / f"book_{number}.safetensors")
        (tmp_path / method.path / "keys_0.json").write_text(json.dumps({"right": [True, False, True]}))
    evaluator = {book.name: scores for book in books}
    found = compare_methods({m.name: measure_method(m, books, evaluator, ["keys 0"], tmp_path) for m in methods})
    yarn = found["methods"]["yarn"]
    assert (yarn["right"], yarn["questions"]) == (2, 3)

    def mean(method, places):
        return sum(float(losses[method, number][place]) for number in range(6) for place in places) / 6 / len(places)

    for kind, near, far in (("longppl", [2], [6, 7, 9]), ("perplexity", [*range(1, 6)], [*range(6, 10)])):
        for name, places in (("near", near), ("beyond 8k", far)):
            numbers = yarn["ranges"][name]
            assert numbers[kind] == pytest.approx(math.exp(mean("yarn", places)))
            assert numbers[f"{kind} tokens"] == 6 * len(places)
            ratio, low, high = numbers[f"{kind} ratio"]
            assert ratio == pytest.approx(math.exp(mean("yarn", places) - mean("none", places)))
            assert low < ratio < high
    assert found["methods"]["none"]["ranges"]["near"]["longppl ratio"] == [1.0, 1.0, 1.0]
    assert found["spread of log longppl beyond 8k"] > 0
    drawn = draw_extend(found)
    assert "yarn" in drawn
    assert "none" not in re.findall(r">([^<]+)</text>", drawn)
