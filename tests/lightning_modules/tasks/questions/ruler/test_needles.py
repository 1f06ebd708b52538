"""RULER's needles: worded and placed as RULER does."""

import re

import pytest

from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.tasks.questions.ruler import DRAW, NEEDLE_DEPTHS

WORD, NUMBER = "[a-z]+-[a-z]+", "[1-9][0-9]{6}"
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
# Name: needles in the text, which of them are asked for, kinds of key and of value.
SETTINGS = {
    "niah_single_1": (1, 1, WORD, NUMBER),
    "niah_single_2": (1, 1, WORD, NUMBER),
    "niah_single_3": (1, 1, WORD, UUID),
    "niah_multikey_1": (4, 1, WORD, NUMBER),
    "niah_multikey_2": (None, 1, WORD, NUMBER),
    "niah_multikey_3": (None, 1, UUID, UUID),
    "niah_multivalue": (4, 4, WORD, NUMBER),
    "niah_multiquery": (4, 4, WORD, NUMBER),
}


@pytest.fixture(scope="module")
def prompter(tokenizer):
    return Prompter(tokenizer)


@pytest.mark.parametrize("name", SETTINGS)
def test_wording_matches_ruler(name, prompter):
    hidden, asked, key, value = SETTINGS[name]
    example = find_tasks([name])[0].example(prompter, 4000, 0)
    plural = "uuids" if value == UUID else "numbers"
    if asked == 1:
        kind, is_, all_, some = plural[:-1], "is", "is", "A"
    else:
        kind, is_, all_, some = plural, "are", "are all", "Some"
    query = ", ".join([rf"({key})"] * 3) + rf", and ({key})" if name == "niah_multiquery" else rf"({key})"
    form = (
        rf"{some} special magic {kind} {is_} hidden within the following text\. Make sure to memorize it\. I will"
        rf" quiz you about the {kind} afterwards\.\n(?P<context>.+)\nWhat {all_} the special magic {kind} for {query}"
        r" mentioned in the provided text\?"
    )
    found = re.fullmatch(form, example.prompt, re.DOTALL)
    queries = [group for group in found.groups() if group != found["context"]]
    listed = re.sub(r"\(.+?\)", "{}", query.replace(f"({key})", "{}")).format(*queries)
    assert example.answer_prefix == f" The special magic {kind} for {listed} mentioned in the provided text {is_}"
    assert example.max_new_tokens == 128
    assert example.match == "all"
    needles = re.findall(rf"One of the special magic {plural} for ({key}) is: ({value})\.", found["context"])
    assert len(needles) == (hidden or len(found["context"].splitlines()))
    assert len(example.answers) == asked
    # The answers come in the order of the keys that are asked for.
    asked_keys = queries if name == "niah_multiquery" else queries * asked
    assert set(zip(asked_keys, example.answers, strict=True)) == {pair for pair in needles if pair[0] in queries}


def test_needles_in_essays_are_at_40_depths(prompter):
    task = find_tasks(["niah_multikey_1"])[0]
    for index in range(10):
        context = task.example(prompter, 4000, index).prompt.split("\n")[1]
        sentences = re.split(r"(?<=\.) ", context)
        places = [i for i, sentence in enumerate(sentences) if sentence.startswith("One of the special")]
        total = len(sentences) - 4
        allowed = {int(total * (depth / 100)) for depth in NEEDLE_DEPTHS}
        assert {place - before for before, place in enumerate(places)} <= allowed


def test_other_needles_have_other_keys_and_values(prompter, monkeypatch):
    # As few numbers and words as make others collide with what is asked for.
    monkeypatch.setattr("lightning_modules.tasks.questions.words.ADJECTIVES", ("odd", "even"))
    monkeypatch.setattr("lightning_modules.tasks.questions.words.NOUNS", ("oak", "elm"))
    monkeypatch.setitem(DRAW, "numbers", lambda rng: str(rng.randint(10, 15)))
    example = find_tasks(["niah_multikey_2"])[0].example(prompter, 2000, 0)
    key = re.search("for (.+) mentioned", example.prompt)[1]
    assert len(re.findall(f"for {key} is:", example.prompt)) == 1
    assert len(re.findall(f"is: {example.answers[0]}\\.", example.prompt)) == 1
