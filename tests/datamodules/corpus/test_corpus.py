"""Documents of a corpus: found, shared out, read and tokenised."""

import gzip
import json
import os
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from datamodules import DocumentCorpus
from datamodules.corpus.files import CorpusColumns, CorpusFiles, Part, find_corpus
from datamodules.corpus.stream import CorpusLoader, CorpusStream
from datamodules.sources import records
from datamodules.sources.locations import RemoteFile
from lightning_modules.batch import IGNORE_INDEX, UNREADABLE, DocumentRef
from lightning_modules.scoring.token_scores import text_sha256

COLUMNS = CorpusColumns("text", None, ())


def write_parquet(path, rows, group=3, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, **columns}), path, row_group_size=group)


def write_lines(path, *records, packed=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in records)
    path.write_bytes(gzip.compress(lines) if packed else lines)


def all_of(files):
    """Every document by file and row; of a broken one the error."""
    read = chain.from_iterable(files.read(part, lambda _: True) for part in files.parts)
    return {(ref.file, ref.row): ref.error or text for ref, text in read}


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "c" / "web" / "a.parquet", [f"a b {n}" for n in range(8)])  # in groups of three rows
    write_lines(tmp_path / "c" / "b.jsonl", {"text": "a b c"}, b"  ", {"text": "b"})
    write_lines(tmp_path / "c" / "z.json.gz", {"text": "c"}, packed=True)
    (tmp_path / "c" / "t.txt").write_text("a a a")
    return tmp_path / "c"


def test_files_of_all_kinds_are_named_from_the_folder_on(folder):
    found = all_of(find_corpus([str(folder)], COLUMNS))
    assert found == {
        **{("web/a.parquet", row): f"a b {row}" for row in range(8)},
        ("b.jsonl", 0): "a b c",
        ("b.jsonl", 2): "b",
        ("z.json.gz", 0): "c",
        ("t.txt", 0): "a a a",
    }
    for pattern, names in {
        f"{folder}/**/*.parquet": {"web/a.parquet"},
        f"{folder}/web/*": {"a.parquet"},
        f"{folder}/t.txt": {"t.txt"},
    }.items():
        assert set(find_corpus([pattern], COLUMNS).files) == names
    twice = find_corpus([str(folder), f"{folder}/*.txt"], COLUMNS)
    assert len(twice.files) == 4, "a file that is named twice is there once"
    write_parquet(folder / "other" / "a.parquet", ["x"])
    with pytest.raises(ValueError, match=r"a\.parquet"):
        find_corpus([f"{folder}/web", f"{folder}/other"], COLUMNS)


def test_remote_files_are_named_in_the_same_way(folder, tmp_path):
    root = f"memory:/{tmp_path}/c"
    for path in folder.rglob("*.*"):
        with fsspec.open(f"{root}/{path.relative_to(folder)}", "wb") as stream:
            stream.write(path.read_bytes())
    local, remote = find_corpus([str(folder)], COLUMNS), find_corpus([root], COLUMNS)
    assert all(isinstance(file, RemoteFile) for file in remote.files.values())
    assert all_of(remote) == all_of(local)
    assert set(find_corpus([f"{root}/web/*.parquet"], COLUMNS).files) == {"a.parquet"}


def test_keys_and_columns(tmp_path):
    write_parquet(
        tmp_path / "p" / "a.parquet",
        ["x", "y"],
        id=[7, None],
        year=pyarrow.array([1900, 2000], pyarrow.int16()),
        meta=[{"set": "A"}, None],
    )
    files = find_corpus([str(tmp_path / "p")], CorpusColumns("text", "id", ("year", "meta.set")))
    assert files.column_types == {"year": pyarrow.int16(), "meta.set": pyarrow.string()}
    (first, text), (second, _) = files.read(files.parts[0], lambda _: True)
    assert (first, text) == (DocumentRef("7", "a.parquet", 0, {"year": 1900, "meta.set": "A"}), "x")
    assert second.key == "a.parquet:1"
    assert "no key in 'id'" in second.error
    write_lines(tmp_path / "p" / "b.jsonl", {"text": "z", "id": "q", "year": 3, "meta": {"set": ["B"]}})
    files = find_corpus([str(tmp_path / "p")], CorpusColumns("text", "id", ("year", "meta.set")))
    assert set(files.column_types.values()) == {pyarrow.string()}
    ((ref, _),) = files.read(files.parts[-1], lambda _: True)
    assert ref == DocumentRef("q", "b.jsonl", 0, {"year": "3", "meta.set": '["B"]'})


@pytest.mark.parametrize("column", ["m.n", "n"])
def test_columns_that_are_missing_or_differ_between_files_are_refused(tmp_path, column):
    write_parquet(tmp_path / "a.parquet", ["x"], n=[1])
    write_parquet(tmp_path / "b.parquet", ["x"], n=["1"])
    with pytest.raises(ValueError, match=f"'{column}'"):
        find_corpus([str(tmp_path)], CorpusColumns("text", None, (column,)))


