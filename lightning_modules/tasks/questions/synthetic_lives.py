"""Short lives of people who never were, and questions about them: documents for those who have none."""

import random
from collections.abc import Iterator

from lightning_modules.tasks.questions.question_files import OpenQuestion, Passage
from lightning_modules.tasks.questions.words import ADJECTIVES, NOUNS, made_up_words

_TRADES = (
    *("baker", "carpenter", "clockmaker", "cooper", "engraver", "gardener", "glassblower", "joiner", "mason"),
    *("miller", "painter", "potter", "printer", "saddler", "sculptor", "shipwright", "tailor", "weaver"),
)
_QUESTIONS = ("in which town was {name} born", "what was the name of {name}'s ship", "who taught {name}")
"""Questions about the facts of a life, in their order."""


def made_up_question(rng: random.Random) -> OpenQuestion:
    """A question about one life; no distractor is found for it, so that they come from `made_up_lives`."""
    words = made_up_words(rng, 5)
    gold, facts = _life(words, rng)
    asked = rng.randrange(len(_QUESTIONS))
    return OpenQuestion(_QUESTIONS[asked].format(name=gold.title), (facts[asked],), gold, ())


def made_up_lives(rng: random.Random) -> Iterator[Passage]:
    """Lives without end, all of whose names are different."""
    used: set[str] = set()
    while True:
        fresh = [word for word in made_up_words(rng, 500) if word not in used]
        used.update(fresh)
        for start in range(0, len(fresh) - 4, 5):
            yield _life(fresh[start : start + 5], rng)[0]


def _life(words: list[str], rng: random.Random) -> tuple[Passage, tuple[str, str, str]]:
    """A life of about 70 words, and what can be asked of it: the town, the ship and the teacher."""
    first, last, town, ship, teacher = (word.capitalize() for word in words)
    born = rng.randint(1500, 1850)
    trade = rng.choice(_TRADES)
    text = (
        f"{first} {last} ({born}-{born + rng.randint(40, 85)}) was a {trade}, born in the town of {town} as the"
        f" {rng.choice(('first', 'second', 'third', 'fourth', 'fifth'))} child of a {rng.choice(_TRADES)}. {first} was"
        f" taught by {teacher}, sailed the northern coast for {rng.randint(3, 30)} years on the {ship}, a ship with"
        f" {_thing(rng)} at its bow, and opened a workshop in {born + rng.randint(20, 38)}. What is left of {first}'s"
        f" work is {_thing(rng)}, {_thing(rng)} and a letter about {_thing(rng)}."
    )
    return Passage(f"{first} {last}", text), (town, ship, teacher)


def _thing(rng: random.Random) -> str:
    adjective = rng.choice(ADJECTIVES)
    return f"{'an' if adjective[0] in 'aeiou' else 'a'} {adjective} {rng.choice(NOUNS)}"
