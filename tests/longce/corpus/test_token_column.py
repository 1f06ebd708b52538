"""A corpus of token ids has the scores of its texts, and is recorded, refused and selected like one of texts."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from longce.corpus.config import CorpusConfig
from longce.corpus.score import score_corpus
from longce.corpus.select.command import select
from tests.conftest import make_text

LENGTHS = [1, 30, 60, 12, 45]


@pytest.fixture
def documents(tmp_path, model_dir):
    """Texts and their token ids by row: in a parquet file with row groups, and in JSON lines with a nested field."""
    tokenizer = load_tokenizer(str(model_dir))
    records = []
    for number, length in enumerate(LENGTHS):
        text = make_text(length, number)
        ids = tokenizer.encode(text, add_special_tokens=False)
        records.append({"id": f"d{number}", "text": text, "ids": ids, "meta": {"ids": ids}, "others": ids})
    (tmp_path / "a").mkdir()
    schema = pyarrow.schema({"id": pyarrow.string(), "text": pyarrow.string(), "ids": pyarrow.list_(pyarrow.uint16())})
    table = pyarrow.Table.from_pylist([{name: record[name] for name in schema.names} for record in records], schema)
    pyarrow.parquet.write_table(table, tmp_path / "a" / "a.parquet", row_group_size=2)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def score(files, model_dir, output, **options):
    settings = {"context_length": 16, "stride": 8, "alpha": 0.5, "beta": -6.0, "dtype": "float32", "device": "cpu"}
    settings |= {"key_column": "id", "contexts": [8, 32], "per_token": "float32", **options}
    score_corpus([str(files)], CorpusConfig(model=str(model_dir), output=str(output), **settings))
    found = pyarrow.parquet.read_table(output, partitioning=None).sort_by("row")
    return found.replace_schema_metadata()


@pytest.mark.parametrize("options", [{}, {"max_tokens": 40}, {"batch_tokens": 200}])
def test_token_ids_have_the_scores_of_their_texts(documents, model_dir, options):
    expected = score(documents / "a", model_dir, documents / "text", **options)
    found = score(documents / "a", model_dir, documents / "ids", token_column="ids", **options)
    assert len(set(found["token_hash"].to_pylist())) == len(LENGTHS)
    assert found.drop_columns("token_hash").equals(expected)
    assert max(found["key_tokens"].to_pylist()) > 0
    lines = score(documents / "b.jsonl", model_dir, documents / "lines", token_column="meta.ids", **options)
    assert lines.drop_columns("file").equals(found.drop_columns("file"))


def test_a_restart_needs_the_same_column_and_the_same_token_ids(documents, model_dir):
    file = documents / "b.jsonl"
    output = documents / "out"
    found = score(file, model_dir, output, token_column="ids")
    parts = sorted(output.glob("part-*"))
    for column in ("others", None):
        with pytest.raises(ValueError, match=r"`token_column` was 'ids' and is"):
            score(file, model_dir, output, token_column=column)
    # A file that was written again with the same documents is not scored again, one with other ids is refused.
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line, indent=None, separators=(",", ":")) + "\n" for line in lines))
    assert score(file, model_dir, output, token_column="ids").equals(found)
    assert sorted(output.glob("part-*")) == parts
    lines[1]["ids"][3] += 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="changed since their documents were scored"):
        score(file, model_dir, output, token_column="ids")


def test_documents_that_cannot_be_scored_are_rows(documents, model_dir):
    broken = [None, [], [3, -1], [3, 10**6], [0.5], [[1]], "text", [True]]
    lines = [{"id": f"b{number}", "ids": ids} for number, ids in enumerate(broken)]
    with (documents / "b.jsonl").open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    options = {"token_column": "ids", "allowed_failures": 1.0}
    found = score(documents / "b.jsonl", model_dir, documents / "out", **options)
    errors = found["error"].to_pylist()
    assert errors[: len(LENGTHS)] == [None] * len(LENGTHS)
    reasons = ["is null", "left out: ", "token id -1", "integers from 0 to", *["a list of integers"] * 4]
    assert all(reason in error for reason, error in zip(reasons, errors[len(LENGTHS) :], strict=True))
    (documents / "b.jsonl").touch()  # the failed documents are still the same
    assert score(documents / "b.jsonl", model_dir, documents / "out", **options).equals(found)


def test_what_is_refused_before_anything_is_scored(documents, model_dir):
    (documents / "c.txt").write_text("text")
    for file, options, message in (
        (documents / "c.txt", {"token_column": "ids"}, "c.txt' is a text file.*--token_column"),
        (documents / "a", {"token_column": "no"}, "no column 'no'"),
        (documents / "b.jsonl", {"token_column": "text"}, "a list of integers.*`--token_column`"),
        (documents / "a", {"token_column": "ids", "add_special_tokens": True}, "add_special_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            score(file, model_dir, documents / "out", **options)
        assert not [*(documents / "out").glob("part-*")]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_selected_documents_have_their_token_ids(documents, model_dir, ending):
    file = documents / "b.jsonl"
    scores = documents / "scores"
    score(file, model_dir, scores, token_column="ids")
    chosen = documents / f"chosen{ending}"
    printed = select(str(scores), where="tokens > 50", output=str(chosen))
    assert "documents" in printed
    if ending == ".jsonl":
        rows = [json.loads(line) for line in chosen.read_text().splitlines()]
    else:
        rows = pyarrow.parquet.read_table(chosen).to_pylist()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    expected = {line["id"]: line["ids"] for line in lines if len(line["ids"]) > 50}
    assert {row["key"]: row["token_ids"] for row in rows} == expected
    assert 0 < len(expected) < len(LENGTHS)
    lines[2]["ids"][3] += 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"Row 2 of 'b.jsonl' is no longer the document"):
        select(str(scores), output=str(chosen))