@pytest.mark.parametrize(
    ("lines", "columns", "named"),
    [
        ([{"content": "x"}, b"{torn", {"content": "y"}], COLUMNS, "'text'"),
        ([{"text": "x", "id": 1}], CorpusColumns("text", "key", ()), "'key'"),
        ([b"[", b"1]"], COLUMNS, "malformed JSON"),
    ],
)
def test_a_file_in_which_all_documents_would_fail_is_refused_at_once(tmp_path, lines, columns, named):
    """A wrong name of a column, and not a million rows with an error."""
    for number in range(70):  # more than there are threads
        write_lines(tmp_path / f"{number:02}.jsonl", b"{torn", {"text": "x", "key": 3})
    write_lines(tmp_path / "07.jsonl", *lines)
    with pytest.raises(ValueError, match=rf"07\.jsonl.*{named}"):
        find_corpus([str(tmp_path)], columns)
    assert len(all_of(find_corpus([str(tmp_path)], columns, check=False))) == 69 * 2 + len(lines)
    write_lines(tmp_path / "07.jsonl")  # nothing fails in an empty file
    find_corpus([str(tmp_path)], columns)
    write_lines(tmp_path / "07.jsonl", *[b"{" + b"x" * 300_000] * 7, {"text": "x", "key": 3})
    assert len(all_of(find_corpus([str(tmp_path)], columns))) == 69 * 2 + 8, "one long document says nothing of others"


def test_the_text_column_of_a_parquet_file_must_be_text(tmp_path):
    write_parquet(tmp_path / "b.parquet", [1, 2])
    with pytest.raises(ValueError, match=r"b\.parquet.*data\.text_column"):
        find_corpus([str(tmp_path)], COLUMNS)
    for kind in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary("int32", "string")):
        write_parquet(tmp_path / "b.parquet", pyarrow.array(["x"], kind))
        assert all_of(find_corpus([str(tmp_path)], COLUMNS)) == {("b.parquet", 0): "x"}


def test_keys_and_columns_that_no_table_takes_are_reasons(tmp_path):
    """Half a surrogate pair, which JSON can spell, and durations that Python has not: Arrow refuses the whole shard."""
    write_lines(tmp_path / "a.jsonl", *({"text": "x", "id": key, "s": key} for key in ("fine", "\ud800")))
    for columns in (CorpusColumns("text", "id", ()), CorpusColumns("text", None, ("s",))):
        files = find_corpus([str(tmp_path)], columns)
        (fine, _), (broken, _) = files.read(files.parts[0], lambda _: True)
        assert fine.error is None
        assert "a lone surrogate" in broken.error
        assert broken.key == "a.jsonl:1"
    (tmp_path / "a.jsonl").unlink()
    write_parquet(tmp_path / "b.parquet", ["x"], long=pyarrow.array([2**62], pyarrow.duration("s")))
    files = find_corpus([str(tmp_path)], CorpusColumns("text", None, ("long",)), check=False)
    ((broken, _),) = files.read(files.parts[0], lambda _: True)
    assert "too large" in broken.error
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as stream:
        stream.write("x")
    with pytest.raises(ValueError, match="udcff"):
        find_corpus([str(tmp_path)], COLUMNS)


def test_broken_rows_have_a_reason_and_the_others_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_DOCUMENT", 40)
    lines = [{"text": "fine"}, b"{torn", {"text": 3}, {"title": "x"}, b'"text"', {"text": "b" * 200}, {"text": "last"}]
    write_lines(tmp_path / "a.jsonl", *lines)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    write_parquet(tmp_path / "c.parquet", ["fine", None, "\n"])
    found = all_of(find_corpus([str(tmp_path)], COLUMNS))
    reasons = {("a.jsonl", 1): "JSON", ("a.jsonl", 2): "int", ("a.jsonl", 3): "title", ("a.jsonl", 4): "object"}
    reasons |= {("a.jsonl", 5): "40 bytes", ("b.txt", 0): "UTF-8", ("c.parquet", 1): "'text'"}
    assert all(reason in found.pop(place) for place, reason in reasons.items())
    texts = {("a.jsonl", 0): "fine", ("a.jsonl", 6): "last", ("c.parquet", 0): "fine", ("c.parquet", 2): "\n"}
    assert found == texts


