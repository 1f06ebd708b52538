import json
import re

import pytest

from lightning_modules.tasks.questions.question_answering import QuestionAnswering
from tests.support import answerers


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    (folder / "squad.json").write_text(json.dumps(answerers.squad_file()))
    (folder / "hotpot.json").write_text(json.dumps(answerers.hotpot_file()))
    return folder


@pytest.fixture(scope="module")
def prompter():
    return answerers.prompters([json.dumps(answerers.squad_file())])["words"]


def documents(prompt):
    """The documents of a prompt that is worded as the original, and its question."""
    instruction = (
        r"Answer the question based on the given documents\. Only give me the answer and do not output any other"
        r" words\."
    )
    text = rf"{instruction}\n\nThe following are given documents\.\n\n(.*)\n\n{instruction}\n\nQuestion: (.*)"
    context, question = re.fullmatch(text, prompt, re.DOTALL).groups()
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", context)
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2], question


def test_documents_of_the_same_article_come_first(files, prompter):
    task = QuestionAnswering("qa_1", files / "squad.json")
    articles = []
    for index in range(6):
        example = task.example(prompter, 500, index)
        found, question = documents(example.prompt)
        article = re.search(r"item(\d+)x", question)[1]
        articles.append(article)
        own = [document for document in found if f"item{article}x" in document]
        assert len(found) > 6
        assert len(own) == 6
        gold = next(n for n, document in enumerate(found) if example.answers[0] in document)
        assert example.depth == gold / (len(found) - 1)
        assert (example.answer_prefix, example.target) == (" Answer:", f" {example.answers[0]}")
        assert example.answers[1] == f"the {example.answers[0]}"
    assert len(set(articles)) > 2  # not the first paragraphs of the file


def test_questions_repeat_only_after_all_were_asked(files, prompter):
    task = QuestionAnswering("qa_1", files / "squad.json")
    asked = [documents(task.example(prompter, 400, index).prompt)[1] for index in range(48)]
    assert len(set(asked)) == 48
    assert documents(task.example(prompter, 900, 5).prompt)[1] == asked[5]
    assert documents(task.example(prompter, 400, 48).prompt)[1] == asked[0]
    assert documents(task.example(prompter, 400, 0, seed=1).prompt)[1] != asked[0]


def test_prompts_have_all_documents_of_a_hotpot_question(files, prompter):
    task = QuestionAnswering("qa_2", files / "hotpot.json")
    made = {asked["question"]: asked for asked in answerers.hotpot_file()}
    example = task.example(prompter, 700, 0)
    found, question = documents(example.prompt)
    own = [f"{title}\n{''.join(text)}" for title, text in made[question]["context"]]
    assert set(own) < set(found)
    assert len(found) == len(set(found)) > 10
    assert example.depth is None


def test_lengths_below_ten_documents_are_refused(files, prompter):
    task = QuestionAnswering("qa_2", files / "hotpot.json")
    found = []
    for length in range(150, 300, 10):
        try:
            found.append(len(documents(task.example(prompter, length, 0).prompt)[0]))
        except ValueError:
            found.append(0)
    assert found[0] == 0
    assert found == sorted(found)
    assert next(count for count in found if count) == 10


def test_a_file_with_too_few_documents_is_refused(files, prompter):
    with pytest.raises(ValueError, match=r"squad\.json.*90000"):
        QuestionAnswering("qa_1", files / "squad.json").example(prompter, 90_000, 0)


def test_the_gold_document_is_at_random_depths(files, prompter):
    task = QuestionAnswering("qa_1", files / "squad.json")
    depths = [task.example(prompter, 500, index).depth for index in range(40)]
    assert min(depths) < 0.2
    assert max(depths) > 0.8
