import json
import re

import pytest

from lightning_modules.tasks.questions.example import contains_answer
from lightning_modules.tasks.questions.multi_document_qa import MultiDocumentQA, ReferenceQA
from lightning_modules.tasks.questions.registry import find_tasks
from tests.support import answerers

INSTRUCTION = (
    r"Write a high-quality answer for the given question using only the provided search results \(some of which might"
    r" be irrelevant\)\."
)


@pytest.fixture(scope="module")
def nq_open(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "nq.jsonl"
    path.write_text("\n".join(json.dumps(answerers.nq_open_record(number)) for number in range(20)))
    return path


@pytest.fixture(scope="module")
def prompter():
    return answerers.prompters(["Write a high-quality answer. Document [1](Title: Gold 0) A wind blew."])["words"]


def passages(prompt, query="after"):
    """Titles and texts of a prompt that is worded as the original, and its question."""
    before = "" if query == "after" else r"Question: (?P<before>.*?)\n\n"
    after = "" if query == "before" else r"Question: (?P<after>.*?)\n"
    found = re.fullmatch(rf"{INSTRUCTION}\n\n{before}(?P<results>Document .*)\n\n{after}Answer:", prompt, re.DOTALL)
    questions = {text for name, text in found.groupdict().items() if name != "results"}
    assert len(questions) == 1
    results = re.findall(r"^Document \[(\d+)\]\(Title: (.*?)\) (.*)$", found["results"], re.MULTILINE)
    assert [int(number) for number, *_ in results] == list(range(1, len(results) + 1))
    return [(title, text) for _, title, text in results], questions.pop()


@pytest.mark.parametrize("query", ["before", "after", "both"])
def test_the_question_is_where_it_is_requested(nq_open, prompter, query):
    task = MultiDocumentQA(nq_open, query=query)
    assert task.name == ("multi_document_qa" if query == "after" else f"multi_document_qa_query_{query}")
    example = task.example(prompter, 600, 3, depth=0)
    found, question = passages(example.prompt, query)
    plain, _ = passages(MultiDocumentQA(nq_open).example(prompter, 600, 3, depth=0).prompt)
    number = re.search(r"\d+", question)[0]
    assert found[0] == plain[0] == (f"Gold {number}", f"The Dr. Who of {number} is Winner{number}.")
    assert (example.answer_prefix, example.target, example.answers) == ("", f" Winner{number}", (f"Winner{number}",))


@pytest.mark.parametrize("depth", [0, 0.3, 0.5, 1])
def test_the_gold_passage_is_at_the_requested_depth(nq_open, prompter, depth):
    for task in (MultiDocumentQA(nq_open), MultiDocumentQA(nq_open, documents=5), MultiDocumentQA()):
        example = task.example(prompter, 1000, 1, depth=depth)
        found, _ = passages(example.prompt)
        place = next(n for n, (_, text) in enumerate(found) if contains_answer(text, example.answers))
        assert sum(contains_answer(text, example.answers) for _, text in found) == 1
        assert place == round(depth * (len(found) - 1))
        assert example.depth == place / (len(found) - 1)


def test_retrieved_passages_come_first_and_in_order(nq_open, prompter):
    for index in range(5):
        found, question = passages(MultiDocumentQA(nq_open, documents=4).example(prompter, 600, index, depth=1).prompt)
        number = re.search(r"\d+", question)[0]
        assert [title for title, _ in found] == [*(f"Distractor {number} {n}" for n in range(3)), f"Gold {number}"]


def test_longer_texts_use_passages_of_other_questions(nq_open, prompter):
    found, question = passages(MultiDocumentQA(nq_open).example(prompter, 1500, 0, depth=0).prompt)
    number = re.search(r"\d+", question)[0]
    titles = [title for title, _ in found]
    assert len(set(titles)) == len(titles) > 20
    own = [n for n, title in enumerate(titles) if title.startswith(f"Distractor {number} ")]
    assert len(own) == 5
    assert max(own) > 6  # shuffled among the others


def test_passages_of_other_questions_have_no_answer_and_do_not_repeat(tmp_path, prompter):
    records = [answerers.nq_open_record(number) for number in range(2)]
    shared = records[0]["ctxs"][0]
    for record in records:
        record["ctxs"][-1] = shared
        record["ctxs"][-2]["text"] = "They say winner0, and WINNER1."
        record["ctxs"][-2]["hasanswer"] = True  # of its own question: a distractor of neither
    records[0]["ctxs"][0] = {**shared, "title": "Known", "text": "Winner1 again."}
    (tmp_path / "nq.jsonl").write_text("\n".join(map(json.dumps, records)))
    seen = set()
    for index in range(2):
        task = MultiDocumentQA(tmp_path / "nq.jsonl", documents=7)
        found, question = passages(task.example(prompter, 1500, index).prompt)
        number = re.search(r"\d+", question)[0]
        assert len(found) == len(set(found)) == 7
        assert sum(f"winner{number}" in text.lower() for _, text in found) == 1
        seen.add(number)
    assert seen == {"0", "1"}


@pytest.mark.parametrize(
    ("documents", "length", "message"),
    [(None, 50_000, "50000"), (500, 50_000, "500 passages"), (20, 200, "200"), (0, 600, "`documents`")],
)
def test_impossible_numbers_of_documents_are_refused(nq_open, prompter, documents, length, message):
    with pytest.raises(ValueError, match=message):
        MultiDocumentQA(nq_open, documents).example(prompter, length, 0)


@pytest.mark.parametrize(
    ("text", "answers", "found"),
    [
        ("It is the Röntgen, Wilhelm-Conrad.", ["röntgen wilhelmconrad"], True),
        ("U.S.A", ["USA"], True),
        ("She said an  apple\tof a day", ["apple of the day!"], True),
        ("then", ["the n"], True),
        ("Ampere", ["Volta", "ampère"], False),
        ("A", ["a"], False),
        ("", ["x"], False),
    ],
)
def test_answers_are_normalized(text, answers, found):
    assert contains_answer(text, answers) is found


def test_only_the_first_line_counts(nq_open, prompter):
    example = MultiDocumentQA(nq_open).example(prompter, 600, 0)
    assert example.score(f" It was {example.answers[0].upper()}!\nno") == 1
    assert example.score(f"no\n{example.answers[0]}") == 0


def test_random_depths_cover_all_places(prompter):
    depths = [MultiDocumentQA(documents=10).example(prompter, 1500, index).depth for index in range(40)]
    assert {0, 1} < set(depths)
    assert len(set(depths)) == 10


@pytest.mark.parametrize("seed", [0, 1])
def test_references_ask_the_same_questions_with_the_gold_passage_or_without_any(nq_open, prompter, seed):
    for path in (nq_open, None):
        seen = set()
        for index in range(5):
            many = MultiDocumentQA(path, documents=4).example(prompter, 1500, index, seed=seed)
            oracle, closed = (
                ReferenceQA(setting, path).example(prompter, 1500, index, seed=seed)
                for setting in ("oracle", "closed_book")
            )
            found, question = passages(oracle.prompt)
            assert question == passages(many.prompt)[1]
            assert len(found) == 1
            assert found[0] in passages(many.prompt)[0]
            assert contains_answer(found[0][1], many.answers)
            assert closed.prompt == f"Question: {question}\nAnswer:"
            assert not contains_answer(closed.prompt, many.answers)
            for one in (oracle, closed):
                same = (one.answers, one.target, one.match, one.max_new_tokens, one.answer_prefix)
                assert same == (many.answers, many.target, many.match, many.max_new_tokens, "")
                assert one.depth is None
            seen.add(question)
        assert len(seen) == 5


def test_references_are_the_same_at_all_lengths_and_refused_if_the_passage_does_not_fit(nq_open, prompter):
    tasks = find_tasks(["multi_document_qa_oracle", "multi_document_qa_closed_book"], nq_open=str(nq_open))
    for task in tasks:
        assert not task.varies_depth
        assert task.example(prompter, 300, 2).prompt == task.example(prompter, 9000, 2).prompt
        with pytest.raises(ValueError, match=rf"105 tokens is too short for '{task.name}'"):
            task.example(prompter, 105, 0)