@given(st.lists(st.integers(0, 50), min_size=0, max_size=40), st.integers(1, 7), st.integers(1, 5))
@settings(max_examples=30)
def test_together_the_streams_of_all_shards_read_each_row_once(rows, streams, shard_count):
    parts = tuple(Part("a", None, number, None) for number in range(len(rows)))
    files = CorpusFiles({"a": Path("a")}, parts, COLUMNS, {})
    taken = Counter()
    for shard in range(shard_count):
        corpus = CorpusStream(files, {}, None, shard=(shard, shard_count))
        for stream in range(streams):
            for part, first, step in corpus.own_shares(stream, streams):
                taken.update((part, row) for row in range(rows[part]) if row % step == first)
    assert taken == Counter({(part, row): 1 for part, count in enumerate(rows) for row in range(count)})


def test_shards_do_not_depend_on_what_other_runs_have_done(folder, word_tokenizer):
    seen = []
    for shard in range(3):
        corpus = DocumentCorpus(str(folder), tokenizer=word_tokenizer, num_workers=0, shard=f"{shard}/3")
        done = {ref: np.array(sorted(row for name, row in seen if name == ref)) for ref, _ in seen}
        corpus.setup("predict")
        corpus.skip(done)
        batches = list(CorpusLoader(corpus.stream))
        seen += [(ref.file, ref.row) for batch in batches for ref in [*batch["document_refs"], *batch["failed"]]]
        assert corpus.scoring_settings()["shard"].startswith(f"{shard}/3 of ")
    assert sorted(seen) == sorted(all_of(find_corpus([str(folder)], COLUMNS)))


class OwnStrategy:
    """Of processes that are asked one after the other."""

    def __init__(self, decisions):
        self.decisions = iter(decisions)

    def reduce_boolean_decision(self, decision, all):
        assert all
        return decision and next(self.decisions)


def test_settings_of_the_data_module(folder, word_tokenizer):
    corpus = DocumentCorpus(str(folder / "b.jsonl"), tokenizer=word_tokenizer, num_workers=0, max_tokens=2)
    corpus.setup("predict")
    (first, second) = list(corpus.predict_dataloader())
    assert first["text"] == ["a b"]
    own = {"truncated": True, "text_hash": text_sha256("a b c"), "first_words": "a b c"}
    assert first["document_refs"] == [DocumentRef("b.jsonl:0", "b.jsonl", 0, {}, **own)]
    assert first["labels"].tolist() == [[IGNORE_INDEX, 2]]
    assert second["document_refs"][0].truncated is False
    assert corpus.stream.count_missing() is None, "lines are not counted"
    skipping = DocumentCorpus(
        [str(folder)], tokenizer=word_tokenizer, num_workers=0, max_tokens=2, overlong="skip", batch_tokens=100
    )
    skipping.setup("predict")
    (batch,) = list(skipping.predict_dataloader())
    errors = {ref.file: ref.error for ref in batch["failed"]}
    assert errors["t.txt"] == "left out: 3 tokens exceed `max_tokens` = 2"
    assert {ref.key for ref in batch["document_refs"]} == {"b.jsonl:2", "z.json.gz:0"}
    assert skipping.scoring_settings()["max_tokens"] == 2
    assert skipping.scoring_settings()["tokenizer"] == corpus.scoring_settings()["tokenizer"]


def attached(corpus, strategy=None, rank=0, world_size=1):
    """As a trainer's."""
    module = SimpleNamespace(hparams={"pretrained_model_name_or_path": corpus.tokenizer_name})
    corpus.trainer = SimpleNamespace(
        strategy=strategy, global_rank=rank, world_size=world_size, lightning_module=module
    )
    return corpus


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_document_comes_once_to_one_process(folder, word_tokenizer, world_size, workers):
    seen, expected = [], 0
    for rank in range(world_size):
        corpus = DocumentCorpus(f"{folder}/web", tokenizer=word_tokenizer, num_workers=workers)
        attached(corpus, rank=rank, world_size=world_size).setup("predict")
        expected += corpus.stream.count_missing()
        batches = list(CorpusLoader(corpus.stream, num_workers=workers))
        assert all(len(batch["document_refs"]) == 1 for batch in batches)
        seen += [ref.row for batch in batches for ref in batch["document_refs"]]
    assert sorted(seen) == list(range(8))
    assert expected == 8


def test_what_is_done_is_left_out_before_it_is_tokenised(folder, word_tokenizer, monkeypatch):
    corpus = DocumentCorpus(f"{folder}/**/*.*", tokenizer=word_tokenizer, num_workers=0)
    corpus.setup("predict")
    corpus.skip({"web/a.parquet": np.array([0, 1, 2, 4]), "b.jsonl": np.array([2]), "t.txt": np.array([0])})
    texts, opened = [], []
    read = CorpusFiles.read
    monkeypatch.setattr(CorpusFiles, "read", lambda self, part, *rest: opened.append(part) or read(self, part, *rest))
    monkeypatch.setattr(corpus.stream, "tokenize", lambda ref, text: texts.append(text) or (ref, None))
    list(CorpusLoader(corpus.stream))
    assert sorted(texts) == ["a b 3", "a b 5", "a b 6", "a b 7", "a b c", "c"]
    assert len(opened) == 4, "a row group and a text file are not opened any more"


