"""Question about a long text, and the score of an answer."""

import re
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torchmetrics.functional.text import rouge_score

Match = Literal["all", "any", "first_number", "last_number", "first_word", "rouge_l", "subspan"]
"""Scoring rule of an answer; see `Example.score`."""


@dataclass(frozen=True)
class Example:
    """One question: text in, text out.

    Attributes:
        length: Tokens that prompt and answer may have together.
        index: Number of the example in its task and length; with the seed, it determines all random choices.
        prompt: Long text and question: the user's turn of a chat template.
        answer_prefix: Beginning of the model's turn, such as " The special magic number is"; may be empty.
        answers: Texts to find in the model's answer, by the rule ``match``.
        target: Right continuation of prompt and answer prefix with all answers in order, for teacher forcing. It ends
            with the last answer. If one of the answers is enough, it has the first.
        max_new_tokens: Maximum number of tokens to generate.
        depth: Position of the answer in the long text, from 0 (front) to 1 (end); None if it is in several places.
    """

    task: str
    length: int
    index: int
    prompt: str
    answer_prefix: str
    answers: tuple[str, ...]
    target: str
    max_new_tokens: int
    match: Match = "all"
    depth: float | None = None

    def score(self, prediction: str) -> float:
        """Return the fraction of the answers that the generated text contains, from 0 to 1.

        ``all`` is RULER's `string_match_all`, the fraction of the answers that occur, and ``any`` its
        `string_match_part`, whether at least one occurs; both ignore case. ``last_number`` is LongEval's: whether the
        last number in the text is the first answer; ``first_number`` compares the first number, because a base model
        continues after its answer. ``first_word`` compares the first word without punctuation. ``rouge_l`` is ROUGE-L
        (F1) of the first answer and the text, cut to the same number of words. ``subspan`` is the `best_subspan_em` of
        *Lost in the Middle*: whether the first line contains an answer, see `contains_answer`.
        """
        if self.match in ("first_number", "last_number"):
            numbers = re.findall(r"\d+", prediction) or ["none"]
            said = numbers[0] if self.match == "first_number" else numbers[-1]
            return float(said.lstrip("0") == self.answers[0].lstrip("0"))
        if self.match == "rouge_l":
            words = prediction.split()[: len(self.answers[0].split())]
            return float(rouge_score(" ".join(words), self.answers[0], rouge_keys="rougeL")["rougeL_fmeasure"])
        if self.match == "first_word":
            word = (prediction.split() or [""])[0]
            return float(word.strip(".,;:!?\"'").lower() in map(str.lower, self.answers))
        if self.match == "subspan":
            return float(contains_answer(prediction.split("\n")[0], self.answers))
        # As in RULER's post-processing, a control character is a line break.
        text = re.sub(r"[\x00-\x1f]", "\n", prediction).lower()
        found = [answer.lower() in text for answer in self.answers]
        if self.match == "any":
            return float(any(found))
        return sum(found) / len(found)


def contains_answer(text: str, answers: Iterable[str]) -> bool:
    """Return whether a text contains an answer, ignoring case, punctuation and articles.

    The `best_subspan_em` of *Lost in the Middle* (https://github.com/nelson-liu/lost-in-the-middle), with the
    normalization of SQuAD's evaluation. Unlike there, an answer that normalizes to nothing, such as "A", never matches
    instead of always.

    Example:
        >>> contains_answer("It was Wilhelm C. Röntgen.", ["the Wilhelm C Röntgen"])
        True
    """

    def normalized(words: str) -> str:
        words = words.lower().translate(str.maketrans("", "", string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", words).split())

    normal = normalized(text)
    return any(answer in normal for answer in map(normalized, answers) if answer)
