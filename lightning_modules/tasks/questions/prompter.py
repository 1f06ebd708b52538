"""Turn questions into the tokens that a model reads."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from lightning_modules.models.tokenization.chat_templates import check_chat_template, render_chat, user_turn
from lightning_modules.models.tokenization.encoding import EncodedText, encode_text


class ForcedAnswer(NamedTuple):
    """Tokens of prompt, answer prefix and target, and ``[start, stop)`` of each answer.

    The target begins at ``answer_start``. The response, which is answer prefix and target, begins at
    ``response_start``; a token that it shares with the prompt belongs to the response.
    """

    input_ids: list[int]
    answer_start: int
    spans: list[tuple[int, int]]
    response_start: int

    @property
    def is_answer(self) -> tuple[bool, ...]:
        """Whether each token of the response belongs to an answer."""
        marks = [False] * len(self.input_ids)
        for first, stop in self.spans:
            marks[first:stop] = [True] * (stop - first)
        return tuple(marks[self.response_start :])


class Prompter:
    """Turns questions into tokens, and counts them.

    With ``chat_template``, the prompt is the user's turn of the tokenizer's chat template. The template already has
    special tokens, so ``add_special_tokens`` has no effect. ``system_instruction`` is the system's turn, and without a
    chat template a paragraph before the prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        chat_template: bool = False,
        add_special_tokens: bool = True,
        system_instruction: str | None = None,
    ) -> None:
        if chat_template:
            check_chat_template(tokenizer, system_instruction)
        self.tokenizer = tokenizer
        self.system_instruction = system_instruction
        self.chat_template = chat_template
        self.add_special_tokens = add_special_tokens and not chat_template

    def text(self, prompt: str, answer_prefix: str) -> str:
        """Return the complete input of the model as text."""
        if self.chat_template:
            messages = user_turn(prompt, self.system_instruction)
            prompt = render_chat(self.tokenizer, messages, add_generation_prompt=True)
        elif self.system_instruction:
            prompt = f"{self.system_instruction}\n\n{prompt}"
        return prompt + answer_prefix

    def encode(self, prompt: str, answer_prefix: str) -> list[int]:
        """Return the token ids of a question."""
        return self._encode_text(self.text(prompt, answer_prefix)).ids

    def count(self, prompt: str, answer_prefix: str) -> int:
        """Return the number of tokens of a question."""
        return len(self.encode(prompt, answer_prefix))

    def force(self, prompt: str, answer_prefix: str, target: str, answers: Sequence[str]) -> ForcedAnswer:
        """Return a question and its answer as one text; see `Example` for the arguments.

        A target that begins a turn of a chat template loses its leading space; answers that are not in it have no span.
        """
        asked = self.encode(prompt, answer_prefix)
        if self.chat_template and not answer_prefix:
            target = target.lstrip()
        text = self.text(prompt, answer_prefix)
        ids, offsets, _ = self._encode_text(text + target)
        # A tokenizer may join the last character of the question with the first of the answer.
        start = _count_shared(asked, ids)
        spans = []
        stop = len(text)
        for answer in answers:
            first = (text + target).find(answer, stop)
            if first < 0:
                continue
            stop = first + len(answer)
            tokens = [i for i in range(start, len(ids)) if offsets[i][0] < stop and first < offsets[i][1]]
            if tokens:
                spans.append((tokens[0], tokens[-1] + 1))
        prompt_end = len(self.text(prompt, ""))
        response_start = next((i for i, (_, end) in enumerate(offsets) if end > prompt_end), len(ids))
        return ForcedAnswer(ids, start, spans, response_start)

    def _encode_text(self, text: str) -> EncodedText:
        return encode_text(text, self.tokenizer, name="question", add_special_tokens=self.add_special_tokens)


def _count_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both texts begin."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
