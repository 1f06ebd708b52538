"""Read questions about documents from the files in which they are published."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


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

    def collection(data: Any) -> Collection:
        articles = [article["paragraphs"] for article in data["data"]]
        documents = _distinct_texts(paragraph["context"] for article in articles for paragraph in article)
        number = {document: index for index, document in enumerate(documents)}
        questions = []
        for article in articles:
            of_article = dict.fromkeys(number[paragraph["context"]] for paragraph in article)
            for paragraph in article:
                own = number[paragraph["context"]]
                related = tuple(index for index in of_article if index != own)
                for asked in paragraph["qas"]:
                    answers = _distinct_answers(answer["text"] for answer in asked["answers"])
                    questions.append(DocumentQuestion(_checked_text(asked["question"]), answers, (own,), related))
        return Collection(documents, [question for question in questions if question.answers])

    return _read_collection(path, "SQuAD", "`data`, `paragraphs`, `context`, `qas`", collection)


def read_hotpot(path: str | Path) -> Collection:
    """Read HotpotQA with distractors (https://hotpotqa.github.io), such as ``hotpot_dev_distractor_v1.json``.

    As in RULER, a document is a title, a line break and the sentences; all ten of a question belong to it.
    """

    def collection(data: Any) -> Collection:
        contexts = [[f"{_checked_text(title)}\n{''.join(text)}" for title, text in asked["context"]] for asked in data]
        documents = _distinct_texts(document for context in contexts for document in context)
        number = {document: index for index, document in enumerate(documents)}
        questions = [
            DocumentQuestion(
                _checked_text(asked["question"]),
                _distinct_answers([asked["answer"]]),
                tuple(dict.fromkeys(number[document] for document in context)),
            )
            for asked, context in zip(data, contexts, strict=True)
        ]
        return Collection(documents, [question for question in questions if question.answers and question.documents])

    return _read_collection(path, "HotpotQA", "`question`, `answer`, `context`", collection)


@lru_cache(maxsize=1)  # tasks that differ in the place of the question share the passages
def read_nq_open(path: str | Path) -> tuple[OpenQuestion, ...]:
    """Read multi-document questions as *Lost in the Middle* publishes them: a JSON object per line, perhaps gzipped.

    Such as ``nq-open-20_total_documents_gold_at_0.jsonl.gz`` of https://github.com/nelson-liu/lost-in-the-middle, or
    its retrieval results. The place of the gold passage in the file does not matter.
    """
    questions = []
    for number, line in enumerate(_read_lines(path), 1):
        if line.strip():
            place, fields = f"{path}, line {number}", "`question`, `answers`, `ctxs`"
            questions.append(_parse_content(line, place, "Lost in the Middle", fields, _open_question))
    if not questions:
        raise ValueError(f"{path} has no question. Expected a file such as those of Lost in the Middle's `qa_data`.")
    return tuple(questions)


def _open_question(record: Any) -> OpenQuestion:
    passages = record["ctxs"]
    gold = next((passage for passage in passages if passage.get("isgold")), None)
    if gold is None:
        annotated = record["nq_annotated_gold"]
        gold = {"title": annotated["title"], "text": annotated["chunked_long_answer"]}
    others = (passage for passage in passages if not passage.get("isgold") and passage["hasanswer"] is False)
    answers = _distinct_answers(record["answers"])
    if not answers:
        raise ValueError("`answers` is empty")
    first, *rest = (
        Passage(_checked_text(passage["title"]), _checked_text(passage["text"])) for passage in (gold, *others)
    )
    return OpenQuestion(_checked_text(record["question"]), answers, first, tuple(rest))


def _read_collection(path: str | Path, name: str, fields: str, build: Callable[[Any], Collection]) -> Collection:
    collection = _parse_content(b"".join(_read_lines(path)), str(path), name, fields, build)
    if not collection.questions:
        raise ValueError(f"{path} has no question with an answer. Expected a file of {name}.")
    return collection


def _parse_content(content: bytes, place: str, name: str, fields: str, build: Callable[[Any], T]) -> T:
    try:
        return build(json.loads(content))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{place}: not in the format of {name}, which is JSON with {fields} ({reason}).") from error


def _read_lines(path: str | Path) -> list[bytes]:
    try:
        with gzip.open(path) if Path(path).suffix == ".gz" else open(path, "rb") as stream:
            return stream.readlines()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"Cannot read {path} ({error}): name an undamaged local file.") from error


def _distinct_texts(documents: Iterable[str]) -> list[str]:
    return sorted({_checked_text(document) for document in documents})


def _distinct_answers(texts: Iterable[Any]) -> tuple[str, ...]:
    """Return each wording once, without empty ones, which every text would contain."""
    return tuple(dict.fromkeys(text for text in map(_checked_text, texts) if text.strip()))


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r:.40}")
    return value