def test_files_that_changed_or_are_gone_since_they_were_scored_are_refused(folder, word_tokenizer):
    corpus = DocumentCorpus(str(folder), tokenizer=word_tokenizer)
    corpus.setup("predict")
    corpus.check_unchanged(corpus.versions(corpus.stream.corpus.files))
    for name in ("t.txt", "gone.txt"):
        with pytest.raises(ValueError, match=name):
            corpus.check_unchanged({name: "0 0"})
    (folder / "t.txt").write_text("more")
    with pytest.raises(ValueError, match=r"t\.txt"):
        corpus.versions(["t.txt"])


def test_a_file_that_cannot_be_read_further_is_told_and_the_others_are_read(folder, word_tokenizer):
    packed = (folder / "z.json.gz").read_bytes()
    (folder / "z.json.gz").write_bytes(packed[:-9])
    corpus = DocumentCorpus(str(folder), tokenizer=word_tokenizer, num_workers=0)
    corpus.setup("predict")
    batches = list(corpus.predict_dataloader())
    seen = {ref.file for batch in batches for ref in batch["document_refs"]}
    assert seen >= {"web/a.parquet", "b.jsonl", "t.txt"}
    (unreadable,) = [ref for batch in batches for ref in batch["failed"]]
    assert (unreadable.file, unreadable.row) == ("z.json.gz", UNREADABLE)
    assert "z.json.gz: the compressed file is damaged" in unreadable.error


def test_batches_of_several_documents_waste_little(tmp_path, word_tokenizer):
    lengths = [1, 9, 2, 2, 8, 30, 1, 2]
    write_parquet(tmp_path / "a.parquet", [" ".join("a" * length) for length in lengths])
    for tokens, expected in ((9, [(4, 2), (1, 2), (1, 8), (1, 9), (1, 30)]), (18, [(5, 2), (2, 9), (1, 30)])):
        corpus = DocumentCorpus(str(tmp_path), tokenizer=word_tokenizer, num_workers=0, batch_tokens=tokens)
        corpus.setup("predict")
        batches = list(corpus.predict_dataloader())
        assert [tuple(batch["input_ids"].shape) for batch in batches] == expected
    for batch in batches:
        for ref, boundaries, text in zip(
            batch["document_refs"], batch["document_boundaries"], batch["text"], strict=True
        ):
            assert boundaries == [0, lengths[ref.row]]
            assert len(text.split()) == lengths[ref.row]


def test_processes_in_step_get_an_idle_row_until_all_are_done(folder, word_tokenizer):
    corpus = DocumentCorpus(f"{folder}/t.txt", tokenizer=word_tokenizer, num_workers=0)
    corpus.setup("predict")
    batches = list(CorpusLoader(corpus.stream, lockstep=OwnStrategy([False, False, True])))
    assert [len(batch["document_refs"]) for batch in batches] == [1, 0, 0]
    assert all(batch["failed"] == [] for batch in batches)
    assert batches[-1]["labels"].eq(IGNORE_INDEX).all()
    for strategy, waits in ((SingleDeviceStrategy(), False), (DDPStrategy(), False), (OwnStrategy([]), True)):
        attached(corpus, strategy)
        assert (corpus.predict_dataloader().lockstep is not None) == waits


@pytest.mark.parametrize(
    ("refused", "error", "named"),
    [
        (lambda folder: DocumentCorpus([]), ValueError, "`files`"),
        (lambda folder: DocumentCorpus("x", num_workers=10**6), ValueError, "`num_workers`"),
        (lambda folder: DocumentCorpus("x", shard="2/2"), ValueError, "`shard` must be I/N"),
        (lambda folder: DocumentCorpus("x", shard="1"), ValueError, "`shard` must be I/N"),
        (lambda folder: DocumentCorpus(folder).setup("fit"), ValueError, "predict"),
        (lambda folder: DocumentCorpus(folder).tokenizer, ValueError, r"data\.tokenizer"),
        (lambda folder: DocumentCorpus(f"{folder}/none").setup("predict"), FileNotFoundError, "none"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(folder, refused, error, named):
    with pytest.raises(error, match=named):
        refused(str(folder))


def test_processes_that_find_different_files_are_refused(folder, word_tokenizer, monkeypatch):
    corpus = DocumentCorpus(str(folder), tokenizer=str(word_tokenizer))
    monkeypatch.setattr("datamodules.corpus.module.gathered", lambda own: [own, "another process has other files"])
    with pytest.raises(ValueError, match="different files"):
        corpus.setup("predict")
