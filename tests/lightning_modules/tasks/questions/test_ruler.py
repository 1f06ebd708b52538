"""RULER's tasks: worded, drawn and placed as RULER does."""

import random
import re
from collections import Counter
from itertools import pairwise

import pytest

from lightning_modules.tasks.questions.haystacks import NOISE
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.tasks.questions.ruler import (
    DRAW,
    NEEDLE_DEPTHS,
    WORDS,
    draw_chain,
    draw_chains,
    min_words,
    repeat_by_rank,
    scatter_chains,
)
from tests.support import answerers


@pytest.fixture(scope="module")
def prompters():
    corpus = ["Below is a numbered list of words. Question: Answer: 1. one 2. two 34. " + " ".join(WORDS)]
    corpus += [f"Memorize and track the chain(s). Question: Find Answer: VAR ABC = 123\n{NOISE}"] * 3
    corpus += ["Read the following coded text. Question: Answer: ... ... abcdef ..."] * 3
    return answerers.prompters(corpus)


WORD, NUMBER = "[a-z]+-[a-z]+", "[1-9][0-9]{6}"
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
# Name: needles in the text, which of them are asked for, kinds of key and of value.
NEEDLES = {
    "niah_single_1": (1, 1, WORD, NUMBER),
    "niah_single_2": (1, 1, WORD, NUMBER),
    "niah_single_3": (1, 1, WORD, UUID),
    "niah_multikey_1": (4, 1, WORD, NUMBER),
    "niah_multikey_2": (None, 1, WORD, NUMBER),
    "niah_multikey_3": (None, 1, UUID, UUID),
    "niah_multivalue": (4, 4, WORD, NUMBER),
    "niah_multiquery": (4, 4, WORD, NUMBER),
}


@pytest.fixture(scope="module")
def prompter(tokenizer):
    return Prompter(tokenizer)


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_worded_as_in_ruler(name, prompter):
    hidden, asked, key, value = NEEDLES[name]
    example = find_tasks([name])[0].example(prompter, 4000, 0)
    plural = "uuids" if value == UUID else "numbers"
    if asked == 1:
        kind, is_, all_, some = plural[:-1], "is", "is", "A"
    else:
        kind, is_, all_, some = plural, "are", "are all", "Some"
    query = ", ".join([rf"({key})"] * 3) + rf", and ({key})" if name == "niah_multiquery" else rf"({key})"
    form = (
        rf"{some} special magic {kind} {is_} hidden within the following text\. Make sure to memorize it\. I will"
        rf" quiz you about the {kind} afterwards\.\n(?P<context>.+)\nWhat {all_} the special magic {kind} for {query}"
        r" mentioned in the provided text\?"
    )
    found = re.fullmatch(form, example.prompt, re.DOTALL)
    queries = [group for group in found.groups() if group != found["context"]]
    listed = re.sub(r"\(.+?\)", "{}", query.replace(f"({key})", "{}")).format(*queries)
    assert example.answer_prefix == f" The special magic {kind} for {listed} mentioned in the provided text {is_}"
    assert example.max_new_tokens == 128
    assert example.match == "all"
    needles = re.findall(rf"One of the special magic {plural} for ({key}) is: ({value})\.", found["context"])
    assert len(needles) == (hidden or len(found["context"].splitlines()))
    assert len(example.answers) == asked
    # The answers come in the order of the keys that are asked for.
    asked_keys = queries if name == "niah_multiquery" else queries * asked
    assert set(zip(asked_keys, example.answers, strict=True)) == {pair for pair in needles if pair[0] in queries}


def test_needles_in_essays_are_at_40_depths(prompter):
    task = find_tasks(["niah_multikey_1"])[0]
    for index in range(10):
        context = task.example(prompter, 4000, index).prompt.split("\n")[1]
        sentences = re.split(r"(?<=\.) ", context)
        places = [i for i, sentence in enumerate(sentences) if sentence.startswith("One of the special")]
        total = len(sentences) - 4
        allowed = {int(total * (depth / 100)) for depth in NEEDLE_DEPTHS}
        assert {place - before for before, place in enumerate(places)} <= allowed


