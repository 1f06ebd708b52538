"""Draw questions of RULER (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654), worded in `tasks.yaml`."""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import zeta

from lightning_modules.tasks.questions.haystacks import NOISE, Drawn
from lightning_modules.tasks.questions.task import Draft, Kind, Request, WordedTask, Wording, most_units, place
from lightning_modules.tasks.questions.words import ADJECTIVES, NOUNS, distinct, key_word, number, synthetic_words, uuid

DRAW: dict[str, Callable[[random.Random], str]] = {"words": key_word, "numbers": number, "uuids": uuid}
NEEDLE_DEPTHS = [round(100 * step / 39) for step in range(40)]  # of needles in essays, in percent
WORDS = tuple(sorted({*ADJECTIVES, *NOUNS}))
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _draw_needles(task: WordedTask, asked: Request, setting: Mapping[str, Any]) -> Draft:
    rng = asked.rng
    kind = setting["value"]
    values_per_key = setting["values"]
    _check_room(task, asked, setting["keys"] * values_per_key, "needles")
    # 1. Keys, values, and which keys are asked for.
    keys = distinct(lambda: DRAW[setting["key"]](rng), setting["keys"])
    values = distinct(lambda: DRAW[kind](rng), setting["keys"] * values_per_key)
    values_of: dict[str, list[str]] = {}
    sentences: list[str] = []
    for index, key in enumerate(keys):
        values_of[key] = values[index * values_per_key : (index + 1) * values_per_key]
        sentences += [setting["needle"].format(kind=kind, key=key, value=value) for value in values_of[key]]
    queries = rng.sample(keys, setting["queries"])
    answers: list[str] = []
    for key in queries:
        answers += values_of[key]
    first = setting["needle"].format(kind=kind, key=queries[0], value=answers[0])
    # 2. The places of the needles, and the text around them.
    hide = _draw_places(asked, sentences, first, in_essays=setting["haystack"] == "essay")
    draw_text = _make_haystack(task, asked, setting, {*keys, *values})
    separator = " " if setting["haystack"] == "essay" else "\n"
    # 3. Prompt and answer prefix, in the singular if there is a single value.
    prompt = setting["prompt"]
    prefix = setting["prefix"]
    noun = kind
    if task.varies_depth:
        prompt = prompt.replace("Some", "A").replace("are all", "is").replace("are", "is")
        prefix = prefix.replace("are", "is")
        noun = kind[:-1]
    query = _join_words(queries)

    def wording(count: int) -> tuple[str, str]:
        context = separator.join(hide(draw_text(count)))
        return prompt.format(kind=noun, context=context, query=query), prefix.format(kind=noun, query=query)

    def find_depth(count: int) -> float | None:
        if not task.varies_depth:
            return None
        pieces = hide([""] * count)
        return pieces.index(first) / (len(pieces) - 1)

    return Draft(wording, tuple(answers), f" {_join_words(answers)}", depth=find_depth)


def _draw_places(
    asked: Request, sentences: list[str], first: str, *, in_essays: bool
) -> Callable[[list[str]], list[str]]:
    """Draw the places of needles before the length of the text is known; return a function that inserts them.

    If a depth is requested, the other needles are placed before ``first``, the needle of the question.
    """
    if asked.depth is None:
        others = asked.rng.sample(sentences, len(sentences))
    else:
        others = [sentence for sentence in sentences if sentence != first]
    if in_essays:
        depths = sorted(percent / 100 for percent in asked.rng.sample(NEEDLE_DEPTHS, len(others)))
    else:
        depths = sorted(asked.rng.random() for _ in others)

    def hide(text: list[str]) -> list[str]:
        pieces = _insert_at(text, others, depths)
        if asked.depth is not None:
            pieces.insert(place(asked.depth, len(pieces)), first)
        return pieces

    return hide


def _make_haystack(
    task: WordedTask, asked: Request, setting: Mapping[str, Any], taken: set[str]
) -> Callable[[int], list[str]]:
    """Return a function from a number to that many sentences, none of which has a key or value that is taken."""
    if setting["haystack"] == "essay":
        return task.essays.sentences
    if setting["haystack"] == "noise":
        return lambda count: [NOISE] * count

    def draw_other(kind: str) -> str:
        drawn = DRAW[kind](asked.rng)
        while drawn in taken:
            drawn = DRAW[kind](asked.rng)
        return drawn

    def draw_sentence() -> str:
        key = draw_other(setting["key"])
        return str(setting["needle"].format(kind=setting["value"], key=key, value=draw_other(setting["value"])))

    return Drawn(draw_sentence).first


