"""Questions as the tokens that a model reads."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from lightning_modules.models.tokenization.chat_templates import check_chat_template, render_chat


class ForcedAnswer(NamedTuple):
    """A question with its answer, for teacher forcing.

    Attributes:
        input_ids: Tokens of prompt, answer prefix and target.
        answer_start: Index of the first token that is not in the prompt alone.
        spans: For each answer the token indices ``[start, stop)`` that it lies in.
    """

    input_ids: list[int]
    answer_start: int
    spans: list[tuple[int, int]]


class Prompter:
    """Turns questions into tokens, and counts them: the one place where a tokenizer meets a task.

    Args:
        tokenizer: A fast tokenizer.
        chat_template: Whether the prompt is the user's turn of the tokenizer's chat template.
        add_special_tokens: Whether the tokenizer adds its own, such as ``<s>``; a chat template has them already.

    Raises:
        ValueError: If a chat template is asked for, and the tokenizer has none that can be used.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, chat_template: bool = False, add_special_tokens: bool = True
    ) -> None:
        if chat_template:
            check_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.add_special_tokens = add_special_tokens and not chat_template

    def text(self, prompt: str, answer_prefix: str) -> str:
        """All that the model reads, as text."""
        if self.chat_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = render_chat(self.tokenizer, messages, add_generation_prompt=True)
        return prompt + answer_prefix

    def encode(self, prompt: str, answer_prefix: str) -> list[int]:
        """Token ids of a question."""
        # The backend itself: it does not warn of a "maximum sequence length".
        text = self.text(prompt, answer_prefix)
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=self.add_special_tokens)
        return _without_end(list(encoding.ids), self.tokenizer)

    def count(self, prompt: str, answer_prefix: str) -> int:
        """Tokens of a question."""
        return len(self.encode(prompt, answer_prefix))

    def force(self, prompt: str, answer_prefix: str, target: str, answers: Sequence[str]) -> ForcedAnswer:
        """A question and its answer as one text.

        Args:
            prompt: Long text and question.
            answer_prefix: How the model's turn begins.
            target: A right continuation; where it begins a turn of a chat template, its leading space is left out.
            answers: Which parts of the target are answers, in their order in it; such as are not in it are left out.
        """
        asked = self.encode(prompt, answer_prefix)
        if self.chat_template and not answer_prefix:
            target = target.lstrip()
        text = self.text(prompt, answer_prefix)
        encoding = self.tokenizer.backend_tokenizer.encode(text + target, add_special_tokens=self.add_special_tokens)
        ids = _without_end(list(encoding.ids), self.tokenizer)
        # A tokenizer may join the last character of the question with the first of the answer.
        start = next((i for i, (a, b) in enumerate(zip(asked, ids, strict=False)) if a != b), min(len(asked), len(ids)))
        offsets = encoding.offsets  # once: a list of all tokens is made at each look
        spans, behind = [], len(text)
        for answer in answers:
            first = (text + target).find(answer, behind)
            if first < 0:
                continue
            behind = first + len(answer)
            tokens = [i for i in range(start, len(ids)) if _overlap(offsets[i], (first, behind))]
            if tokens:
                spans.append((tokens[0], tokens[-1] + 1))
        return ForcedAnswer(ids, start, spans)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _without_end(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """A tokenizer that puts an end-of-text behind all would have the model answer after the end."""
    ends = tokenizer.eos_token_id
    return ids[:-1] if ids and ids[-1] == ends and ids[-1] != tokenizer.bos_token_id else ids