def test_other_needles_have_other_keys_and_values(prompter, monkeypatch):
    # As few numbers and words as make others collide with what is asked for.
    monkeypatch.setattr("lightning_modules.tasks.questions.words.ADJECTIVES", ("odd", "even"))
    monkeypatch.setattr("lightning_modules.tasks.questions.words.NOUNS", ("oak", "elm"))
    monkeypatch.setitem(DRAW, "numbers", lambda rng: str(rng.randint(10, 15)))
    example = find_tasks(["niah_multikey_2"])[0].example(prompter, 2000, 0)
    key = re.search("for (.+) mentioned", example.prompt)[1]
    assert len(re.findall(f"for {key} is:", example.prompt)) == 1
    assert len(re.findall(f"is: {example.answers[0]}\\.", example.prompt)) == 1


def test_variables_are_worded_as_in_ruler(prompters):
    example = find_tasks(["vt"])[0].example(prompters["bytes"], 3000, 0)
    text = (
        r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n(.*)\n"
        r"Question: Find all variables that are assigned the value (\d{5}) in the text above\."
    )
    prefix = (
        r" Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are assigned the"
        r" value (\d{5}), they are: "
    )
    whole = re.fullmatch(rf"{text}{prefix} (.*)\n\n{text}", example.prompt, re.DOTALL)
    shown, shown_value, again, names, asked, value = whole.groups()
    assert shown_value == again != value
    assert re.fullmatch(prefix, example.answer_prefix)[1] == value
    for context, letters, given, chain in ((shown, 3, shown_value, names.split()), (asked, 5, value, example.answers)):
        lines = context.split("\n")
        assert [line for line in lines if line != NOISE] == [
            f"VAR {chain[0]} = {given}",
            *(f"VAR {name} = VAR {before} " for before, name in pairwise(chain)),
        ]
        assert len(set(chain)) == 5
        assert all(re.fullmatch(rf"[A-Z]{{{letters}}}", name) for name in chain)
        places = [number for number, line in enumerate(lines) if line != NOISE]
        assert all(lines[place + 1] == NOISE for place in places)  # an assignment stands before a line of noise


def test_names_are_distinct_and_never_the_keyword():
    class Biased(random.Random):
        def choices(self, population, *, k):
            drawn = [*"VAR", *"AAA", *"AAA", *"BBB", *"CCC", *"DDD", *"EEE"]
            self.position = getattr(self, "position", -k) + k
            return drawn[self.position : self.position + k]

    assert draw_chain(Biased(0), hops=4, letters=3).names == ("AAA", "BBB", "CCC", "DDD", "EEE")


def test_chains_share_no_name_or_value():
    class Repeating(random.Random):
        """Draws names of one of three letters, and one of three values."""

        def choices(self, population, *, k):
            return [self.choice("ABC") for _ in range(k)]

        def randrange(self, start, stop):
            return start + self.choice((0, 1, 2))

    for seed in range(20):
        chains = draw_chains(Repeating(seed), 2, hops=1, letters=2, values=["10001"])
        assert sorted(chain.value for chain in chains) == ["10000", "10002"]
        assert len({name for chain in chains for name in chain.names}) == 4


def test_the_example_has_500_tokens_or_five_lines(prompters):
    for kind, prompter in prompters.items():
        example = find_tasks(["vt"])[0].example(prompter, 9000, 0)
        shown = example.prompt[: example.prompt.rindex("Memorize")]
        tokens, lines = prompter.count(shown, ""), shown.count(NOISE)
        assert tokens <= 500 < tokens + prompter.count(f"{NOISE}\n", "") or (tokens > 500 and lines == 5), kind
    assert lines == 5  # of single characters


def test_places_of_assignments_are_drawn_evenly():
    rng = random.Random(0)
    counts = [0] * 10
    for _ in range(2000):
        lines = scatter_chains([draw_chain(rng, hops=4, letters=5)], 10).split("\n")
        noise = 0
        for line in lines:
            if line == NOISE:
                noise += 1
            else:
                counts[noise] += 1
    assert sum(counts) == 10_000
    assert all(abs(count - 1000) < 100 for count in counts)  # three standard deviations


TEXT = (
    r"Below is a numbered list of words\. In these words, some appear more often than others\. Memorize the ones that"
    r" appear most often\.\n(.*)\nQuestion: What are the 10 most common words in the above list\?"
)
PREFIX = " Answer: The top 10 words that appear most often in the list are:"


