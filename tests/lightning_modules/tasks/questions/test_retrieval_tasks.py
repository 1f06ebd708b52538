"""What holds for every task that asks for something hidden in a long text."""

import json
import random
import re

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.tasks.questions.task import Task
from tests.conftest import byte_level_tokenizer, make_text

NAMES = ["niah", "retrieval", "key_values_query_before", "key_values_query_both"]
TASKS = {task.name: task for task in find_tasks(NAMES)}
WITH_DEPTH = [name for name, task in TASKS.items() if task.varies_depth]


def oracle(example):
    """Answers by reading the prompt, as a perfect model would."""
    prompt, name = example.prompt, example.task
    if name.startswith("niah"):
        queries = re.search(r"What (?:is|are all) the special magic \w+ for (.+) mentioned in the", prompt)[1]
        keys = re.split(r", and |, ", queries)
        return ", ".join(
            v for k in keys for v in re.findall(rf"One of the special magic \w+ for {k} is: (\S+)\.", prompt)
        )
    if name == "longeval_lines":
        key = re.search(r"in line (\S+)\? I need the number", prompt)[1]
        return f" <{re.search(rf'line {key}: REGISTER_CONTENT is <(.+)>', prompt)[1]}>.\nline x-y: is <7>"
    if name == "passkey":
        return f" {re.search('The pass key is (.+?). Remember it', prompt)[1]}. Remember it. 12345"
    if name == "needle":
        return " " + re.search(r"The best thing to do in San Francisco is[^.]*\.", prompt)[0]
    if name == "first_sentence":
        return f" {prompt.partition('. ')[0]}. And so on, and on."
    return f' "{json_object(prompt)[re.findall("Key: .(.+).", prompt)[-1]]}"'


def json_object(prompt):
    return json.loads(prompt[prompt.index("{") : prompt.index("}") + 1])


def pieces(example):
    """The long text as the pieces by which depth is counted, and which of them is asked for."""
    prompt, name = example.prompt, example.task
    if name == "longeval_lines":
        lines = re.findall("line .+>\n", prompt)
        return lines, next(line for line in lines if f"<{example.answers[0]}>" in line)
    if name.startswith("key_values"):
        values = list(json_object(prompt).values())
        return values, example.answers[0]
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


@pytest.fixture(scope="module")
def prompter(corpus):
    return Prompter(byte_level_tokenizer(corpus))


@pytest.fixture(scope="module")
def three_prompters(prompter, corpus):
    """One whose tokens are pieces of words, one whose are words or unknown, one whose are characters."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = {"special_tokens": ["[UNK]"], "show_progress": False}
    words.train_from_iterator([make_text(300)], trainers.WordPieceTrainer(vocab_size=300, **special))
    characters = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    characters.train_from_iterator([make_text(300)], trainers.WordLevelTrainer(**special))
    made = [PreTrainedTokenizerFast(tokenizer_object=one, unk_token="[UNK]") for one in (words, characters)]
    return {"bytes": prompter, "words": Prompter(made[0]), "characters": Prompter(made[1])}


def make(name, prompter, length=1500, index=0, **kwargs):
    return TASKS[name].example(prompter, length, index, **kwargs)


@pytest.mark.parametrize("name", TASKS)
def test_perfect_answers_score_one_and_none_scores_nothing(name, prompter):
    for index in range(10):
        example = make(name, prompter, index=index)
        assert example.score(oracle(example)) == 1
        assert example.score(example.target) == 1
        assert example.score("") == 0
        other = make(name, prompter, index=index + 10)
        assert name == "needle" or example.score(other.target) < 1


@pytest.mark.parametrize("name", TASKS)
def test_the_same_arguments_give_the_same_example(name, prompter):
    task = TASKS[name]
    first = task.example(prompter, 1500, 3)
    random.seed(5)
    state = random.getstate()
    others = [task.example(prompter, 1500, 4), task.example(prompter, 1500, 3, seed=1), task.example(prompter, 1400, 3)]
    assert random.getstate() == state
    assert task.example(prompter, 1500, 3) == first == find_tasks([name])[0].example(prompter, 1500, 3)
    assert len({first.prompt, *(other.prompt for other in others)}) == 4


@pytest.mark.parametrize("length", [1100, 2047, 5000])
@pytest.mark.parametrize("kind", ["bytes", "words", "characters"])
@pytest.mark.parametrize("name", TASKS)
def test_one_piece_more_would_not_fit(name, kind, length, three_prompters, monkeypatch):
    prompter, tried = three_prompters[kind], {}

    def spied(self, prompter, length, wording, **kwargs):
        tried["pieces"], tried["wording"] = fit(self, prompter, length, wording, **kwargs), wording
        return tried["pieces"]

    fit = Task.fit
    monkeypatch.setattr(Task, "fit", spied)
    example = make(name, prompter, length)
    used = len(prompter.encode(example.prompt, example.answer_prefix)) + example.max_new_tokens
    assert used <= length < prompter.count(*tried["wording"](tried["pieces"] + 1)) + example.max_new_tokens
    assert length - used < length / 3  # the pieces are no giants


@pytest.mark.parametrize("name", WITH_DEPTH)
def test_the_answer_stands_at_the_depth_asked_for(name, prompter):
    for depth in (0, 0.25, 0.5, 0.77, 1):
        for index in range(3):
            example = make(name, prompter, 2500, index, depth=depth)
            parts, asked = pieces(example)
            before, others = parts.index(asked), len(parts) - 1
            assert others > 9
            assert abs(before - depth * others) <= 0.5
            assert example.depth == before / others


@pytest.mark.parametrize("name", WITH_DEPTH)
def test_drawn_depths_are_told_and_spread(name, prompter):
    depths = []
    for index in range(30):
        example = make(name, prompter, 2500, index)
        parts, asked = pieces(example)
        assert example.depth == parts.index(asked) / (len(parts) - 1)
        depths.append(example.depth)
    assert min(depths) < 0.2
    assert max(depths) > 0.8
    assert 0.3 < sum(depths) / 30 < 0.7


@pytest.mark.parametrize("name", TASKS)
def test_the_answers_stand_in_the_text_once(name, prompter):
    for index in range(10):
        example = make(name, prompter, 3000, index)
        for answer in example.answers:
            times = len(re.findall(rf"(?<!\d){re.escape(answer)}(?!\d)", example.prompt))
            assert times == (2 if name == "passkey" else 1)


@pytest.mark.parametrize("name", TASKS)
def test_teacher_forcing_finds_every_answer(name, prompter):
    example = make(name, prompter)
    forced = prompter.force(example.prompt, example.answer_prefix, example.target, example.answers)
    assert len(forced.spans) == len(example.answers)
    for (start, stop), answer in zip(forced.spans, example.answers, strict=True):
        assert answer in prompter.tokenizer.decode(forced.input_ids[start:stop])
    assert forced.spans[-1][1] == len(forced.input_ids)
    assert forced.answer_start <= forced.spans[0][0]


@pytest.mark.parametrize("name", TASKS)
def test_refuses_what_cannot_be(name, prompter):
    with pytest.raises(ValueError, match=rf"A length of 150 tokens is too short for '{name}'.*Choose a larger length"):
        make(name, prompter, 150)
