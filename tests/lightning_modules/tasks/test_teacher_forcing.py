"""One pass with the right answer against full logits, question by question."""

import pytest
import torch

from lightning_modules.models.backbone import Backbone
from lightning_modules.tasks.questions.prompter import ForcedAnswer
from lightning_modules.tasks.teacher_forcing import teacher_forced
from tests.conftest import tiny_model

QUESTIONS = [
    ForcedAnswer([5, 6, 7, 8, 9], 3, [(3, 5)], 2),
    ForcedAnswer(list(range(20, 60)), 30, [(31, 33), (36, 40)], 27),
    ForcedAnswer(list(range(300, 320)), 12, [(15, 16)], 12),
]


@pytest.fixture(scope="module")
def backbone():
    return Backbone(tiny_model("gemma3_text", dtype=torch.float64, final_logit_softcapping=3.0, head_dim=8))


def reference(backbone, question):
    ids = torch.tensor(question.input_ids)
    logits = backbone.base_model(ids[None], use_cache=False).logits[0, :-1]
    log_likelihood = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    greedy = logits.argmax(-1)
    inside = torch.tensor([any(a <= place < b for a, b in question.spans) for place in range(1, len(ids))])
    right = [bool((greedy[a - 1 : b - 1] == ids[a:b]).all()) for a, b in question.spans]
    return right, greedy[question.answer_start - 1 :].tolist(), log_likelihood[inside], log_likelihood[~inside]


def assert_equal(scores, expected):
    right, greedy, answers, others = expected
    assert (scores.right, scores.greedy) == (right, greedy)
    assert (scores.answer_tokens, scores.other_tokens) == (len(answers), len(others))
    assert scores.answer_log_likelihood == pytest.approx(answers.sum().item(), rel=1e-9)
    assert scores.other_log_likelihood == pytest.approx(others.sum().item(), rel=1e-9)


@pytest.mark.parametrize("tokens_per_pass", [1, 80, 1000])
def test_sums_and_likeliest_tokens_are_those_of_full_logits(backbone, tokens_per_pass, monkeypatch):
    monkeypatch.setattr(type(backbone), "tokens_per_pass", tokens_per_pass)
    shared = []
    scores = teacher_forced(backbone, QUESTIONS, done=shared.append)
    for question, found in zip(QUESTIONS, scores, strict=True):
        assert_equal(found, reference(backbone, question))
    assert [sorted(group) for group in shared] == {1: [[1], [2], [0]], 80: [[1, 2], [0]], 1000: [[0, 1, 2]]}[
        tokens_per_pass
    ]


def test_an_answer_counts_if_each_of_its_tokens_is_the_likeliest(backbone):
    """The model is given what it would say itself, but for one token of the second answer."""
    ids, spans = list(range(20, 40)), [(20, 23), (23, 26), (27, 28)]
    for _ in range(10):
        logits = backbone.base_model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        if len(ids) == 25:
            ids[-1] = (ids[-1] + 1) % 400
    (scores,) = teacher_forced(backbone, [ForcedAnswer(ids, 20, spans, 20)])
    assert scores.right == [True, False, True]
    assert scores.score == pytest.approx(2 / 3)