def listed(text):
    numbered = re.findall(r"(\d+)\. (\S+)", text)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    assert " ".join(f"{number}. {word}" for number, word in numbered) == text
    return Counter(word for _, word in numbered)


@pytest.mark.parametrize(
    ("length", "shown", "asked"),
    [(2000, (20, 3, 1), (6, 1)), (4096, (40, 10, 3), (30, 3))],
)
def test_common_words_are_worded_and_repeat_as_in_ruler(prompters, length, shown, asked):
    example = find_tasks(["cwe"])[0].example(prompters["words"], length, 0)
    whole = re.fullmatch(rf"{TEXT}{re.escape(PREFIX)} (.*)\n{TEXT}", example.prompt)
    first, answer, second = (listed(text) for text in whole.groups())
    words, common, others = shown
    assert sorted(first.values()) == [others] * (words - 10) + [common] * 10
    assert {word for word, count in first.items() if count == common} == set(answer)
    common, others = asked
    assert [second[word] for word in example.answers] == [common] * 10
    assert set(second.values()) == {common, others}
    assert len(second) >= 20
    assert not first.keys() & second.keys()
    assert example.answer_prefix == PREFIX
    assert listed(example.target.strip()) == Counter(example.answers)


def test_the_shortest_list_has_ten_other_words(prompters):
    def words(length):
        try:
            prompt = find_tasks(["cwe"])[0].example(prompters["words"], length, 0).prompt
        except ValueError:
            return None
        return len(listed(re.fullmatch(rf"{TEXT}{re.escape(PREFIX)} .*\n{TEXT}", prompt)[2]))

    found = [words(length) for length in range(584, 603, 3)]  # a word takes three tokens: number, point and word
    assert found[0] is None
    assert [count for count in found if count is not None] == [20, 21, 22, 23]


def test_long_lists_have_synthetic_words(prompters):
    lengths = (4096, 10_000, 13_000, 30_000)
    for length, real in zip(lengths, (True, True, False, False), strict=True):
        prompt = find_tasks(["cwe"])[0].example(prompters["words"], length, 0).prompt
        words = set(re.findall(r"\d+\. (\S+)", prompt))
        assert words <= set(WORDS) if real else len(words & set(WORDS)) < 0.01 * len(words)
    assert len(words) > len(WORDS)


def test_frequent_words_are_worded_as_in_ruler(prompters):
    example = find_tasks(["fwe"])[0].example(prompters["bytes"], 2000, 0)
    text = (
        r"Read the following coded text and track the frequency of each coded word\. Find the three most frequently"
        r" appeared coded words\. (.*)\nQuestion: Do not provide any explanation\. Please ignore the dots '\.\.\.\.'\."
        r" What are the three most frequently appeared words in the above coded text\?"
    )
    words = re.fullmatch(text, example.prompt)[1].split(" ")
    assert all(word == "..." or re.fullmatch("[a-z]{6}", word) for word in words)
    assert [word for word, _ in Counter(words).most_common(4)] == ["...", *example.answers]
    assert example.answer_prefix == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )


def test_frequencies_fall_with_the_square_of_the_rank():
    vocabulary = [f"word{rank}" for rank in range(300)]
    counts = Counter(repeat_by_rank(vocabulary, 100_000, 2.0))
    for rank, word in enumerate(vocabulary, 1):
        assert abs(counts[word] - 100_000 * 0.6079271 / rank**2) < 1


@pytest.mark.parametrize(("alpha", "least"), [(1.2, 119), (2.0, 53), (3.5, 145), (5.0, 1062)])
def test_answers_are_more_frequent_from_the_minimum_number_of_words(alpha, least):
    assert min_words(alpha) == least
    for words in range(least, 3 * least):
        counts = Counter(repeat_by_rank(range(10), words, alpha))
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4], words
    counts = Counter(repeat_by_rank(range(10), least - 1, alpha))
    assert counts[3] == counts[4]


def test_coded_words_are_shuffled(prompters):
    example = find_tasks(["fwe"])[0].example(prompters["bytes"], 9000, 0)
    words = example.prompt.split(" ")
    assert sum(word != after for word, after in pairwise(words)) > 0.5 * len(words)
