"""Options of RULER's tasks: their questions, checked by parsing the prompts, and the refusal of what is impossible."""

import re
from collections import Counter

import pytest

from lightning_modules.tasks.harness import split_tasks
from lightning_modules.tasks.questions.haystacks import NOISE
from lightning_modules.tasks.questions.options import configure
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import GROUPS, find_tasks, is_in_essays
from lightning_modules.tasks.questions.task import SETTINGS


@pytest.fixture(scope="module")
def prompter(tokenizer):
    return Prompter(tokenizer)


def ask(name, prompter, length=4000, index=0, **options):
    (task,) = find_tasks([name])
    return task.example(prompter, length, index, **options)


NEEDLE = r"One of the special magic (\w+) for (\S+) is: (\S+)\."


@pytest.mark.parametrize(
    ("name", "keys", "values", "queries", "kind"),
    [
        ("niah_single_1(keys=7)", 7, 1, 1, "number"),
        ("niah_multiquery(keys=8,queries=5,values=2)", 8, 2, 5, "numbers"),
        ("niah_multikey_1(keys=30,value=uuids,key=words)", 30, 1, 1, "uuid"),
        ("niah_single_2(keys=2,queries=2,value=words,key=uuids)", 2, 1, 2, "words"),
    ],
)
def test_needles_have_the_requested_numbers_and_kinds(name, keys, values, queries, kind, prompter):
    example = ask(name, prompter, 8000)
    found = re.findall(NEEDLE, example.prompt)
    assert Counter(Counter(key for _, key, _ in found).values()) == {values: keys}
    assert len({value for *_, value in found}) == keys * values
    asked = re.search(r"special magic (\w+) for (.*) mentioned in the provided", example.prompt)
    assert asked[1] == kind
    asked_keys = re.split(r", and |, ", asked[2])
    assert len(asked_keys) == queries
    right = [value for key in asked_keys for _, other, value in found if other == key]
    assert set(example.answers) == set(right)
    assert len(example.answers) == queries * values
    assert find_tasks([name])[0].varies_depth == (queries * values == 1)
    assert example.score(example.target) == 1


@pytest.mark.parametrize("haystack", ["noise", "essay", "needles"])
def test_needles_are_hidden_in_the_requested_haystack(haystack, prompter):
    context = ask(f"niah_single_3(haystack={haystack})", prompter).prompt.split("\n", 1)[1].rpartition("\nWhat is")[0]
    lines = context.split("\n")
    needles = re.findall(NEEDLE, context)
    assert (lines.count(NOISE) == len(lines) - 1 > 5) == (haystack == "noise")
    assert (len(needles) == len(lines) > 5) == (haystack == "needles")
    assert (len(needles) == len(lines) == 1) == (haystack == "essay")
    assert is_in_essays(f"niah_single_1(haystack={haystack})") == (haystack == "essay")


def test_the_only_answer_is_at_the_requested_depth_among_more_keys(prompter):
    for depth in (0.0, 0.5, 1.0):
        example = ask("niah_single_1(keys=5)", prompter, depth=depth)
        lines = example.prompt.split("\n")[1:-1]
        place = next(number for number, line in enumerate(lines) if f"is: {example.answers[0]}." in line)
        assert place == round(depth * (len(lines) - 1))


@pytest.mark.parametrize(("hops", "chains"), [(1, 1), (4, 3), (12, 2), (2, 9)])
def test_chains_have_the_requested_numbers_and_the_first_value_is_asked_for(hops, chains, prompter):
    example = ask(f"vt(hops={hops},chains={chains})", prompter, 16_000)
    shown, asked = (
        (match[1], match[2])
        for match in re.finditer(
            r"hidden in the following text\.\n\n(.*?)\nQuestion: Find all variables that are assigned the value (\d+)",
            example.prompt,
            re.DOTALL,
        )
    )
    values = []
    for (context, value), each, letters in ((shown, min(hops, 10), 3), (asked, hops, 5)):
        value_of = {}
        for line in context.split("\n"):
            if line == NOISE:
                continue
            name, source = re.fullmatch(r"VAR ([A-Z]+) = (?:VAR )?(\w+) ?", line).groups()
            assert len(name) == letters
            assert name not in value_of
            value_of[name] = value_of.get(source, source)  # a source precedes it
        assert Counter(Counter(value_of.values()).values()) == {each + 1: chains}
        assert all(re.fullmatch(r"\d{5}", held) for held in value_of.values())
        chain = [name for name, held in value_of.items() if held == value]
        if letters == 3:
            assert f"they are:  {' '.join(chain)}\n\nMemorize" in example.prompt
            assert f" {len(chain)} variables are assigned the value {value}, they are" in example.prompt
        else:
            assert list(example.answers) == chain
            assert f" {len(chain)} variables are assigned the value {value}" in example.answer_prefix
        values += set(value_of.values())
    assert len(values) == len(set(values)) == 2 * chains


