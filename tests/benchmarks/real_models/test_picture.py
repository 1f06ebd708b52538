"""The README's picture: which words are key, and that the command draws them."""

import json
import shutil
import sys

import pandas as pd
import pytest
import torch
from PIL import Image

from benchmarks.real_models.__main__ import main
from benchmarks.real_models.picture import BROWSERS, choose_token, describe_key_tokens
from benchmarks.real_models.tokens import describe_tokens
from lightning_modules.scoring.token_scores import TokenScores

TEXT = "The Navy paid $1,250.5 for ships. Then Navy's ships, and the Navy sank $1,250.5!"
SPANS = [(0, 3), (3, 6), (6, 8), (8, 13), (13, 15), (15, 21), (21, 22), (22, 26), (26, 32), (32, 33), (33, 38)]
SPANS += [(38, 43), (43, 45), (45, 51), (51, 52), (52, 56), (56, 60), (60, 65), (65, 70), (70, 72), (72, 79), (79, 80)]


def make_scores(key):
    """Token 0 has nothing before it; the LSD of a key token is 3 plus its index."""
    long = torch.full((len(SPANS),), -1.0)
    short = torch.tensor([-4.0 - index if index in key else -1.0 for index in range(len(SPANS))])
    ids, offsets = torch.arange(len(SPANS)), torch.tensor(SPANS)
    return TokenScores("", "", 4, 2, ids, offsets, long, short)


def test_key_tokens_are_counted_by_their_words():
    tokens = describe_tokens(TEXT, make_scores({6, 7, 12, 13, 17, 18, 19, 20, 21}))
    key = tokens[tokens["key"]].astype({"distance": object})
    found = [
        (TEXT[row.start : row.end], row.word, row.kind, None if pd.isna(row.distance) else row.distance)
        for row in key.itertuples()
    ]
    assert found == [
        ("5", "1,250.5", "numbers", None),
        (" for", "for", "other words", None),
        ("'s", "Navy", "names", 10),
        (" ships", "ships", "other words", 5),
        (" Navy", "Navy", "names", 6),
        (" sank", "sank", "other words", None),
        (" $", "", "punctuation", None),
        ("1,250.5", "1,250.5", "numbers", 15),
        ("!", "", "punctuation", None),
    ]
    assert key["starts_word"].tolist()[:3] == [False, True, False]
    assert describe_key_tokens(tokens, longest_short=5) == (
        "9 key tokens: 3 of other words, 2 of numbers, 2 of names, 2 of punctuation;"
        " 3 of a word last used more than 5 tokens before"
    )


@pytest.mark.slow
def test_the_command_draws_a_light_and_a_dark_picture(tmp_path, monkeypatch, capsys, corpus, evaluator_dir):
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip("Chromium is not installed")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": corpus[0]}))
    options = f"--evaluator {evaluator_dir} --text {tmp_path}/text.jsonl --row 0 --output images"
    monkeypatch.chdir(tmp_path)
    options += " --context_length 32 --stride 16 --alpha 0.001 --beta -9"
    monkeypatch.setattr(sys, "argv", ["real_models", "picture", *options.split()])
    main()
    pictures = [Image.open(tmp_path / "images" / name).convert("L") for name in ("inspect.png", "inspect-dark.png")]
    light, dark = (sum(picture.histogram()[128:]) / (picture.width * picture.height) for picture in pictures)
    assert light > 0.8 > 0.2 > dark
    assert "<html" in (tmp_path / "images" / "inspect.html").read_text("utf-8")
    printed = capsys.readouterr().out
    assert "text.jsonl-0: " in printed
    assert "key tokens: " in printed
    assert "shown: token " in printed
    monkeypatch.setattr(sys, "argv", ["real_models", "picture", *options.split(), "--token", "0"])
    with pytest.raises(SystemExit, match="Token 0 is not a key token"):
        main()


def test_the_token_shown_begins_a_long_word_of_the_far_context():
    rows = [
        (3, 9.0, "Fed", 90, True, True),  # short
        (4, 8.0, "Navy", 90, False, True),  # the end of a word
        (5, 7.0, "Navy", 10, True, True),  # also near
        (6, 6.0, "sank", None, True, True),  # new
        (9, 6.0, "Navy", 90, True, False),  # not key
        (7, 5.0, "Navy", 90, True, True),
        (8, 4.0, "Navy", 90, True, True),
    ]
    tokens = pd.DataFrame(rows, columns=["token", "lsd", "word", "distance", "starts_word", "key"])
    assert choose_token(tokens, longest_short=10) == 7
    with pytest.raises(ValueError, match="--token"):
        choose_token(tokens[:5], longest_short=10)
