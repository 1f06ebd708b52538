"""Passkey, needle, first sentence, LongEval's lines and key-value pairs: the words of the originals."""

import json
import re

import pytest

from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.tasks.questions.task import SETTINGS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


@pytest.fixture(scope="module")
def prompter(tokenizer):
    return Prompter(tokenizer)


def test_passkey(prompter):
    example = find_tasks(["passkey"])[0].example(prompter, 2000, 0, depth=0.3)
    key = example.answers[0]
    header, before, asked, after, question = example.prompt.split("\n")
    assert header == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you"
        " about the important information there."
    )
    assert asked == f"The pass key is {key}. Remember it. {key} is the pass key."
    assert (question, example.answer_prefix) == ("What is the pass key?", " The pass key is")
    for noise in (before, after):
        assert (NOISE * 100).startswith(noise)
        assert noise.endswith(".")
    assert 1 <= int(key) <= 50000
    assert example.score(f" {key}. The") == 1
    assert example.score(f" {key}1") == 0


def test_needle(prompter):
    task = find_tasks(["needle"])[0]
    example = task.example(prompter, 2000, 0, depth=0.5)
    form = (
        "You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n<context>\n"
        ".+\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n.+\n"
        "</context>\n\nWhat is the best thing to do in San Francisco. Don't give information outside the document or"
        " repeat your findings"
    )
    assert re.fullmatch(form, example.prompt)
    assert example.answer_prefix == " Here is the most relevant sentence in the context:"
    assert task.example(prompter, 2000, 1, depth=0.5).prompt != example.prompt  # other essays around it
    assert example.score("Eat a sandwich in Dolores Park.") == pytest.approx(1 / 3)


def test_first_sentence(prompter):
    task = find_tasks(["first_sentence"])[0]
    examples = [task.example(prompter, 1000, index) for index in range(20)]
    assert len({example.answers for example in examples}) > 15
    for example in examples:
        assert example.prompt.startswith(example.answers[0])
        assert example.prompt.endswith("\n\nWhat is the first sentence of the text above? Repeat it word for word.")
        assert len(example.answers[0]) <= 120
        assert example.depth is None


def test_first_sentence_skips_headings_and_long_sentences(prompter, tmp_path):
    (tmp_path / "a.txt").write_text(f"A heading.\n\nThis {'very ' * 30}long one.\n\nThis is what is asked for.")
    for index in range(6):
        example = find_tasks(["first_sentence"], haystack=str(tmp_path))[0].example(prompter, 1000, index)
        assert example.answers == ("This is what is asked for.",)


def test_first_sentence_needs_a_sentence(prompter, tmp_path):
    (tmp_path / "headings.txt").write_text("One.\n\nTwo.\n\nThree.")
    with pytest.raises(ValueError, match=str(tmp_path)):
        find_tasks(["first_sentence"], haystack=str(tmp_path))[0].example(prompter, 1000, 0)


def test_longeval_lines(prompter):
    example = find_tasks(["longeval_lines"])[0].example(prompter, 3000, 0)
    found = re.fullmatch(
        "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a"
        " '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its"
        " corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding"
        " <REGISTER_CONTENT> of a certain line index. Now the record start:\n\n((?:line .+\n)+)\nNow the record is"
        r" over\. Tell me what is the <REGISTER_CONTENT> in line ([a-z]+-[a-z]+)\? I need the number\.",
        example.prompt,
    )
    lines = re.findall(r"line ([a-z-]+): REGISTER_CONTENT is <(\d+)>\n", found[1])
    assert len(lines) == found[1].count("\n") == len(dict(lines))
    assert dict(lines)[found[2]] == example.answers[0]
    assert all(1 <= int(value) <= 50000 for _, value in lines)
    assert sum(value == example.answers[0] for _, value in lines) == 1
    assert example.answer_prefix == f" Line <{found[2]}>: <REGISTER_CONTENT> is"
    assert example.score(f" <{example.answers[0]}>\nline x: <77>") == 1  # a base model goes on


def test_only_one_longeval_line_has_the_requested_number(prompter, monkeypatch):
    monkeypatch.setitem(SETTINGS["longeval_lines"], "largest", 3)
    for index in range(5):
        example = find_tasks(["longeval_lines"])[0].example(prompter, 2000, index)
        assert example.prompt.count(f"<{example.answers[0]}>") == 1
        assert set(re.findall(r"<(\d)>", example.prompt)) == {"1", "2", "3"}


def test_longeval_never_runs_out_of_lines(prompter, monkeypatch):
    monkeypatch.setattr("lightning_modules.tasks.questions.words.ADJECTIVES", ("odd",))
    monkeypatch.setattr("lightning_modules.tasks.questions.words.NOUNS", ("oak", "elm"))
    lines = re.findall(r"line (\S+):", find_tasks(["longeval_lines"])[0].example(prompter, 2000, 0).prompt)
    assert len(lines) > 20
    assert len(set(lines)) == len(lines)


def test_longeval_scores_the_last_number_of_a_chat_model(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}<u>{{ m.content }}<a>{% endfor %}")
    example = find_tasks(["longeval_lines"])[0].example(Prompter(tokenizer, chat_template=True), 2000, 0)
    assert example.answer_prefix == ""
    assert example.score(f"The content of line 3 is <{example.answers[0]}>.") == 1
    assert example.score(f"<{example.answers[0]}> of 12") == 0


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("key_values", 'JSON data:\n(?P<data>{{.+}})\n\nKey: "{key}"\nCorresponding value:'),
        ("key_values_query_both", 'Key: "{key}"\n\nJSON data:\n(?P<data>{{.+}})\n\nKey: "{key}"\nCorresponding value:'),
        ("key_values_query_before", 'Key: "{key}"\n\nJSON data:\n(?P<data>{{.+}})\n\nCorresponding value:'),
    ],
)
def test_key_values(name, form, prompter):
    example = find_tasks([name])[0].example(prompter, 3000, 0)
    key = re.search(f'Key: "({UUID})"', example.prompt)[1]
    start = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    found = re.fullmatch(start + form.format(key=key), example.prompt, re.DOTALL)
    pairs = json.loads(found["data"])
    assert len(pairs) > 9
    assert (pairs[key],) == example.answers
    assert all(re.fullmatch(UUID, part) for pair in pairs.items() for part in pair)
    # One pair a line, each but the first indented by one space.
    assert found["data"] == "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in pairs.items()) + "}"
    assert example.score(f'"{example.answers[0].upper()}"') == 1
