"""Draw questions that ask for a fact hidden in a long text, worded in `tasks.yaml`."""

from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any

from lightning_modules.tasks.questions.example import Match
from lightning_modules.tasks.questions.haystacks import NOISE_SENTENCES, Drawn
from lightning_modules.tasks.questions.task import Draft, Kind, Request, WordedTask, place
from lightning_modules.tasks.questions.words import NOUNS, key_word, uuid

STARTS = 10_000  # sentences at which essays may begin, so that examples of equal length and depth differ


def _draw_needle(task: WordedTask, asked: Request, setting: Mapping[str, Any]) -> Draft:
    start = asked.rng.randrange(STARTS)
    depth = asked.drawn_depth()
    needle = setting["needle"]

    def wording(count: int) -> tuple[str, str]:
        sentences = task.essays.sentences(count, start)
        before = place(depth, count)
        # As in the original, the needle has its own line.
        parts = (" ".join(sentences[:before]), needle, " ".join(sentences[before:]))
        context = "\n".join(filter(None, parts))
        return setting["prompt"].format(context=context), setting["prefix"]

    target = f" {needle.rstrip('.')}"
    return Draft(wording, tuple(setting["answers"]), target, depth=lambda count: place(depth, count) / count)


def _draw_passkey(task: WordedTask, asked: Request, setting: Mapping[str, Any]) -> Draft:
    key = str(asked.rng.randint(1, setting["largest"]))
    depth = asked.drawn_depth()

    def repeat_noise(count: int) -> str:
        return " ".join(islice(cycle(NOISE_SENTENCES), count))

    def wording(count: int) -> tuple[str, str]:
        before = place(depth, count)
        noise = {"before": repeat_noise(before), "after": repeat_noise(count - before)}
        return setting["prompt"].format(key=key, **noise), setting["prefix"]

    return Draft(wording, (key,), f" {key}", "first_number", depth=lambda count: place(depth, count) / count)


def _draw_first_sentence(task: WordedTask, asked: Request, setting: Mapping[str, Any]) -> Draft:
    essays = task.essays
    min_words = setting["min_words"]
    max_characters = setting["max_characters"]
    first = asked.rng.randrange(STARTS)

    def usable_starts() -> Iterator[int]:
        """Yield the sentences that are neither headings nor too long to be repeated."""
        for start in range(first, first + STARTS):
            (sentence,) = essays.sentences(1, start)
            if len(sentence) <= max_characters and len(sentence.split()) >= min_words:
                yield start

    start = next(usable_starts(), None)
    if start is None:
        raise ValueError(
            f"The haystack '{essays.folder}' has no sentence of at least {min_words} words and at most"
            f" {max_characters} characters, which the task needs: use other prose."
        )
    (sentence,) = essays.sentences(1, start)

    def wording(count: int) -> tuple[str, str]:
        context = " ".join(essays.sentences(count, start))
        return setting["prompt"].format(context=context), setting["prefix"]

    return Draft(wording, (sentence,), f" {sentence}", "rouge_l", min_units=2)


def _draw_register_lines(task: WordedTask, asked: Request, setting: Mapping[str, Any]) -> Draft:
    rng = asked.rng
    largest = setting["largest"]
    key = key_word(rng)
    value = rng.randint(1, largest)
    depth = asked.drawn_depth()
    prefix = setting["prefix"].format(key=key)
    target = f" <{value}"
    match: Match = "first_number"
    if asked.prompter.chat_template:
        prefix = ""
        target = setting["chat_target"].format(key=key, value=value)
        match = "last_number"
    taken = {key}

    def draw_line() -> str:
        other = key_word(rng)
        while other in taken:
            other += f"-{rng.choice(NOUNS)}"  # lines never run out
        taken.add(other)
        drawn = rng.randint(1, largest - 1)
        return str(setting["line"].format(key=other, value=drawn + (drawn >= value)))

    others = Drawn(draw_line)

    def wording(count: int) -> tuple[str, str]:
        lines = others.first(count)
        lines.insert(place(depth, count), setting["line"].format(key=key, value=value))
        return setting["prompt"].format(context="".join(lines), key=key), prefix

    return Draft(wording, (str(value),), target, match, depth=lambda count: place(depth, count) / count)


def _draw_key_values(task: WordedTask, asked: Request, setting: Mapping[str, Any]) -> Draft:
    rng = asked.rng
    key = uuid(rng)
    value = uuid(rng)
    depth = asked.drawn_depth()
    others = Drawn(lambda: f'"{uuid(rng)}": "{uuid(rng)}"')

    def wording(count: int) -> tuple[str, str]:
        pairs = others.first(count)
        pairs.insert(place(depth, count), f'"{key}": "{value}"')
        data = "{" + ",\n ".join(pairs) + "}"
        return setting["prompt"].format(context=data, key=key), ""

    return Draft(wording, (value,), f' "{value}', "any", depth=lambda count: place(depth, count) / count)


KINDS: dict[str, Kind] = {
    "needle": _draw_needle,
    "passkey": _draw_passkey,
    "first_sentence": _draw_first_sentence,
    "register_lines": _draw_register_lines,
    "key_values": _draw_key_values,
}
