"""What all tasks of a kind promise, on three kinds of tokenizers."""

import gzip
import json
import re

import pytest

from lightning_modules.tasks.questions.haystacks import NOISE
from lightning_modules.tasks.questions.multi_document_qa import MultiDocumentQA
from lightning_modules.tasks.questions.ruler.question_answering import QuestionAnswering
from lightning_modules.tasks.questions.ruler.variable_tracking import VariableTracking
from lightning_modules.tasks.questions.ruler.word_lists import CommonWords, FrequentWords
from tests.support import answerers

LENGTH = 9000
KINDS = ["bytes", "words", "characters"]
TASKS = ["vt", "cwe", "fwe", "qa_1", "qa_2", "multi_document_qa", "nq_open"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    (folder / "squad.json").write_text(json.dumps(answerers.squad_file(articles=60)))
    (folder / "hotpot.json").write_text(json.dumps(answerers.hotpot_file(questions=100)))
    lines = [json.dumps(answerers.nq_open_record(number)) for number in range(120)]
    (folder / "nq.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return {
        "vt": VariableTracking(),
        "cwe": CommonWords(),
        "fwe": FrequentWords(),
        "qa_1": QuestionAnswering("qa_1", folder / "squad.json"),
        "qa_2": QuestionAnswering("qa_2", folder / "hotpot.json"),
        "multi_document_qa": MultiDocumentQA(),
        "nq_open": MultiDocumentQA(folder / "nq.jsonl.gz"),
    }


@pytest.fixture(scope="module")
def prompters(tasks):
    some = answerers.prompters(["Read the following coded text. 1. one 2. two"] * 3)["bytes"]
    return answerers.prompters([tasks[name].example(some, 4000, 0).prompt for name in TASKS])


def answer(name, prompt):
    """Of a reader who has the prompt alone."""
    if name == "qa_1":
        return re.search(rf"The colour of {re.search(r'What colour is (.*)[?]$', prompt)[1]} is (.*)\.", prompt)[1]
    if name == "qa_2":
        owner = re.search(r"the bird of (.*)[?]$", prompt)[1]
        bird = re.search(rf"{owner} keeps (\w+)\.", prompt)[1]
        return re.search(rf"The colour of {bird} is (.*)\.", prompt)[1]
    if name == "nq_open":
        return re.search(rf"Who of {re.search(r'who of (.*)', prompt)[1]} is (.*)\.", prompt)[1]
    readers = {
        "vt": answerers.track_variables,
        "cwe": answerers.count_words,
        "fwe": answerers.count_coded_words,
        "multi_document_qa": answerers.read_lives,
    }
    return readers[name](prompt)


def largest_gap(name, example, prompter):
    """No piece of text that a prompt can grow by has more tokens."""
    if name == "vt":
        return prompter.count(f"{NOISE}\n", "")
    if name == "cwe":
        return prompter.count(3 * f" 12345. {max(re.findall(r'[0-9]+[.] ([a-z]+)', example.prompt), key=len)}", "")
    if name == "fwe":
        return prompter.count(4 * " qzxjvk", "")
    documents = example.prompt.split("Document ")[1:-1]
    return 1.2 * max(prompter.count(document, "") for document in documents)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TASKS)
def test_who_reads_the_prompt_can_answer_and_who_is_silent_cannot(tasks, prompters, name, kind):
    for index in range(2):
        example = tasks[name].example(prompters[kind], LENGTH, index)
        assert example.score(answer(name, example.prompt)) == 1
        assert example.score("") == 0
        assert example.score(example.target) == 1
        assert example.target.endswith(example.answers[0 if example.match in ("any", "subspan") else -1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TASKS)
def test_teacher_forcing_finds_the_answers(tasks, prompters, name, kind):
    example = tasks[name].example(prompters[kind], LENGTH, 0)
    forced = prompters[kind].force(example.prompt, example.answer_prefix, example.target, example.answers)
    assert len(forced.spans) == (1 if example.match in ("any", "subspan") else len(example.answers))
    assert all(forced.answer_start <= start < stop for start, stop in forced.spans)


@pytest.mark.parametrize("length", [LENGTH, 12345])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TASKS)
def test_fills_the_budget_to_within_one_piece(tasks, prompters, name, kind, length):
    example = tasks[name].example(prompters[kind], length, 1)
    gap = length - example.max_new_tokens - prompters[kind].count(example.prompt, example.answer_prefix)
    assert 0 <= gap <= largest_gap(name, example, prompters[kind])


@pytest.mark.parametrize("name", TASKS)
def test_the_same_arguments_give_the_same_question_whatever_was_asked_before(tasks, prompters, name):
    task, prompter = tasks[name], prompters["bytes"]
    first = task.example(prompter, LENGTH, 0)
    others = [task.example(prompter, LENGTH, 1), task.example(prompter, LENGTH, 0, seed=1)]
    assert task.example(prompter, LENGTH, 0) == first
    assert len({first.prompt, *(other.prompt for other in others)}) == 3


@pytest.mark.parametrize("name", TASKS)
def test_too_short_a_length_is_refused(tasks, prompters, name):
    with pytest.raises(
        ValueError, match=rf"A length of 150 tokens is too short for '{tasks[name].name}', which reserves"
    ):
        tasks[name].example(prompters["bytes"], 150, 0)
