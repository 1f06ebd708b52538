"""Tasks that ask for a fact hidden in a long text."""

from itertools import cycle, islice
from typing import Literal

from typing_extensions import override

from lightning_modules.tasks.questions.haystacks import NOISE_SENTENCES, Drawn, Essays
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request, place
from lightning_modules.tasks.questions.words import NOUNS, key_word, uuid

Query = Literal["before", "after", "both"]
"""Where the question is."""

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
NEEDLE_ANSWERS = ("eat a sandwich", "sit in Dolores Park", "sunny day")
NEEDLE_PROMPT = (
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n<context>\n"
    "{context}\n</context>\n\nWhat is the best thing to do in San Francisco? Don't give information outside the"
    " document or repeat your findings"
)
NEEDLE_ANSWER_PREFIX = " Here is the most relevant sentence in the context:"

STARTS = 10_000
"""Number of sentences at which a haystack of essays may begin, so that examples of equal length and depth differ."""


class Needle(FittedTask):
    """Needle-in-a-Haystack ("What is the best thing to do in San Francisco?").

    From Kamradt (2023, https://github.com/gkamradt/LLMTest_NeedleInAHaystack), with the original needle, question and
    prompt for Anthropic's models. Unlike in the original, no language model rates the answer from 1 to 10: the score is
    the fraction of "eat a sandwich", "sit in Dolores Park" and "sunny day" that the answer contains. The needle is
    inserted between sentences, and examples start at different places of the essays, not always at the front.
    """

    name = "needle"
    max_new_tokens = 64
    varies_depth = True

    def __init__(self, essays: Essays) -> None:
        self.essays = essays

    @override
    def draft(self, asked: Request) -> Draft:
        start, depth = asked.rng.randrange(STARTS), asked.drawn_depth()

        def wording(count: int) -> tuple[str, str]:
            sentences = self.essays.sentences(count, start)
            before = place(depth, count)
            # As in the original, the needle has its own line.
            parts = (" ".join(sentences[:before]), NEEDLE, " ".join(sentences[before:]))
            return NEEDLE_PROMPT.format(context="\n".join(part for part in parts if part)), NEEDLE_ANSWER_PREFIX

        return Draft(wording, NEEDLE_ANSWERS, f" {NEEDLE.rstrip('.')}", depth=lambda count: place(depth, count) / count)


PASSKEY_INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you"
    " about the important information there."
)
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key."
PASSKEY_QUESTION = "What is the pass key?"
PASSKEY_ANSWER_PREFIX = " The pass key is"


class Passkey(FittedTask):
    """Passkey retrieval ("What is the pass key?").

    From Landmark Attention (Mohtashami and Jaggi 2023, https://arxiv.org/abs/2305.16300), worded as in the public code
    of LongLoRA; also used by *Effective Long-Context Scaling* (Xiong et al. 2023, https://arxiv.org/abs/2309.16039).
    Unlike in the original, the noise consists of complete sentences, and the first generated number must be the key.
    """

    name = "passkey"
    max_new_tokens = 16
    varies_depth = True

    @override
    def draft(self, asked: Request) -> Draft:
        key, depth = str(asked.rng.randint(1, 50000)), asked.drawn_depth()

        def wording(count: int) -> tuple[str, str]:
            before = place(depth, count)
            lines = (
                PASSKEY_INSTRUCTION,
                _repeat_noise(before),
                PASSKEY.format(key=key),
                _repeat_noise(count - before),
                PASSKEY_QUESTION,
            )
            return "\n".join(lines), PASSKEY_ANSWER_PREFIX

        return Draft(wording, (key,), f" {key}", "first_number", depth=lambda count: place(depth, count) / count)


def _repeat_noise(count: int) -> str:
    """Return sentences of noise, which start over after the key."""
    return " ".join(islice(cycle(NOISE_SENTENCES), count))


FIRST_SENTENCE_QUESTION = "\n\nWhat is the first sentence of the text above? Repeat it word for word."
FIRST_SENTENCE_ANSWER_PREFIX = " The first sentence is:"
MIN_WORDS = 5
MAX_CHARACTERS = 120


