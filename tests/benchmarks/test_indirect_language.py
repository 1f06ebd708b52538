"""The language whose answers have to be inferred."""

from collections import Counter

import pytest

from benchmarks.indirect_language import indirect_records, value_forms
from datamodules.recall.language import ABOUT, SAME, SET, THEME, VERBS

EVENTS = {SET: 3, SAME: 3, THEME: 2, ABOUT: 2, **dict.fromkeys(VERBS, 3)}


@pytest.fixture(scope="module")
def records():
    return list(indirect_records(60, length=500, slot=7, seed=3))


def events(words):
    """Return index of the last word and the words of each event."""
    texts = [word.text for word in words]
    return [
        (index + EVENTS[text] - 1, texts[index : index + EVENTS[text]])
        for index, text in enumerate(texts)
        if text in EVENTS and index + EVENTS[text] <= len(texts)
    ]


def meaning(value):
    return next(number for number, forms in enumerate(value_forms()) if value in forms)


def known(facts, name):
    """Return what a reader of these events alone knows of a name: its value, whatever the form, or the genre."""
    if name == THEME:
        return any(event[0] in (ABOUT, THEME) for event in facts) or None
    group = {name}
    for _ in facts:
        for event in facts:
            if event[0] == SAME and group & set(event[1:]):
                group |= set(event[1:])
    mentioned = [meaning(event[2]) for event in facts if event[0] in (SET, *VERBS) and event[1] in group]
    assert len(set(mentioned)) <= 1
    return mentioned[0] if mentioned else None


def test_each_answer_can_be_inferred_from_its_distance_on_and_no_later(records):
    checked = Counter()
    for record in records[:12]:
        listed = events(record.words)
        for end, event in listed:
            answer = record.words[end]
            if answer.kind != "answer":
                continue
            before = [(place, other) for place, other in listed if place < end]
            name, start = event[0] if event[0] == THEME else event[1], end - answer.distance
            found = known([other for place, other in before if place >= start], name)
            assert found == (True if name == THEME else meaning(answer.text))
            assert known([other for place, other in before if place > start], name) is None
            assert (answer.inference == "repeat") == (event[-2:] in [other[-2:] for _, other in before])
            assert answer.text == event[-1] if name == THEME else value_forms()[found][VERBS.index(event[0])]
            checked[answer.inference] += 1
    assert min(checked[kind] for kind in ("repeat", "paraphrase", "hops", "gist")) >= 5
