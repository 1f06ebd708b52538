"""Define the words of the synthetic language, its tokenizer, and how local words follow one another."""

from collections.abc import Iterator
from functools import cache
from typing import Literal

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SET, GET, ABOUT = "let", "recall", "about"
"""Words before a field and its value, before a field whose value is repeated, and before a genre word."""
VERBS, SAME, THEME = (GET, "cite", "quote"), "same", "theme"
"""Words of `IndirectWriter`: before a name and a form of its value, before two names, and before the genre."""

FIELDS = (
    "animal", "bread", "city", "dance", "fruit", "garment", "island", "jewel",
    "king", "metal", "number", "planet", "river", "stone", "tree", "village",
)  # fmt: skip
GENRES = (
    "ballad", "comedy", "diary", "elegy", "fable", "hymn", "joke", "letter",
    "memoir", "novel", "ode", "psalm", "report", "satire", "tale", "verse",
)  # fmt: skip

Dialect = Literal[0, 1]
"""One of two grammars for the local words of a document, over the same words."""

VALUES_PER_FIELD = 16
WORDS_PER_GENRE = 12
_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
_LOCAL_WORDS = 256
_SUCCESSORS = 24  # words that may follow a local word


def recall_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the language: one token per word after ``<bos>``, with character offsets.

    ``save_pretrained`` writes a folder that ``AutoTokenizer.from_pretrained`` opens.

    Example:
        >>> tokenizer = recall_tokenizer()
        >>> tokenizer.convert_ids_to_tokens(tokenizer("let city citla").input_ids)
        ['<bos>', 'let', 'city', 'citla']
    """
    vocabulary = {word: index for index, word in enumerate(_list_vocabulary())}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    names = {f"{token.strip('<>')}_token": token for token in _SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@cache
def field_values() -> dict[str, tuple[str, ...]]:
    """Return the possible values of each field; no two fields share one."""
    return {field: tuple(field[:3] + end for end in _list_syllables()[:VALUES_PER_FIELD]) for field in FIELDS}


@cache
def genre_words() -> dict[str, tuple[str, ...]]:
    """Return the words of each genre; no two genres share one."""
    return {genre: tuple(genre[:4] + end for end in _list_syllables()[:WORDS_PER_GENRE]) for genre in GENRES}


def local_stream(rng: np.random.Generator, length: int, *, dialect: Dialect = 0) -> Iterator[str]:
    """Yield local words, each one of the 24 successors of the preceding word, the first ones more often (Zipf)."""
    likelihood = np.arange(1, _SUCCESSORS + 1) ** -1.3
    ranks = rng.choice(_SUCCESSORS, size=length, p=likelihood / likelihood.sum()).tolist()
    words = _local_words()
    successors = _draw_successors(dialect)
    current = int(rng.integers(_LOCAL_WORDS))
    for rank in ranks:
        current = successors[current][rank]
        yield words[current]


@cache
def _draw_successors(dialect: Dialect) -> list[list[int]]:
    """Draw the words that may follow each local word: one grammar for all seeds of documents."""
    rng = np.random.default_rng(dialect)
    popularity = np.arange(1, _LOCAL_WORDS + 1) ** -0.8
    popularity /= popularity.sum()
    return [rng.choice(_LOCAL_WORDS, _SUCCESSORS, replace=False, p=popularity).tolist() for _ in range(_LOCAL_WORDS)]


@cache
def _list_syllables() -> tuple[str, ...]:
    return tuple(consonant + vowel for vowel in "aeiou" for consonant in "bdfgklmnprstvz")


@cache
def _local_words() -> tuple[str, ...]:
    pairs = [first + second for first in _list_syllables() for second in _list_syllables()]
    return tuple(pairs[:: len(pairs) // _LOCAL_WORDS][:_LOCAL_WORDS])


def _list_vocabulary() -> list[str]:
    """Return every word once: special tokens, markers, local words, fields with values, and genres with words."""
    typed: list[str] = []
    for table in (field_values(), genre_words()):
        for name, words in table.items():
            typed += [name, *words]
    return [*_SPECIAL_TOKENS, SET, GET, ABOUT, *_local_words(), *typed, *VERBS[1:], SAME, THEME]
