"""Use books with planted lines in experiments: the events of `recall_records` with real text between them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse.typing import PositiveInt
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as TrimmedOffsets
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from benchmarks.reproduction.miniature.recall_corpus import EVALUATION_SEED, NATURAL_SLOT, depth_parts
from datamodules.packed_text import PackedTextDataModule
from datamodules.recall.documents import RecallRecord, Word, Writer, any_fact, free_place
from datamodules.recall.language import GET, SET, field_values
from datamodules.sources.documents import Document, text_folder
from datamodules.sources.splits import Split
from lightning_modules.models.tokenization.tokenizer import tokenizer_hash

Seed = tuple[int, ...]
Books = Sequence[Sequence[str]]

_TOKENIZER_DOCUMENTS, _TOKENIZER_WORDS, _TOKENIZER_SLOT = 400, 2000, 6
_BYTES = 257  # tokens of a tokenizer that has learned nothing: all bytes, and <bos>
_LARGEST_FACT = 20  # tokens: three words and <bos>, with room to spare


class HaystackCorpus:
    """Corpus of ``longce reproduce miniature`` with lines planted in real text.

    The local words come from random places in books. Between them are the events of `recall_records`, such as
    ``let city citla`` and ``recall city citla``, and a genre is first. In documents of the second dialect the words of
    the book are in random order, so that a model that is trained on them learns to recall but no grammar. Training
    documents use the books in ``train``, all others those in ``test``.

    The tokenizer is a byte-level BPE that is trained on such documents, so a value can be several tokens. Each document
    has exactly the requested number of tokens: words that no longer fit at its end are left out. `RecallRecord` counts
    distances in tokens, from the last of the earlier mention to the first of the answer. Only those tokens of an answer
    are decisive that another value of the field would change; the rest is spelling.

    Args:
        text: Folder with ``train/*.txt`` and ``test/*.txt``, the layout of PG-19.
        vocabulary_size: Tokens of the tokenizer.

    """

    remark = (
        "Real text, with planted lines that only the far past explains; in its second dialect the words of the text are"
        " in random order. Only the planted lines are recalled, not far dependencies of the text itself."
    )

    def __init__(self, text: str | None = None, vocabulary_size: PositiveInt = 2048) -> None:
        if not text:
            raise ValueError("This corpus plants lines in your text: name a folder with train/*.txt and test/*.txt.")
        if vocabulary_size <= _BYTES:
            raise ValueError(f"`vocabulary_size` must be above {_BYTES}, the tokens of bytes, got {vocabulary_size}.")
        self.folders = {split: text_folder(Path(text).expanduser() / split) for split in ("train", "test")}
        self.vocabulary_size = vocabulary_size
        self._fingerprints = {split: folder.fingerprint() for split, folder in self.folders.items()}
        self._sizes: dict[str, int] = {}

    @cached_property
    def books(self) -> dict[str, Books]:
        """Words of each book, by split."""
        return {split: [book.text.split() for book in folder] for split, folder in self.folders.items()}

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Byte-level BPE, ``<bos>`` first; offsets leave out the space before a word."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
        tokenizer.decoder = Decoder()
        trainer = BpeTrainer(
            vocab_size=self.vocabulary_size,
            special_tokens=["<bos>"],
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        )
        writers = (
            _BookWriter(self.books["train"], (EVALUATION_SEED, index, 3), _TOKENIZER_SLOT)
            for index in range(_TOKENIZER_DOCUMENTS)
        )
        texts = (" ".join(w.text for w in chain.from_iterable(writer.parts(_TOKENIZER_WORDS))) for writer in writers)
        tokenizer.train_from_iterator(texts, trainer)
        template = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))])
        tokenizer.post_processor = Processors([TrimmedOffsets(trim_offsets=True), template])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")

    def training_data(
        self, rows: int, *, sequence_length: int, document_rows: int, slot: int, second_dialect: float, **options: Any
    ) -> "HaystackDataModule":
        """Make training sequences; arguments as those of `RecallCorpus.training_data`, ``slot`` in words."""
        count, tokens = -(-rows // document_rows), document_rows * sequence_length
        source = HaystackSource(self, count, tokens, slot, options["seed"], second_dialect)
        return HaystackDataModule(source, sequence_length=sequence_length, **options)

    def documents(self, count: int, tokens: int) -> Iterator[RecallRecord]:
        """Write documents of ``tokens`` tokens to measure on."""
        for index in range(count):
            yield self.record("test", tokens, (EVALUATION_SEED + tokens, index), NATURAL_SLOT)

    def questions(self, count: int, tokens: int, *, depths: int, distance: int) -> list[list[RecallRecord]]:
        """Write documents that end in an answer that was given once; arguments as those of `RecallCorpus.questions`."""
        last = max(1 - (distance + _LARGEST_FACT) / tokens, 0.0)
        return [
            [self._question(np.random.default_rng((seed, index, 1)), tokens, depth) for index in range(share)]
            for share, depth, seed in depth_parts(count, tokens, depths, last)
        ]

    def fingerprint(self) -> str:
        """Return a text that changes when documents, questions or the tokenizer do."""
        (question,) = self.questions(1, 96, depths=1, distance=0)[0]
        texts = (next(iter(self.documents(1, 96))).text, question.text)
        books = hashlib.sha256(repr(self._fingerprints).encode()).hexdigest()
        return " ".join((*texts, books, tokenizer_hash(self._tokenizer)))

    def record(self, split: Split, tokens: int, seed: Seed, slot: int, second_dialect: float = 0.0) -> RecallRecord:
        """Write a document of ``tokens`` tokens, with ``<bos>``, whose local words are of the books of a split."""
        writer = _BookWriter(self.books[split], seed, slot, second_dialect)
        return RecallRecord(tuple(self._known(self._fitting(writer.parts(2 * tokens), tokens - 1))))

    def _question(self, rng: np.random.Generator, tokens: int, depth: tuple[float, float]) -> RecallRecord:
        field, value = any_fact(rng)
        fact = [Word(SET, "other"), Word(field, "other"), Word(value, "other")]
        question = [Word(GET, "other"), Word(field, "other"), Word(value, "answer")]
        asked = sum(self.size(word.text) for word in (*fact, *question))
        seed = tuple(rng.integers(2**32, size=2).tolist())
        writer = _BookWriter(self.books["test"], seed, NATURAL_SLOT, without=field)
        words = self._fitting(writer.parts(2 * tokens), tokens - 1 - asked)
        ends = np.cumsum([self.size(word.text) for word in words])
        place = int(np.searchsorted(ends, rng.uniform(*depth) * tokens, side="right"))
        place = free_place(words, min(max(place, 1), len(words) - 1))
        return RecallRecord(tuple(self._known([*words[:place], *fact, *words[place:], *question])))

    def size(self, word: str) -> int:
        """Count the tokens of a word after a space."""
        if word not in self._sizes:
            self._sizes[word] = len(self._tokenizer.backend_tokenizer.encode(word, add_special_tokens=False).ids)
        return self._sizes[word]

    def _fitting(self, parts: Iterable[list[Word]], tokens: int) -> list[Word]:
        """Take words of exactly ``tokens`` tokens: events and local words in order, without those that do not fit."""
        taken: list[Word] = []
        for part in parts:
            for unit in [[word] for word in part] if part[0].kind == "local" else [part]:
                size = sum(self.size(word.text) for word in unit)
                if size <= tokens:
                    taken += unit
                    tokens -= size
                if tokens == 0:
                    return taken
        raise ValueError("The text has hardly a word of one token, so documents cannot be filled: give other text.")

    def _known(self, words: Iterable[Word]) -> Iterator[Word]:
        """Annotate answers with their distances in tokens."""
        said: dict[str, int] = {}
        place = 1  # after <bos>
        field = ""
        for word in words:
            last = place + self.size(word.text) - 1
            if word.kind == "answer":
                word = word._replace(distance=place - said[word.text], decisive=self.decisive(field, word.text))
            yield word
            said[word.text], place, field = last, last + 1, word.text

    def decisive(self, field: str, value: str) -> int:
        """Count the characters of a value up to the last token that another value of the field would change.

        The later tokens are known without the past: all values with this beginning continue in the same way.
        """
        encode = self._tokenizer.backend_tokenizer.encode
        tokens = encode(value, add_special_tokens=False)
        others = [encode(other, add_special_tokens=False).ids for other in field_values()[field] if other != value]
        shared = max(_shared_prefix(tokens.ids, other) for other in others)
        return int(tokens.offsets[min(shared, len(tokens.ids) - 1)][1])


class _BookWriter(Writer):
    """Writer whose local words are those of a book from a random place; its beginning follows its end."""

    def __init__(self, books: Books, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.books = books

    @override
    def local(self, count: int) -> Iterator[str]:
        book = self.books[int(self.rng.integers(len(self.books)))]
        first = int(self.rng.integers(len(book)))
        words = [book[(first + index) % len(book)] for index in range(count)]
        order = self.style.permutation(count) if self.dialect else range(count)
        return (words[index] for index in order)


@dataclass(frozen=True)
class HaystackSource:
    """Source of documents of a `HaystackCorpus`; arguments as those of its `record`."""

    corpus: HaystackCorpus
    count: int
    tokens: int
    slot: int
    seed: int
    second_dialect: float = 0.0

    def __iter__(self) -> Iterator[Document]:
        """Stream the documents."""
        for index in range(self.count):
            record = self.corpus.record("train", self.tokens, (self.seed, index), self.slot, self.second_dialect)
            yield Document(f"haystack-{self.seed}-{index}", record.text)

    def fingerprint(self) -> str:
        """Describe what the documents are made from, with the first of them in case the code changes."""
        made_from = (self.count, self.tokens, self.slot, self.seed, self.second_dialect)
        return f"{self.corpus.fingerprint()} {made_from} {next(iter(self)).text}"


class HaystackDataModule(PackedTextDataModule):
    """Training sequences of a `HaystackSource`; its first documents are for validation."""

    def __init__(self, source: HaystackSource, **kwargs: Any) -> None:
        super().__init__("haystack", add_special_tokens=True, validation_documents=1, **kwargs)
        self.documents = source

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Tokenizer of the corpus, without an end-of-text token: see `RecallDataModule`."""
        return self.documents.corpus.tokenizer()

    @override
    def source(self, split: Split) -> HaystackSource:
        return self.documents


def _shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
