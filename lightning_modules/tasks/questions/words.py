"""Draw words, numbers, ids and synthetic words for questions."""

import random
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

_ADJECTIVES, _NOUNS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split("\n\n")
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())

_ONSETS = ("b", "br", "c", "d", "dr", "f", "fl", "g", "gr", "h", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t")
_RHYMES = ("a", "an", "ar", "e", "el", "en", "i", "in", "ir", "o", "ol", "on", "u", "um", "ux")


def distinct(draw: Callable[[], str], size: int) -> list[str]:
    """Draw ``size`` different words."""
    words: dict[str, None] = {}  # in the order of the draws
    while len(words) < size:
        words[draw()] = None
    return list(words)


def key_word(rng: random.Random) -> str:
    """Draw an adjective and a noun, such as ``brave-otter``, from our own lists (the originals use `wonderwords`)."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def number(rng: random.Random) -> str:
    """Draw a number of 7 digits, as RULER's values are."""
    return str(rng.randint(1_000_000, 9_999_999))


def uuid(rng: random.Random) -> str:
    """Draw a random UUID (version 4), such as ``1b4e28ba-2fa1-41d2-883f-0016d3cca427``."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def synthetic_words(rng: random.Random, count: int) -> list[str]:
    """Draw distinct words of two or more syllables, such as ``flumaren``; a longer list begins with a shorter one."""
    words: dict[str, None] = {}  # in the order of the draws
    while len(words) < count:
        word = "".join(_draw_syllable(rng) for _ in range(rng.choice((2, 2, 3))))
        while word in words:
            word += _draw_syllable(rng)
        words[word] = None
    return list(words)


def _draw_syllable(rng: random.Random) -> str:
    return rng.choice(_ONSETS) + rng.choice(_RHYMES)