def _insert_at(text: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """Insert needles between sentences, at ascending depths from 0 to 1."""
    pieces: list[str] = []
    last = 0
    for needle, depth in zip(needles, depths, strict=True):
        before = int(len(text) * depth)
        pieces += [*text[last:before], needle]
        last = before
    return [*pieces, *text[last:]]


def _join_words(parts: Sequence[str]) -> str:
    *others, last = parts
    if not others:
        return last
    return f"{', '.join(others)}, and {last}"


class Chain(NamedTuple):
    """Variables, each assigned the one before it; the first one's value of five digits; and a seed for their places."""

    names: tuple[str, ...]
    value: str
    seed: int


def draw_chain(rng: random.Random, hops: int, letters: int, taken: Collection[str] = ()) -> Chain:
    """Draw a chain of distinct names, none of which is the keyword or taken."""
    names: dict[str, None] = {}  # in the order of the draws
    while len(names) <= hops:
        name = "".join(rng.choices(_LETTERS.upper(), k=letters))
        if name != "VAR" and name not in taken:
            names[name] = None
    return Chain(tuple(names), str(rng.randrange(10000, 99999)), rng.getrandbits(64))


def draw_chains(rng: random.Random, count: int, hops: int, letters: int, values: Collection[str] = ()) -> list[Chain]:
    """Draw chains with distinct names and values, without the given values."""
    names: set[str] = set()
    taken = {*values}
    chains: list[Chain] = []
    while len(chains) < count:
        chain = draw_chain(rng, hops, letters, names)
        if chain.value not in taken:
            chains.append(chain)
            names.update(chain.names)
            taken.add(chain.value)
    return chains


def scatter_chains(chains: Sequence[Chain], lines: int) -> str:
    """Return ``lines`` lines of noise with the assignments of chains between them, those of each chain in order."""
    text = [NOISE] * lines
    for chain in chains:
        assignments = [f"VAR {chain.names[0]} = {chain.value}"]
        for before, name in zip(chain.names, chain.names[1:], strict=False):
            assignments.append(f"VAR {name} = VAR {before} ")
        places = sorted(random.Random(chain.seed).sample(range(len(text)), len(assignments)))
        for inserted, (line, assignment) in enumerate(zip(places, assignments, strict=True)):
            text.insert(line + inserted, assignment)
    return "\n".join(text)


def _draw_chains(task: WordedTask, asked: Request, setting: Mapping[str, Any]) -> Draft:
    hops = setting["hops"]
    count = setting["chains"]
    _check_room(task, asked, count * (hops + 1), "assignments")
    shown_hops = min(hops, setting["example_hops"])
    shown = draw_chains(asked.rng, count, shown_hops, letters=3)
    chains = draw_chains(asked.rng, count, hops, letters=5, values=[chain.value for chain in shown])

    def ask(several: Sequence[Chain], lines: int) -> tuple[str, str]:
        first = several[0]
        prompt = setting["prompt"].format(context=scatter_chains(several, lines), value=first.value)
        return prompt, setting["prefix"].format(count=len(first.names), value=first.value)

    def show_example(lines: int) -> str:
        return f"{''.join(ask(shown, lines))} {' '.join(shown[0].names)}\n"

    def count_example(lines: int) -> int:
        return asked.prompter.count(show_example(lines), "")

    lines = shown_hops + 1  # one for each assignment of a chain, which precedes it
    if count_example(lines) <= setting["example_tokens"]:
        lines = most_units(count_example, setting["example_tokens"], minimum=lines)
    example = show_example(lines)

    def wording(lines: int) -> tuple[str, str]:
        prompt, prefix = ask(chains, lines)
        return f"{example}\n{prompt}", prefix

    names = chains[0].names
    return Draft(wording, names, " ".join(names), min_units=hops + 1)


def _draw_common_words(task: WordedTask, asked: Request, setting: Mapping[str, Any]) -> Draft:
    rng = asked.rng
    common = setting["common"]
    sizes = setting["short"] if asked.length < setting["short"]["below"] else setting["long"]
    shown = sizes["shown"]
    start = shown + common

    def list_words(often: Sequence[str], seldom: Sequence[str], repeats: Sequence[int], seed: Any) -> str:
        words = [*often] * repeats[0] + [*seldom] * repeats[1]
        random.Random(seed).shuffle(words)
        return str(setting["prompt"].format(context=_number_words(words)))

    def word(words: Sequence[str], seed: int) -> Wording:
        """Cut both lists from one sequence of words."""
        example = list_words(words[:common], words[common:shown], sizes["example_repeats"], seed)
        example += f"{setting['prefix']} {_number_words(words[:common])}"

        def wording(others: int) -> tuple[str, str]:
            seldom = words[start : start + others]
            asked_list = list_words(words[shown:start], seldom, sizes["repeats"], f"{seed} {others}")
            return f"{example}\n{asked_list}", setting["prefix"]

        return wording

    words = rng.sample(WORDS, len(WORDS))
    longest = word(words, rng.getrandbits(64))(len(words) - start)
    if asked.prompter.count(*longest) <= asked.length - task.max_new_tokens:  # too few real words
        # No word takes less than a token.
        words = synthetic_words(rng, start + asked.length // sizes["repeats"][1])
    wording = word(words, task.random(asked.length, asked.index, asked.seed).getrandbits(64))
    answers = words[shown:start]
    # With fewer than 10 words that are not common, the list would name nearly the common ones alone.
    return Draft(wording, tuple(answers), f" {_number_words(answers)}", min_units=common, max_units=len(words) - start)


def _number_words(words: Sequence[str]) -> str:
    """Number words as RULER does: ``1. one 2. two``."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _draw_frequent_words(task: WordedTask, asked: Request, setting: Mapping[str, Any]) -> Draft:
    rng = asked.rng
    count = max(5, asked.length // 50)
    vocabulary = ["...", *distinct(lambda: "".join(rng.choices(_LETTERS, k=setting["letters"])), count - 1)]
    shuffles = rng.getrandbits(64)
    alpha = setting["alpha"]
    min_units = min_words(alpha)
    _check_room(task, asked, min_units, "words")

    def wording(words: int) -> tuple[str, str]:
        text = repeat_by_rank(vocabulary, words, alpha)
        random.Random(f"{shuffles} {words}").shuffle(text)
        return setting["prompt"].format(context=" ".join(text)), setting["prefix"]

    first, second, third = vocabulary[1:4]
    return Draft(wording, (first, second, third), f" {first}, {second}, and {third}", min_units=min_units)


@cache
def min_words(alpha: float) -> int:
    """Return the number of words from which the last answer, of rank 4, is always more frequent than rank 5."""
    fourth = 4**-alpha / float(zeta(alpha))
    fifth = 5**-alpha / float(zeta(alpha))
    # With this many words, the two numbers differ by 1 before they are rounded down.
    words = np.arange(1, math.ceil(1 / (fourth - fifth)) + 1)
    is_tied = (words * fourth).astype(int) == (words * fifth).astype(int)
    return int(words[is_tied].max()) + 1


def repeat_by_rank(vocabulary: Sequence[str], words: int, alpha: float) -> list[str]:
    """Return about ``words`` words, each as often as its rank in a zeta distribution requires."""
    counts = (words * np.arange(1, len(vocabulary) + 1) ** -alpha / zeta(alpha)).astype(int)
    text: list[str] = []
    for word, count in zip(vocabulary, counts, strict=True):
        text += [word] * count
    return text


def _check_room(task: WordedTask, asked: Request, count: int, noun: str) -> None:
    """Refuse what cannot fit before it is drawn: everything takes a token or more."""
    if count > asked.length:
        raise ValueError(
            f"A length of {asked.length} tokens is too short for '{task.name}', whose text has at least {count:,}"
            f" {noun}. Choose a larger length, or other options."
        )


KINDS: dict[str, Kind] = {
    "needles": _draw_needles,
    "chains": _draw_chains,
    "common_words": _draw_common_words,
    "frequent_words": _draw_frequent_words,
}
