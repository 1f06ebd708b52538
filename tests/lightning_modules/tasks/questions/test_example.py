import random

import pytest

from lightning_modules.tasks.questions.example import Example


def judged(match, answers, prediction):
    return Example("task", 100, 0, "", "", tuple(answers), "", 10, match).score(prediction)


@pytest.mark.parametrize(
    ("match", "answers", "prediction", "score"),
    [
        ("all", ["ab", "cd", "ef", "gh"], "AB, xcdx and Ef", 0.75),
        ("all", ["a\nb"], "a\x00b", 1),
        ("any", ["ab", "cd"], "cD.", 1),
        ("any", ["ab", "cd"], "a b", 0),
        ("first_number", ["42"], " <0042>, not 7", 1),
        ("first_number", ["42"], " 7, not 42", 0),
        ("first_number", ["42"], " forty-two", 0),
        ("last_number", ["42"], "In line 7: 42.", 1),
        ("last_number", ["42"], "42 in line 7", 0),
        ("last_number", ["42"], "", 0),
        ("first_word", ["Oak", "elm"], "oak, or not", 1),
        ("first_word", ["oak"], "the oak", 0),
    ],
)
def test_score(match, answers, prediction, score):
    assert judged(match, answers, prediction) == score


def test_rouge_l_matches_the_longest_common_subsequence():
    rng = random.Random(0)
    for _ in range(50):
        answer = rng.choices("abcde", k=rng.randint(1, 9))
        said = rng.choices("abcde", k=rng.randint(1, 20))
        cut = said[: len(answer)]
        lengths = [[0] * (len(cut) + 1) for _ in range(len(answer) + 1)]
        for i, x in enumerate(answer):
            for j, y in enumerate(cut):
                lengths[i + 1][j + 1] = lengths[i][j] + 1 if x == y else max(lengths[i][j + 1], lengths[i + 1][j])
        expected = 2 * lengths[-1][-1] / (len(answer) + len(cut))
        assert judged("rouge_l", [" ".join(answer)], " ".join(said)) == pytest.approx(expected)
    assert judged("rouge_l", ["The end."], "the end and on") == 1
