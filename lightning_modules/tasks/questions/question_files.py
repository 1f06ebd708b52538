"""Read questions about documents from the files in which they are published."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_Question = TypeVar("_Question")


class DocumentQuestion(NamedTuple):
    """Question with the accepted wordings of its answer, and the indices of its documents and of related ones."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


class Collection(NamedTuple):
    """Distinct documents in alphabetical order, and questions about them in the order of the file."""

    documents: list[str]
    questions: list[DocumentQuestion]


class Passage(NamedTuple):
    """A document with a title."""

    title: str
    text: str


class OpenQuestion(NamedTuple):
    """Question with the accepted wordings of its answer, the gold passage, and distractors, most relevant first."""

    text: str
    answers: tuple[str, ...]
    gold: Passage
    distractors: tuple[Passage, ...]


def read_squad(path: str | Path) -> Collection:
    """Read SQuAD 1.1 or 2.0 (https://rajpurkar.github.io/SQuAD-explorer), such as ``dev-v2.0.json``, perhaps gzipped.

    As in RULER, questions without an answer (2.0) are skipped. Related documents are the article's other paragraphs.
    """
    with _expect(path, "SQuAD, which is JSON with `data`, `paragraphs`, `context`, `qas`"):
        articles = [article["paragraphs"] for article in json.loads(_read(path))["data"]]
        documents = sorted({paragraph["context"] for paragraph in chain.from_iterable(articles)})
        number = {document: index for index, document in enumerate(documents)}
        questions = []
        for article in articles:
            of_article = dict.fromkeys(number[paragraph["context"]] for paragraph in article)
            for paragraph in article:
                own = number[paragraph["context"]]
                related = tuple(index for index in of_article if index != own)
                for asked in paragraph["qas"]:
                    answers = _distinct_answers(answer["text"] for answer in asked["answers"])
                    questions.append(DocumentQuestion(asked["question"], answers, (own,), related))
        return _collect(documents, questions)


def read_hotpot(path: str | Path) -> Collection:
    """Read HotpotQA with distractors (https://hotpotqa.github.io), such as ``hotpot_dev_distractor_v1.json``.

    As in RULER, a document is a title, a line break and the sentences; all ten of a question belong to it.
    """
    with _expect(path, "HotpotQA, which is JSON with `question`, `answer`, `context`"):
        data = json.loads(_read(path))
        contexts = [_hotpot_documents(asked) for asked in data]
        documents = sorted(set().union(*contexts))
        number = {document: index for index, document in enumerate(documents)}
        questions = []
        for asked, context in zip(data, contexts, strict=True):
            own = tuple(dict.fromkeys(number[document] for document in context))
            answers = _distinct_answers([asked["answer"]])
            questions.append(DocumentQuestion(asked["question"], answers, own))
        return _collect(documents, questions)


def _hotpot_documents(asked: Any) -> list[str]:
    return [f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]]


@lru_cache(maxsize=1)  # tasks that differ in the place of the question share the passages
def read_nq_open(path: str | Path) -> tuple[OpenQuestion, ...]:
    """Read multi-document questions as *Lost in the Middle* publishes them: a JSON object per line, perhaps gzipped.

    Such as ``nq-open-20_total_documents_gold_at_0.jsonl.gz`` of https://github.com/nelson-liu/lost-in-the-middle, or
    its retrieval results. The place of the gold passage in the file does not matter.
    """
    with _expect(path, "Lost in the Middle, which has JSON with `question`, `answers`, `ctxs` in each line"):
        lines = filter(bytes.strip, _read(path).split(b"\n"))
        return tuple(_any(_open_question(json.loads(line)) for line in lines))


def _open_question(record: Any) -> OpenQuestion:
    passages = record["ctxs"]
    gold = next((passage for passage in passages if passage.get("isgold")), None)
    if gold is None:
        annotated = record["nq_annotated_gold"]
        gold = {"title": annotated["title"], "text": annotated["chunked_long_answer"]}
    others = [passage for passage in passages if not passage.get("isgold") and passage["hasanswer"] is False]
    answers = _distinct_answers(record["answers"])
    if not answers:
        raise ValueError("`answers` is empty")
    first, *rest = [Passage(one["title"], one["text"]) for one in (gold, *others)]
    return OpenQuestion(record["question"], answers, first, tuple(rest))


@contextmanager
def _expect(place: str | Path, content: str) -> Iterator[None]:
    """Name the place, such as a file, and its expected content if it cannot be read."""
    try:
        yield
    except (OSError, EOFError, zlib.error, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"'{place}' is damaged or not a file of {content} ({reason}).") from error


def _read(path: str | Path) -> bytes:
    content = Path(path).read_bytes()
    return gzip.decompress(content) if Path(path).suffix == ".gz" else content


def _collect(documents: list[str], questions: list[DocumentQuestion]) -> Collection:
    """Return the questions that have an answer and documents."""
    return Collection(documents, _any(question for question in questions if question.answers and question.documents))


def _any(questions: Iterable[_Question]) -> list[_Question]:
    found = list(questions)
    if not found:
        raise ValueError("it has no question with an answer")
    return found


def _distinct_answers(texts: Iterable[str]) -> tuple[str, ...]:
    """Return each wording once, without empty ones, which every text would contain."""
    return tuple(dict.fromkeys(text for text in texts if text.strip()))