class FirstSentence(FittedTask):
    """First-sentence retrieval ("What is the first sentence of the text?").

    The probe of *Effective Long-Context Scaling* (Xiong et al. 2023, section 4.1, https://arxiv.org/abs/2309.16039),
    whose wording and texts are not published: the question is ours. As in the paper, the score is ROUGE-L, here the F1
    over the first generated words, up to the length of the sentence. The text begins anywhere in the essays with a
    sentence of at least 5 words and at most 120 characters. Examples have no depth, because it would always be 0.
    """

    name = "first_sentence"
    max_new_tokens = 128

    def __init__(self, essays: Essays) -> None:
        self.essays = essays

    @override
    def draft(self, asked: Request) -> Draft:
        start = self._find_start(asked.rng.randrange(STARTS))
        sentence = self.essays.sentences(1, start)[0]

        def wording(count: int) -> tuple[str, str]:
            return " ".join(self.essays.sentences(count, start)) + FIRST_SENTENCE_QUESTION, FIRST_SENTENCE_ANSWER_PREFIX

        return Draft(wording, (sentence,), f" {sentence}", "rouge_l", min_units=2)

    def _find_start(self, first: int) -> int:
        """Return the next sentence that is neither a heading nor too long to be repeated."""
        for start in range(first, first + STARTS):
            sentence = self.essays.sentences(1, start)[0]
            if len(sentence) <= MAX_CHARACTERS and len(sentence.split()) >= MIN_WORDS:
                return start
        raise ValueError(
            f"The haystack '{self.essays.folder}' has no sentence of at least {MIN_WORDS} words and at most"
            f" {MAX_CHARACTERS} characters, which the task needs: use other prose."
        )


LONGEVAL_HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a"
    " '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding"
    " <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of"
    " a certain line index. Now the record start:\n\n"
)
LONGEVAL_LINE = "line {key}: REGISTER_CONTENT is <{value}>\n"
LONGEVAL_QUESTION = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number."
LONGEVAL_ANSWER_PREFIX = " Line <{key}>: <REGISTER_CONTENT> is"
LONGEVAL_LARGEST = 50000  # numbers are drawn from 1 to this


class LongEvalLines(FittedTask):
    """LongEval's `lines` ("What is the register content in line brave-otter?").

    From Li et al. (2023, https://lmsys.org/blog/2023-06-29-longchat), with the wording and the scoring of their public
    code. With a chat template, the last number of the answer counts, as in the original. Without one, the answer prefix
    is that of the original for a base model (MPT-7B-Storywriter), and the first number counts, because such a model
    continues with more lines. Unlike in the original, the requested length determines the number of lines (200 to 1350
    there); line indices come from our own lists and are distinct; and no other line has the requested number.
    """

    name = "longeval_lines"
    max_new_tokens = 100
    varies_depth = True

    @override
    def draft(self, asked: Request) -> Draft:
        rng = asked.rng
        key, value, depth = key_word(rng), rng.randint(1, LONGEVAL_LARGEST), asked.drawn_depth()
        prefix = "" if asked.prompter.chat_template else LONGEVAL_ANSWER_PREFIX.format(key=key)
        taken = {key}

        def draw() -> str:
            other = key_word(rng)
            while other in taken:
                other += f"-{rng.choice(NOUNS)}"  # lines never run out
            taken.add(other)
            number = rng.randint(1, LONGEVAL_LARGEST - 1)
            return LONGEVAL_LINE.format(key=other, value=number + (number >= value))

        others = Drawn(draw)

        def wording(count: int) -> tuple[str, str]:
            lines = others.first(count)
            lines.insert(place(depth, count), LONGEVAL_LINE.format(key=key, value=value))
            return LONGEVAL_HEADER + "".join(lines) + LONGEVAL_QUESTION.format(key=key), prefix

        return Draft(
            wording,
            answers=(str(value),),
            target=f" <{value}" if prefix else f"The <REGISTER_CONTENT> in line {key} is <{value}",
            match="first_number" if prefix else "last_number",
            depth=lambda count: place(depth, count) / count,
        )


KEY_VALUES_INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below.\n\n"


class KeyValues(FittedTask):
    """Key-value retrieval ("Which value has this key in the JSON object?").

    From *Lost in the Middle* (Liu et al. 2023, section 3, https://arxiv.org/abs/2307.03172), with the wording of its
    public code: keys and values are UUIDs, and the answer is right if it contains the value, ignoring case. Unlike in
    the original, the requested length determines the number of pairs (75, 140 or 300 there), and the position of the
    pair is a depth. The question comes ``after`` the object (the paper's default), on ``both`` sides of it (the paper's
    query-aware contextualization), or only ``before`` it, which is not in the paper.
    """

    max_new_tokens = 100
    varies_depth = True

    def __init__(self, query: Query = "after") -> None:
        self.query = query
        self.name = "key_values" if query == "after" else f"key_values_query_{query}"

    @override
    def draft(self, asked: Request) -> Draft:
        rng = asked.rng
        key, value, depth = uuid(rng), uuid(rng), asked.drawn_depth()
        others = Drawn(lambda: f'"{uuid(rng)}": "{uuid(rng)}"')
        question = f'Key: "{key}"\n'
        before = "" if self.query == "after" else f"{question}\n"
        after = "" if self.query == "before" else question

        def wording(count: int) -> tuple[str, str]:
            pairs = others.first(count)
            pairs.insert(place(depth, count), f'"{key}": "{value}"')
            data = "{" + ",\n ".join(pairs) + "}"
            return f"{KEY_VALUES_INSTRUCTION}{before}JSON data:\n{data}\n\n{after}Corresponding value:", ""

        return Draft(wording, (value,), f' "{value}', "any", depth=lambda count: place(depth, count) / count)