@pytest.mark.parametrize("alpha", [1.5, 3.5])
def test_frequencies_follow_the_requested_exponent(alpha, prompter):
    example = ask(f"fwe(alpha={alpha})", prompter, 8000)
    words = re.search(r"coded words\. (.*)\nQuestion", example.prompt)[1].split(" ")
    counts = [count for _, count in Counter(words).most_common(4)]
    assert [word for word, _ in Counter(words).most_common(4)] == ["...", *example.answers]
    for rank, count in enumerate(counts, 1):
        # Each is rounded down.
        assert (counts[0] + 1) / rank**alpha > count > counts[0] / rank**alpha - 1


def test_the_answer_has_more_room_if_it_is_longer():
    reserved = {"niah_multiquery": 128, "niah_multiquery(keys=9,queries=9)": 288, "niah_single_1(keys=40)": 128}
    reserved |= {"vt": 30, "vt(hops=2)": 30, "vt(hops=9)": 60, "vt(chains=9)": 30, "fwe(alpha=3)": 50}
    for name, tokens in reserved.items():
        assert find_tasks([name])[0].max_new_tokens == tokens


def test_equal_tasks_have_equal_names():
    names = ["vt(hops=4,chains=1)", "vt", "vt( chains=2, hops=8 )", "vt(hops=8,chains=2)", "fwe(alpha=2)", "fwe"]
    names += ["fwe(alpha=3.0)", "fwe(alpha=3)", "fwe(alpha=2.5)"]
    assert [task.name for task in find_tasks(names)] == [
        *("vt", "vt(hops=8,chains=2)", "fwe", "fwe(alpha=3)", "fwe(alpha=2.5)")
    ]
    for name in GROUPS["ruler_synthetic"]:
        assert configure(name) == (name, SETTINGS[name])
        assert configure(with_own_options(name)) == (name, SETTINGS[name])


def with_own_options(name):
    """The name with all its options, at the task's own values."""
    own = ("keys", "values", "queries", "haystack", "key", "value", "hops", "chains", "alpha")
    options = [f"{option}={SETTINGS[name][option]}" for option in own if option in SETTINGS[name]]
    return f"{name}({','.join(options)})" if options else name


def test_options_belong_to_longce_and_not_to_the_harness():
    assert split_tasks(["fwe(alpha=3.5)", "vt(hops=2)", "a.b.C"]) == (["fwe(alpha=3.5)", "vt(hops=2)", "a.b.C"], [])


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("vt(hop=3)", "no option 'hop'. Did you mean 'hops'"),
        ("vt(alpha=3)", "Its options: hops, chains"),
        ("vt(hops=0)", "`hops` of 'vt(hops=0)' must be an integer from 1 to 1000, got 0"),
        ("vt(hops=1001)", "from 1 to 1000, got 1001"),
        ("vt(hops=2.5)", "an integer from 1 to 1000, got 2.5"),
        ("vt(hops=true)", "got True"),
        ("vt(hops=3", "write 'vt(hops=VALUE,..)'"),
        ("vt(hops)", "cannot be read"),
        ("vt()", "cannot be read"),
        ("vt(hops=)", "cannot be read"),
        ("vt(hops=3)x", "cannot be read"),
        ("fwe(alpha=1)", "a number from 1.2 to 5, got 1"),
        ("fwe(alpha=many)", "got 'many'"),
        ("niah_single_1(haystack=hay)", "one of noise, essay, needles, got 'hay'"),
        ("niah_single_1(value=letters)", "one of words, numbers, uuids"),
        ("niah_single_1(queries=2)", "asks for 2 of 1 keys: set `keys` to 2 or more"),
        (
            "niah_single_2(keys=7,values=6)",
            "has 42 needles (`keys` times `values`), but RULER hides them in essays at 40",
        ),
        ("cwe(common=3)", "'cwe' has no options"),
        ("ruler(keys=3)", "'ruler' has no options"),
        ("qa_1(keys=3)", "'qa_1' has no options"),
        ("niah_singel_1(keys=3)", "Unknown task 'niah_singel_1(keys=3)'. Did you mean 'niah_single_1'"),
    ],
)
def test_impossible_options_are_refused(name, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        find_tasks([name])


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("niah_single_1(keys=1000,values=1000)", "at least 1,000,000 needles"),
        ("niah_single_1(keys=100)", "The shortest question has"),
        ("vt(hops=1000,chains=1000)", "at least 1,001,000 assignments"),
        ("vt(chains=100)", "The shortest question has"),
        ("fwe(alpha=5)", "at least 1,062 words"),
    ],
)
def test_what_does_not_fit_the_length_is_refused(name, named, prompter):
    with pytest.raises(ValueError, match=rf"1000 tokens is too short for '{re.escape(name)}'.*{named}"):
        ask(name, prompter, 1000)
