"""The question of the made-up language as a task."""

import pytest

from datamodules.recall import RecallTask, recall_tokenizer
from lightning_modules.tasks.questions.prompter import Prompter

PROMPTER = Prompter(recall_tokenizer())


@pytest.mark.parametrize("length", [16, 64, 301])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0, None])
def test_who_looks_back_finds_the_answer(length, depth):
    for index in range(5):
        example = RecallTask().example(PROMPTER, length, index, seed=1, depth=depth)
        words = example.prompt.split()
        field = words[-1]
        places = [place for place in range(len(words) - 2) if words[place : place + 2] == ["let", field]]
        assert len(places) == 1
        assert example.answers == (words[places[0] + 2],)
        assert example.score(words[places[0] + 2]) == 1
        assert words[-2] == "recall"
        assert PROMPTER.count(example.prompt, "") == length - 1
        assert 0 <= example.depth <= 1
        assert depth is None or abs(example.depth - depth) < 0.25 if length > 16 else True
        assert example == RecallTask().example(PROMPTER, length, index, seed=1, depth=depth)


def test_a_document_without_room():
    with pytest.raises(ValueError, match="'recall'"):
        RecallTask().example(PROMPTER, 8, 0)
