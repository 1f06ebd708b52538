"""What all tasks promise, with tokens that are pieces of words, words or unknown, and characters."""

import functools
import gzip
import json
import random
import re

import pytest

from lightning_modules.tasks.questions.multi_document_qa import MultiDocumentQA
from lightning_modules.tasks.questions.question_answering import QuestionAnswering
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.tasks.questions.task import Task
from tests.support import answerers

RETRIEVAL = {
    task.name: task for task in find_tasks(["niah", "retrieval", "key_values_query_before", "key_values_query_both"])
}
WITH_DEPTH = [name for name, task in RETRIEVAL.items() if task.varies_depth]
OTHERS = ["vt", "cwe", "fwe", "qa_1", "qa_2", "multi_document_qa", "nq_open"]
NAMES = [*RETRIEVAL, *OTHERS]
KINDS = ["bytes", "words", "characters"]
SAME_UNITS = ["niah_single_3", "niah_multikey_1", "niah_multikey_3", "niah_multivalue", "niah_multiquery"]
SAME_UNITS += ["key_values_query_before", "key_values_query_both"]
"""Tasks with the units of another one: sentences of essays, needles or pairs of keys and values."""

EVERY_KIND = [(name, kind) for name in NAMES for kind in KINDS if kind == "bytes" or name not in SAME_UNITS]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    (folder / "squad.json").write_text(json.dumps(answerers.squad_file(articles=60)))
    (folder / "hotpot.json").write_text(json.dumps(answerers.hotpot_file(questions=100)))
    lines = [json.dumps(answerers.nq_open_record(number)) for number in range(120)]
    (folder / "nq.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return {
        **RETRIEVAL,
        **{task.name: task for task in find_tasks(["vt", "cwe", "fwe"])},
        "qa_1": QuestionAnswering("qa_1", folder / "squad.json"),
        "qa_2": QuestionAnswering("qa_2", folder / "hotpot.json"),
        "multi_document_qa": MultiDocumentQA(),
        "nq_open": MultiDocumentQA(folder / "nq.jsonl.gz"),
    }


@pytest.fixture(scope="module")
def prompters(tasks):
    some = answerers.prompters(["Read the following coded text. 1. one 2. two"] * 3)["bytes"]
    return answerers.prompters([tasks[name].example(some, 4000, 0).prompt for name in NAMES])


@pytest.fixture(scope="module")
def prompter(prompters):
    return prompters["bytes"]


@pytest.fixture(scope="module")
def question(tasks, prompters):
    """Returns a question of a task for a kind of tokenizer, which is made once."""
    return functools.cache(lambda name, kind, index: tasks[name].example(prompters[kind], length_of(name), index))


def length_of(name):
    if name in RETRIEVAL:
        return 1500
    return 9000 if name == "cwe" else 5000


def read_answer(name, prompt):
    """Answers from the prompt alone, as a perfect model would."""
    if name in RETRIEVAL:
        return read_hidden(name.partition("_")[0], prompt)
    if name.startswith("qa"):
        subject = re.search(r"What colour is (.*)[?]$", prompt)[1]
        if name == "qa_2":
            subject = re.search(rf"{subject.removeprefix('the bird of ')} keeps (\w+)\.", prompt)[1]
        return re.search(rf"The colour of {subject} is (.*)\.", prompt)[1]
    if name == "nq_open":
        return re.search(rf"Who of {re.search(r'who of (.*)', prompt)[1]} is (.*)\.", prompt)[1]
    readers = {
        "vt": answerers.track_variables,
        "cwe": answerers.count_words,
        "fwe": answerers.count_coded_words,
        "multi_document_qa": answerers.read_lives,
    }
    return readers[name](prompt)


def read_hidden(kind, prompt):
    if kind == "niah":
        queries = re.search(r"What (?:is|are all) the special magic \w+ for (.+) mentioned in the", prompt)[1]
        found = [
            re.findall(rf"One of the special magic \w+ for {key} is: (\S+)\.", prompt)
            for key in re.split(r", and |, ", queries)
        ]
        return ", ".join(value for values in found for value in values)
    if kind == "longeval":
        key = re.search(r"in line (\S+)\? I need the number", prompt)[1]
        return f" <{re.search(rf'line {key}: REGISTER_CONTENT is <(.+)>', prompt)[1]}>.\nline x-y: is <7>"
    if kind == "passkey":
        return f" {re.search('The pass key is (.+?). Remember it', prompt)[1]}. Remember it. 12345"
    if kind == "needle":
        return " " + re.search(r"The best thing to do in San Francisco is[^.]*\.", prompt)[0]
    if kind == "first":
        return f" {prompt.partition('. ')[0]}. And so on, and on."
    return f' "{json_object(prompt)[re.findall("Key: .(.+).", prompt)[-1]]}"'


def json_object(prompt):
    return json.loads(prompt[prompt.index("{") : prompt.index("}") + 1])


