import gzip
import json

import pytest

from lightning_modules.tasks.questions.question_files import Passage, read_hotpot, read_nq_open, read_squad
from lightning_modules.tasks.questions.registry import find_tasks
from tests.support import answerers

READERS = {"squad": read_squad, "hotpot": read_hotpot, "nq_open": read_nq_open}


def content(kind):
    if kind == "nq_open":
        return json.dumps(answerers.nq_open_record(0))
    return json.dumps({"squad": answerers.squad_file, "hotpot": answerers.hotpot_file}[kind]())


def test_squad_skips_unanswerable_questions_and_repeated_answers(tmp_path):
    data = answerers.squad_file()
    asked = data["data"][0]["paragraphs"][0]["qas"]
    asked[0]["answers"] = [{"text": "red"}, {"text": "Red"}, {"text": "red"}, {"text": ""}]
    del data["data"][0]["paragraphs"][1]["qas"][0]["answers"][1]  # as in 1.1, where nothing is impossible
    (tmp_path / "squad.json.gz").write_bytes(gzip.compress(json.dumps(data).encode()))
    collection = read_squad(tmp_path / "squad.json.gz")
    assert len(collection.questions) == 48
    assert collection.documents == sorted(collection.documents)
    assert collection.questions[0].answers == ("red", "Red")
    for question in collection.questions:
        assert question.text.split()[-1][:-1] in collection.documents[question.documents[0]]
        assert len(question.related) == 5
        assert not {*question.related} & {*question.documents}


def test_the_gold_passage_is_found_in_both_formats(tmp_path):
    marked, retrieved = answerers.nq_open_record(0), answerers.nq_open_record(1)
    retrieved["nq_annotated_gold"] = {"title": "Annotated", "chunked_long_answer": "Winner1 it is."}
    for passage in retrieved["ctxs"]:
        del passage["isgold"]
    (tmp_path / "nq.jsonl").write_text(f"{json.dumps(marked)}\n \n{json.dumps(retrieved)}\n")
    first, second = read_nq_open(tmp_path / "nq.jsonl")
    assert first.gold == Passage("Gold 0", "The Dr. Who of 0 is Winner0.")
    assert second.gold == Passage("Annotated", "Winner1 it is.")
    for number, question in enumerate((first, second)):  # without the passage that holds the answer
        assert [passage.title for passage in question.distractors] == [f"Distractor {number} {n}" for n in range(5)]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-3],
        lambda text: b"\xff" + text,
        lambda text: b"[" * 100_000,
        lambda text: b"3",
        lambda text: text.replace(b"question", b"query"),
        lambda text: b"\n",
    ],
)
def test_unusable_files_are_refused_by_name(tmp_path, kind, damage):
    content_ = damage(content(kind).encode())
    (tmp_path / "questions.json").write_bytes(content_)
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(content_)[:-9])
    for name in ("questions.json", "cut.json.gz", "missing.json"):
        with pytest.raises(ValueError, match=name):
            READERS[kind](tmp_path / name)


@pytest.mark.parametrize(("kind", "empty"), [("squad", '{"data": []}'), ("hotpot", "[]")])
def test_files_without_questions_are_refused(tmp_path, kind, empty):
    (tmp_path / "empty.json").write_text(empty)
    with pytest.raises(ValueError, match=r"empty\.json.*no question"):
        READERS[kind](tmp_path / "empty.json")


def test_tasks_of_files_need_their_option(tmp_path):
    for name, option in (("qa_1", "squad"), ("qa_2", "hotpot")):
        with pytest.raises(ValueError, match=f"'{name}' .*`{option}`"):
            find_tasks([name])
    for kind in READERS:
        (tmp_path / f"{kind}.json").write_text(content(kind))
    files = {kind: str(tmp_path / f"{kind}.json") for kind in READERS}
    tasks = find_tasks(["ruler", "lost_in_the_middle"], **files)
    assert [task.name for task in tasks[:13]][8:] == ["vt", "cwe", "fwe", "qa_1", "qa_2"]
    assert tasks[-1].questions is tasks[-2].questions
    assert [task.name for task in find_tasks(["ruler_synthetic"])] == [task.name for task in tasks[:11]]
