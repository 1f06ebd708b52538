import pytest

from benchmarks.reproduction.miniature.haystack import HaystackCorpus
from datamodules.recall.language import FIELDS, GENRES, GET, SET, field_values


@pytest.fixture(scope="module")
def text(book_folder):
    return book_folder


@pytest.fixture(scope="module")
def corpus(text):
    """Its values are several tokens: the vocabulary is too small for all."""
    return HaystackCorpus(str(text), vocabulary_size=340)


@pytest.mark.limit(3)  # the first one trains the tokenizer
@pytest.mark.parametrize("tokens", [64, 65, 200])
def test_documents_have_exactly_the_tokens_asked_for(corpus, tokens):
    for record in corpus.documents(20, tokens):
        assert len(corpus.tokenizer()(record.text).input_ids) == tokens
    for part in corpus.questions(20, tokens, depths=2, distance=0):
        for record in part:
            assert len(corpus.tokenizer()(record.text).input_ids) == tokens


def tokens_of(corpus, record):
    """Token numbers ``[first, last]`` of each word, from the characters of the tokens."""
    offsets = corpus.tokenizer()(record.text, return_offsets_mapping=True).offset_mapping
    found = []
    for start, end in record.offsets:
        inside = [t for t, (s, e) in enumerate(offsets) if t and start <= s and e <= end]
        found.append((inside[0], inside[-1]))
    return found


def test_events_are_whole_and_answers_are_known_in_tokens(corpus):
    answers = far = 0
    for record in corpus.documents(20, 300):
        words, places = [word.text for word in record.words], tokens_of(corpus, record)
        assert words[0] in GENRES
        values = {}
        for index, word in enumerate(record.words):
            if word.kind == "other" and word.text == SET:
                assert words[index + 1] not in values
                values[words[index + 1]] = words[index + 2]
            if word.kind == "answer":
                assert words[index - 2] == GET
                assert values[words[index - 1]] == word.text
                last = max(before for before in range(index) if words[before] == word.text)
                assert word.distance == places[index][0] - places[last][1]
                answers += 1
        spans = record.spans("answer", farther_than=60)
        assert len(spans) == sum(word.distance > 60 for word in record.words)
        far += len(spans)
    assert answers > 50
    assert far > 5


def test_an_answer_counts_up_to_its_last_token_that_could_be_another(corpus):
    tokenizer = corpus.tokenizer()
    partly = 0
    for field, values in field_values().items():
        encoded = {value: tokenizer.tokenize(value) for value in values}
        for value in values:
            tokens, open_places = encoded[value], []
            for place in range(len(tokens)):
                begin_so = [other for other in values if encoded[other][:place] == tokens[:place]]
                if any(encoded[other][place : place + 1] != tokens[place : place + 1] for other in begin_so):
                    open_places.append(place)
            end = len("".join(tokens[: open_places[-1] + 1]).removeprefix("Ġ"))
            assert corpus.decisive(field, value) == end
            partly += end < len(value)
    assert partly > 0
    (record,) = [next(iter(corpus.documents(1, 300)))]
    for (start, end), word in zip(
        record.spans("answer"), [word for word in record.words if word.kind == "answer"], strict=True
    ):
        assert record.text[start:end] == word.text[: word.decisive]


def test_questions_are_answered_in_one_place_at_the_depth_asked_for(corpus):
    parts = corpus.questions(40, 400, depths=4, distance=100)
    assert [len(part) for part in parts] == [10] * 4
    for number, part in enumerate(parts):
        for record in part:
            words, places = [word.text for word in record.words], tokens_of(corpus, record)
            planted = [index for index, word in enumerate(record.words) if word.kind != "local"]
            field, value = words[-2:]
            assert words[-3] == GET
            assert record.words[-1].kind == "answer"
            assert field in FIELDS
            named = [index for index in planted if words[index] == field]
            assert len(named) == 2
            assert words[named[0] - 1 : named[0] + 2] == [SET, field, value]
            assert [index for index in planted if words[index] == value] == [named[0] + 1, len(words) - 1]
            distance = places[-1][0] - places[named[0] + 1][1]
            assert record.words[-1].distance == distance > 100
            last = 400 * (1 - 120 / 400)
            assert last * number / 4 - 20 <= places[named[0] - 1][0] <= last * (number + 1) / 4 + 2