def split_units(example):
    """The units by which depth is counted, and the one with the answer."""
    prompt, name = example.prompt, example.task
    if name == "longeval_lines":
        lines = re.findall("line .+>\n", prompt)
        return lines, next(line for line in lines if f"<{example.answers[0]}>" in line)
    if name.startswith("key_values"):
        return list(json_object(prompt).values()), example.answers[0]
    if name == "passkey":
        _, before, asked, after, _ = prompt.split("\n")
        return [*re.findall(r"[^.]+\.", before), asked, *re.findall(r"[^.]+\.", after)], asked
    if name == "needle":
        context = re.search("<context>\n(.+)\n</context>", prompt, re.DOTALL)[1]
        sentences = re.split(r"(?<=\.)\s", context)
        return sentences, next(sentence for sentence in sentences if "San Francisco" in sentence)
    context = re.search("afterwards.\n(.+)\nWhat", prompt, re.DOTALL)[1]
    sentences = context.split("\n") if "\n" in context else re.split(r"(?<=\.) ", context)
    return sentences, next(sentence for sentence in sentences if f"is: {example.answers[0]}." in sentence)


@pytest.mark.parametrize(("name", "kind"), EVERY_KIND)
def test_the_prompt_suffices_to_answer_and_silence_scores_0(question, name, kind):
    for index in range(2):
        example = question(name, kind, index)
        assert example.score(read_answer(name, example.prompt)) == 1
        assert example.score("") == 0
        assert example.score(example.target) == 1
        assert example.target.endswith(example.answers[0 if example.match in ("any", "subspan") else -1])


@pytest.mark.parametrize("name", [name for name in RETRIEVAL if name != "needle"])
def test_answers_of_other_questions_are_wrong(name, question):
    for index in range(5):
        other = question(name, "bytes", (index + 1) % 5)
        assert other.score(question(name, "bytes", index).target) < 1


@pytest.mark.parametrize("name", NAMES)
def test_equal_arguments_give_equal_questions(tasks, prompter, question, name):
    task, length = tasks[name], length_of(name)
    first = question(name, "bytes", 3)
    random.seed(5)
    state = random.getstate()
    others = [question(name, "bytes", 4), task.example(prompter, length, 3, seed=1)]
    others.append(task.example(prompter, length - 200, 3))
    assert random.getstate() == state
    assert task.example(prompter, length, 3) == first
    assert len({first.prompt, *(other.prompt for other in others)}) == 4


@pytest.mark.parametrize(("name", "kind"), EVERY_KIND)
def test_one_more_unit_would_not_fit(tasks, prompters, name, kind, monkeypatch):
    share = 1.37 if kind == "words" else 0.75
    prompter, length, fitted = prompters[kind], int(share * length_of(name)), {}

    def spied(self, prompter, length, wording, **options):
        fitted["units"], fitted["wording"] = fit(self, prompter, length, wording, **options), wording
        return fitted["units"]

    fit = Task.fit
    monkeypatch.setattr(Task, "fit", spied)
    example = tasks[name].example(prompter, length, 1)
    used = prompter.count(example.prompt, example.answer_prefix) + example.max_new_tokens
    assert used <= length < prompter.count(*fitted["wording"](fitted["units"] + 1)) + example.max_new_tokens
    assert length - used < length / 3  # units are small


@pytest.mark.parametrize(("name", "kind"), EVERY_KIND)
def test_teacher_forcing_finds_every_answer(question, prompters, name, kind):
    example, prompter = question(name, kind, 0), prompters[kind]
    forced = prompter.force(example.prompt, example.answer_prefix, example.target, example.answers)
    answers = example.answers[:1] if example.match in ("any", "subspan") else example.answers
    assert len(forced.spans) == len(answers)
    assert all(forced.answer_start <= start < stop for start, stop in forced.spans)
    if kind == "bytes":
        for (start, stop), answer in zip(forced.spans, answers, strict=True):
            assert answer in prompter.tokenizer.decode(forced.input_ids[start:stop])
        assert forced.spans[-1][1] == len(forced.input_ids)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_that_are_too_short_are_refused(tasks, prompter, name):
    with pytest.raises(ValueError, match=rf"60 tokens .* '{tasks[name].name}'"):
        tasks[name].example(prompter, 60, 0)


@pytest.mark.parametrize("name", WITH_DEPTH)
def test_the_answer_is_at_the_requested_depth(name, prompter):
    for index, depth in enumerate((0, 0.25, 0.5, 0.77, 1)):
        example = RETRIEVAL[name].example(prompter, 1500, index, depth=depth)
        units, asked = split_units(example)
        before, others = units.index(asked), len(units) - 1
        assert others > 9
        assert abs(before - depth * others) <= 0.5
        assert example.depth == before / others


@pytest.mark.parametrize("name", RETRIEVAL)
def test_answers_are_in_the_text_once(name, question):
    for index in range(4):
        example = question(name, "bytes", index)
        for answer in example.answers:
            times = len(re.findall(rf"(?<!\d){re.escape(answer)}(?!\d)", example.prompt))
            assert times == (2 if name == "passkey" else 1)


@pytest.mark.parametrize("name", WITH_DEPTH)
def test_random_depths_are_reported_and_spread(name, question):
    depths = []
    for index in range(12):
        example = question(name, "bytes", index)
        units, asked = split_units(example)
        assert example.depth == units.index(asked) / (len(units) - 1)
        depths.append(example.depth)
    assert min(depths) < 0.3
    assert max(depths) > 0.7
    assert 0.3 < sum(depths) / 12 < 0.7
