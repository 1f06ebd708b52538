"""Questions about a text of the studies' length, many on one sheet, so that one pass of a model answers all of them.

The tasks are those of RULER (keys in essays, chains of variables), of the key-value retrieval of Liu et al. (2023,
https://arxiv.org/abs/2307.03172) and the lines of LongEval, with short synthetic values. All questions of a sheet
follow its document, one after another, each with its right answer (teacher forcing), so a wrong answer costs no other.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ANSWERS = 10
"""Questions of a sheet."""

PAIR_CHARACTERS, PIECE_CHARACTERS = 25, 200
"""Length of a key-value pair, and of a piece of an essay between lines."""

NAMES = [
    "amber",
    "apple",
    "arrow",
    "basket",
    "beacon",
    "bridge",
    "butter",
    "candle",
    "canvas",
    "castle",
    "cedar",
    "circle",
    "copper",
    "cotton",
    "crystal",
    "desert",
    "dragon",
    "eagle",
    "ember",
    "falcon",
    "feather",
    "forest",
    "garden",
    "ginger",
    "harbor",
    "hazel",
    "honey",
    "island",
    "jacket",
    "jungle",
    "kettle",
    "ladder",
    "lantern",
    "lemon",
    "marble",
    "meadow",
    "mirror",
    "mountain",
    "needle",
    "ocean",
    "olive",
    "orange",
    "orchid",
    "paper",
    "pepper",
    "pillow",
    "planet",
    "pocket",
    "prairie",
    "quartz",
    "rabbit",
    "ribbon",
    "river",
    "rocket",
    "saddle",
    "salmon",
    "shadow",
    "silver",
    "sparrow",
    "spider",
    "spring",
    "stone",
    "sugar",
    "summer",
    "sunset",
    "temple",
    "thunder",
    "tiger",
    "timber",
    "tunnel",
    "turtle",
    "valley",
    "velvet",
    "violet",
    "walnut",
    "whisper",
    "willow",
    "window",
    "winter",
    "yellow",
]


class QuestionSheet(NamedTuple):
    """A document and questions about it. The target is the answers with the text between them."""

    name: str
    document: str
    first_prefix: str  # from the document's end to the first answer
    target: str
    answers: list[str]


def make_sheets(haystack: Path, *, characters: int, sheets: int, seed: int = 0) -> list[QuestionSheet]:
    """Return sheets of each task, of about this many characters; the same for every model."""
    essays = " ".join(haystack.read_text(encoding="utf-8")[5_000:].split())
    makers: dict[str, Callable[[random.Random, str, int], tuple[str, str, list[tuple[str, str]]]]] = {
        "keys in essays": _make_needles,
        "lines": _make_lines,
        "pairs": _make_pairs,
        "variables": _make_variables,
    }
    found = []
    for task, make in makers.items():
        for number in range(sheets):
            draw = random.Random(f"{seed} {task} {number}")
            start = draw.randrange(len(essays) - characters)
            document, question, facts = make(draw, essays[start : start + characters], characters)
            asked = draw.sample(facts, ANSWERS)
            prefixes = [question.format(name=name) for name, _ in asked]
            answers = [value for _, value in asked]
            # The text from one answer to the next: the rest of its line, and the next question.
            target = answers[0] + "".join(
                f".\n{prefix}{value}" for prefix, value in zip(prefixes[1:], answers[1:], strict=True)
            )
            found.append(QuestionSheet(f"{task} {number}", document, f"\n\n{prefixes[0]}", target, answers))
    return found


def _make_needles(draw: random.Random, essay: str, characters: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Hide facts in an essay, at the ends of sentences."""
    facts = _draw_facts(draw, 2 * ANSWERS)
    sentences = essay.split(". ")
    for name, value in facts:
        sentences.insert(draw.randrange(len(sentences)), f"The pass key of the {name} is {value}")
    return ". ".join(sentences) + ".", "The pass key of the {name} is ", facts


def _make_lines(draw: random.Random, essay: str, characters: int) -> tuple[str, str, list[tuple[str, str]]]:
    """List registers, as LongEval does, and between them lines of an essay, to make up the length."""
    facts = _draw_facts(draw, len(NAMES))
    lines = [f"line {name}: REGISTER_CONTENT is <{value}>" for name, value in facts]
    rest = max(0, characters - sum(map(len, lines)))
    lines += [essay[start : start + PIECE_CHARACTERS] for start in range(0, rest, PIECE_CHARACTERS)]
    draw.shuffle(lines)
    return "\n".join(lines), "The REGISTER_CONTENT in line {name} is <", facts


def _make_pairs(draw: random.Random, essay: str, characters: int) -> tuple[str, str, list[tuple[str, str]]]:
    """List pairs of a key of two words and a value; numbers have many tokens, so half of the characters are enough."""
    keys = [f"{one}-{other}" for one in NAMES for other in NAMES if one != other]
    facts = [(key, _draw_number(draw)) for key in draw.sample(keys, characters // (2 * PAIR_CHARACTERS))]
    return "\n".join(f'"{key}": "{value}",' for key, value in facts), '"{name}": "', facts


def _make_variables(draw: random.Random, essay: str, characters: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Hide chains of two assignments in an essay: a variable gets a number, and another one gets its value."""
    names = draw.sample(NAMES, 4 * ANSWERS)
    sentences, facts = essay.split(". "), []
    for first, second in zip(names[::2], names[1::2], strict=True):
        value = _draw_number(draw)
        places = sorted(draw.sample(range(len(sentences)), 2))
        sentences.insert(places[0], f"VAR {first} = {value}")
        sentences.insert(places[1] + 1, f"VAR {second} = VAR {first}")
        facts.append((second, value))
    return ". ".join(sentences) + ".", "The number in VAR {name} is ", facts


def _draw_facts(draw: random.Random, count: int) -> list[tuple[str, str]]:
    return [(name, _draw_number(draw)) for name in draw.sample(NAMES, count)]


def _draw_number(draw: random.Random) -> str:
    return str(draw.randrange(10_000, 100_000))
