"""A made-up language whose documents need their far past: for a quickstart and tests without network or data."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from jsonargparse.typing import NonNegativeInt, PositiveInt
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from datamodules.packed_text import PackedTextDataModule
from datamodules.sources import Document
from datamodules.splits import Split

SET, GET, ABOUT = "let", "recall", "about"
"""What stands before a field and its value, before a field whose value is repeated, and before a genre word."""

FIELDS = (
    "animal", "bread", "city", "dance", "fruit", "garment", "island", "jewel",
    "king", "metal", "number", "planet", "river", "stone", "tree", "village",
)  # fmt: skip
GENRES = (
    "ballad", "comedy", "diary", "elegy", "fable", "hymn", "joke", "letter",
    "memoir", "novel", "ode", "psalm", "report", "satire", "tale", "verse",
)  # fmt: skip

_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
_VALUES_PER_FIELD = 16
_WORDS_PER_GENRE = 12
_LOCAL_WORDS = 256
_SUCCESSORS = 24  # words that may follow a local word
_SHORTEST_SLOT = 4  # an event of 3 words and a local one


def recall_documents(count: int, *, length: int, slot: int = 16, seed: int = 0) -> Iterator[str]:
    """Documents in which some words can only be known from far back, as plain text.

    A document opens with its genre. Then local words follow one another as a Markov chain: each is one of 24 that may
    follow the one before. About every ``slot`` words an event interrupts the chain:

    - ``let city citla`` (30 %) gives a field its value, at most once in a document;
    - ``recall city citla`` (50 %) repeats the value of a field that has one, all such fields being equally likely
      however far back they were set. Who sees that far knows the value, who does not has 16 to choose from
      (LSD 2.8). These are the key tokens;
    - ``about fablla`` (20 %) is one of the 12 words of the genre. A long context raises its likelihood much
      (LSD 2.8) and yet leaves it low (LCL -2.5): it is why key tokens need a threshold on the LCL too.

    This models one property of text, that a few of its tokens depend on the far past, and nothing else: a value is
    looked up by its field, never inferred, and it is one token. A recipe that works here is shown to work as
    machinery; how much it helps on natural language is not shown.

    A short window begins in the middle of a document, so an evaluator should be trained on rows some of which do,
    for instance on documents twice as long as its rows. One that has seen beginnings only is confidently wrong in short
    windows, and takes local words for key tokens.

    Args:
        count: How many documents.
        length: Words in each document; the tokenizer makes one token of each and puts ``<bos>`` before them.
        slot: Words from one event to the next, on average. Fewer make a dense document, which is quicker to learn from.
        seed: Document ``i`` depends on ``seed``, ``i``, ``length`` and ``slot`` only; the language is always the same.

    Yields:
        Documents of exactly ``length`` words, one space apart; the end may cut an event short.

    Raises:
        ValueError: If ``slot`` leaves no room between two events.

    Example:
        >>> next(recall_documents(1, length=12, slot=4, seed=2))
        'satire let king kinma kase about satila danu zafa about satila date'
    """
    if slot < _SHORTEST_SLOT:
        raise ValueError(f"An event has up to 3 words: `slot` must be at least {_SHORTEST_SLOT}, got {slot}.")
    for index in range(count):
        yield " ".join(_document(np.random.default_rng((seed, index)), length, slot))


def recall_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of the language: one token per word, ``<bos>`` first, character offsets like any fast tokenizer.

    ``save_pretrained`` writes a folder that ``AutoTokenizer.from_pretrained`` opens.

    Example:
        >>> tokenizer = recall_tokenizer()
        >>> tokenizer.convert_ids_to_tokens(tokenizer("let city citla").input_ids)
        ['<bos>', 'let', 'city', 'citla']
    """
    vocabulary = {word: index for index, word in enumerate(_vocabulary())}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    names = {f"{token.strip('<>')}_token": token for token in _SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@cache
def field_values() -> dict[str, tuple[str, ...]]:
    """The words that each field can have as its value; no two fields share one.

    Example:
        >>> field_values()["city"][:3]
        ('citba', 'citda', 'citfa')
    """
    return {field: tuple(field[:3] + end for end in _syllables()[:_VALUES_PER_FIELD]) for field in FIELDS}


@cache
def genre_words() -> dict[str, tuple[str, ...]]:
    """The words that a document of each genre is about; no two genres share one.

    Example:
        >>> genre_words()["fable"][:3]
        ('fablba', 'fablda', 'fablfa')
    """
    return {genre: tuple(genre[:4] + end for end in _syllables()[:_WORDS_PER_GENRE]) for genre in GENRES}


def _document(rng: np.random.Generator, length: int, slot: int) -> list[str]:
    local = _local_stream(rng, length + 2 * slot)
    genre = GENRES[rng.integers(len(GENRES))]
    values = {
        field: field_values()[field][rng.integers(_VALUES_PER_FIELD)] for field in rng.permutation(FIELDS).tolist()
    }
    unset, known = list(values), []
    words = [genre]
    while len(words) < length:
        kind, event = rng.random(), []
        if kind < 0.3 and unset:
            known.append(unset.pop())
            event = [SET, known[-1], values[known[-1]]]
        elif 0.3 <= kind < 0.8 and known:
            field = known[rng.integers(len(known))]
            event = [GET, field, values[field]]
        elif kind >= 0.8:
            event = [ABOUT, genre_words()[genre][rng.integers(_WORDS_PER_GENRE)]]
        between = int(rng.integers(1, 2 * (slot - len(event))))  # `slot - len(event)` on average
        words += event + [next(local) for _ in range(between)]
    return words[:length]


def _local_stream(rng: np.random.Generator, length: int) -> Iterator[str]:
    """Local words, each one of the 24 successors of the word before, the first successors more often (Zipf)."""
    likelihood = np.arange(1, _SUCCESSORS + 1) ** -1.3
    ranks = rng.choice(_SUCCESSORS, size=length, p=likelihood / likelihood.sum()).tolist()
    words, successors = _local_words(), _successors()
    current = int(rng.integers(_LOCAL_WORDS))
    for rank in ranks:
        current = successors[current][rank]
        yield words[current]


@cache
def _successors() -> list[list[int]]:
    """For each local word the words that may follow it: one grammar, whatever the documents' seed."""
    rng = np.random.default_rng(0)
    popularity = np.arange(1, _LOCAL_WORDS + 1) ** -0.8
    popularity /= popularity.sum()
    return [rng.choice(_LOCAL_WORDS, _SUCCESSORS, replace=False, p=popularity).tolist() for _ in range(_LOCAL_WORDS)]


@cache
def _syllables() -> tuple[str, ...]:
    return tuple(consonant + vowel for vowel in "aeiou" for consonant in "bdfgklmnprstvz")


@cache
def _local_words() -> tuple[str, ...]:
    pairs = [first + second for first in _syllables() for second in _syllables()]
    return tuple(pairs[:: len(pairs) // _LOCAL_WORDS][:_LOCAL_WORDS])


def _vocabulary() -> list[str]:
    """Every word once: 4 special tokens, 3 markers, 256 local words, 16 fields of 16 values, 16 genres of 12 words."""
    typed = [
        word for table in (field_values(), genre_words()) for name, words in table.items() for word in (name, *words)
    ]
    return [*_SPECIAL_TOKENS, SET, GET, ABOUT, *_local_words(), *typed]


@dataclass(frozen=True)
class RecallSource:
    """Documents of the made-up language as a source of a data module; arguments as those of `recall_documents`."""

    count: int
    length: int
    slot: int
    seed: int

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        texts = recall_documents(self.count, length=self.length, slot=self.slot, seed=self.seed)
        yield from (Document(f"recall-{self.seed}-{index}", text) for index, text in enumerate(texts))

    def fingerprint(self) -> str:
        """What the documents are made from, and the first of them in case the language changes."""
        return f"{self} {next(iter(self)).text}"


class RecallDataModule(PackedTextDataModule):
    """Made-up text in which some words can only be known from far back; see `recall_documents`.

    Training, validation and test documents are different ones of the same language. The tokenizer comes with it.

    Args:
        train_documents: How many documents to train on.
        document_length: Words of each document, in training and evaluation; by default as many as fill a row.
        slot: Words from one event to the next, on average: fewer make it easier to learn.
        sequence_length: Tokens per training row.
        validation_documents: How many documents to validate on.
        test_documents: How many documents to test on.
        seed: Seed of the documents and of the order of the training rows.
        **kwargs: See :class:`PackedTextDataModule`.
    """

    def __init__(
        self,
        *,
        train_documents: PositiveInt = 1000,
        document_length: PositiveInt | None = None,
        slot: PositiveInt = 16,
        sequence_length: PositiveInt = 512,
        validation_documents: PositiveInt = 32,
        test_documents: PositiveInt = 32,
        seed: NonNegativeInt = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            "recall",
            sequence_length=sequence_length,
            add_special_tokens=True,
            validation_documents=validation_documents,
            test_documents=test_documents,
            seed=seed,
            **kwargs,
        )
        self.train_documents = train_documents
        self.document_length = document_length or sequence_length - 1  # <bos> fills the row up
        self.slot = slot

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the language, which ends no document: all are equally long.

        A model would learn at which position the end comes, and expect it there in longer documents, too.
        """
        tokenizer = recall_tokenizer()
        tokenizer.eos_token = None
        return tokenizer

    @override
    def source(self, split: Split) -> RecallSource:
        counts = {
            "train": self.train_documents,
            "validation": self.validation_documents or 0,
            "test": self.test_documents or 0,
        }
        seed = 3 * self.seed + list(counts).index(split)
        return RecallSource(int(counts[split]), length=self.document_length, slot=self.slot, seed=int(seed))
