import math
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_modules.tasks.evaluation.questions import (
    Key,
    check_questions,
    make_questions,
    put_questions,
    question_keys,
)
from lightning_modules.tasks.evaluation.summary import summarize
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks
from tests.support.toy_tasks import GUESS, SEVERAL

TASKS = find_tasks([GUESS, SEVERAL])


@pytest.fixture(scope="module")
def questions(prompter):
    return make_questions(question_keys(TASKS, [48, 64], 6, [0.0, 1.0]), TASKS, prompter, seed=3)


def test_each_task_length_depth_and_sample_has_a_key():
    keys = question_keys(TASKS, [64, 48, 64], 2, depths=3)
    assert keys[:3] == [Key("guess", 48, 0.0, 0), Key("guess", 48, 0.0, 1), Key("guess", 48, 0.5, 0)]
    assert len(keys) == len(set(keys)) == 2 * 3 * 2 + 2 * 2
    assert keys[-1] == Key("several", 64, None, 1)


def test_keys_determine_questions(questions, prompter):
    for key, example in questions:
        again = make_questions([key], TASKS, prompter, seed=3)[0].example
        assert example == again
        assert example.depth == key.depth
        assert prompter.count(example.prompt, example.answer_prefix) + example.max_new_tokens <= key.length
    assert make_questions([questions[0].key], TASKS, prompter, seed=4)[0].example.prompt is not None


@pytest.mark.parametrize(
    ("tasks", "depths", "name"),
    [
        (TASKS + TASKS, None, "tasks"),
        (TASKS, 1, "depths"),
        (TASKS, [], "depths"),
        (TASKS, [0.5, 1.5], "depths"),
        (TASKS, [0.5, 0.5], "depths"),
    ],
)
def test_impossible_tasks_and_depths_are_refused(tasks, depths, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        question_keys(tasks, [64], 1, depths)


def test_forced_and_generated_answers_have_equal_scores(questions, guessing, prompter):
    chosen = [question for question in questions if question.key.task == "guess"]
    forced = put_questions(guessing, prompter, chosen, "teacher_forced")
    generated = put_questions(guessing, prompter, chosen, "generate")
    assert [result.score for result in forced] == [result.score for result in generated]
    assert {result.score for result in forced} == {0.0, 1.0}
    for one, other in zip(forced, generated, strict=True):
        assert one.prediction.split()[0] == other.prediction.split()[0]
        assert one.prompt_tokens == other.prompt_tokens
        assert (one.key, one.depth, one.right_answers) == (other.key, other.depth, other.right_answers)
        assert one.answer_tokens > 0
        assert other.answer_tokens == 0


def test_results_are_in_order_and_are_passed_on_early(questions, guessing, prompter):
    parts = []
    results = put_questions(guessing, prompter, questions, "generate", done=parts.append)
    assert [result.key for result in results] == [question.key for question in questions]
    assert sorted(str(one) for part in parts for one in part) == sorted(map(str, results))


def test_the_end_token_of_the_tokenizer_ends_an_answer(questions, guessing, prompter):
    expected = [result.prediction for result in put_questions(guessing, prompter, questions, "generate")]
    guessing.base_model.config.eos_token_id = guessing.base_model.generation_config.eos_token_id = None
    assert [result.prediction for result in put_questions(guessing, prompter, questions, "generate")] == expected


def test_several_answers_score_by_their_fraction(questions, guessing, prompter):
    chosen = [question for question in questions if question.key.task == "several"]
    scores = {result.score for result in put_questions(guessing, prompter, chosen, "teacher_forced")}
    assert 0.5 in scores


def test_perplexities_are_over_all_tokens(questions, guessing, prompter):
    results = put_questions(guessing, prompter, questions, "teacher_forced")
    nll, tokens = {"answers": 0.0, "others": 0.0}, {"answers": 0, "others": 0}
    for _, example in questions:
        forced = prompter.force(example.prompt, example.answer_prefix, example.target, example.answers)
        ids = torch.tensor(forced.input_ids)
        log_likelihood = guessing.base_model(ids[None]).logits[0, :-1].log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        for place, value in enumerate(log_likelihood.tolist(), start=1):
            kind = "answers" if any(a <= place < b for a, b in forced.spans) else "others"
            nll[kind] -= value
            tokens[kind] += 1
    summary = summarize(results)
    expected = [math.exp(nll[kind] / tokens[kind]) for kind in ("answers", "others")]
    assert summary.perplexities[None, None] == pytest.approx(expected, rel=1e-5)
    assert expected[0] < 4 < expected[1]


def test_a_target_without_an_answer_is_refused(questions, guessing, prompter):
    example = questions[0].example
    wrong = [questions[0]._replace(example=replace(example, target=" fo"))]
    with pytest.raises(ValueError, match=r"target .*'guess'"):
        put_questions(guessing, prompter, wrong, "teacher_forced")


def test_unknown_words_give_a_warning(questions, prompter, recwarn):
    known = {word: number for number, word in enumerate(["<unk>", "di", "fo", "gu."])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    stranger = Prompter(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    check_questions([questions[0].key], TASKS, prompter, 3)
    assert not recwarn
    with pytest.warns(UserWarning, match="'guess'"):
        check_questions([questions[0].key], TASKS, stranger, 3)
