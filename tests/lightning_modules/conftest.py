from types import SimpleNamespace

import pytest

from tests.conftest import make_text


@pytest.fixture(scope="session")
def books(tmp_path_factory):
    """Seven documents each to validate and test on, of which some are too short for a short context."""
    folder = tmp_path_factory.mktemp("books")
    lengths = {"train": [150, 20, 250, 150], "validation": [60, 3, 80, 10, 90, 40, 70], "test": [50, 90, 2, 30, 70]}
    for split, words in lengths.items():
        (folder / split).mkdir()
        for number, count in enumerate(words):
            (folder / split / f"{number}.txt").write_text(make_text(count, seed=100 * len(split) + number))
    return folder


@pytest.fixture(scope="session")
def setup(books, model_dir, evaluator_dir, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    return SimpleNamespace(books=str(books), model=str(model_dir), evaluator=str(evaluator_dir), cache=cache)
