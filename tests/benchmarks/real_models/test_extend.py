"""Numbers of context extensions by position, against sums over a list of tokens."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.real_models.extend import (
    GEMMA_LENGTH,
    compare_methods,
    key_spans_by_pieces,
    measure_method,
    position_ranges,
)
from benchmarks.real_models.figures import draw_extend
from benchmarks.real_models.systems import System
from benchmarks.real_models.texts import Text
from lightning_modules.scoring.token_scores import TokenScores


def test_ranges_and_ratios_by_hand(tmp_path):
    methods = (System("tiny", "none"), System("tiny", "yarn"))
    ranges = {"near": (1, 6), "beyond 8k": (6, 10)}
    text = "abcdefghij"
    offsets = torch.tensor([[n, n + 1] for n in range(10)])
    books = [Text(f"book {number}", "books", text) for number in range(6)]
    key = torch.tensor([0, 0, 1, 0, 0, 0, 1, 1, 0, 1], dtype=torch.bool)
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
    found = compare_methods(
        {each.name: measure_method(each, books, lambda *_: key, ["keys 0"], tmp_path, ranges) for each in methods}
    )
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


def test_ranges_of_positions():
    assert position_ranges(GEMMA_LENGTH) == {
        "below 32k": (1, 32768),
        "32k to 48k": (32768, 49152),
        "48k to 64k": (49152, 65536),
        "beyond 32k": (32768, 65536),
    }


@pytest.mark.parametrize("count", [20, 27, 28, 29])
def test_each_piece_decides_the_tokens_that_no_earlier_one_has(count):
    text = "".join(chr(0x4E00 + n) for n in range(count))
    offsets = torch.tensor([[n, n + 1] for n in range(count)])
    draw = torch.Generator().manual_seed(count)
    pieces, scores = [], []

    def score(piece):
        pieces.append(piece)
        ids = torch.tensor([ord(character) - 0x4E00 for character in piece])
        short = torch.where(torch.rand(len(piece), generator=draw) < 0.5, -9.0, -1.0)
        short[0] = -1.0
        scores.append(short)
        return TokenScores("", "", 1, 1, ids, offsets[: len(piece)], torch.full((len(piece),), -1.0), short)

    spans = key_spans_by_pieces(score, text, offsets, 8).tolist()
    starts = [0, *range(5, count - 4 + 1, 4)]
    assert [len(piece) for piece in pieces] == [min(8 if start == 0 else 7, count - start) for start in starts]
    for token in range(count):
        # The first piece with the token in its second half; the first piece of all has no half.
        number = next(n for n, start in enumerate(starts) if token < start + (7 if start else 8))
        key = any(start <= token < end for start, end in spans)
        assert key == (scores[number][token - starts[number]] == -9.0)
