"""A corpus into files of scores: what is in them, and what a command does that goes on, fails, or must not begin."""

import functools
import json
import math
import os
import random
import shutil
import signal

import pyarrow
import pyarrow.parquet
import pytest
import torch

from lightning_modules.batch import pack_sequence
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring import long_context_scorer
from lightning_modules.scoring.context_lengths import ContextLengths
from lightning_modules.scoring.corpus.columns import document_scores, ladder_scores
from lightning_modules.scoring.corpus.shards import SUCCESS, ScoreShards
from lightning_modules.scoring.document_scorer import DocumentScorer
from lightning_modules.scoring.long_context_scorer import EncodedDocument, LongContextScorer
from lightning_modules.scoring.token_scores import shorten_text, text_sha256
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.files import BUILDING
from lightning_modules.utilities.locks import RunLock
from longce.corpus import reading
from longce.corpus.config import CorpusConfig
from longce.corpus.score import score_corpus
from longce.corpus.writing import Writer
from tests.conftest import make_text, tiny_model
from tests.support.corpus_runs import score_and_kill
from tests.support.forks import call
from tests.support.fragile_tokenizer import BREAKING, fragile_tokenizer

LENGTHS = [1, 30, 4, 60, 12, 45]
THRESHOLDS = {"alpha": 0.5, "beta": -6.0}


def write_documents(folder):
    rows = [{"id": f"d{n}", "text": make_text(length, n), "n": n} for n, length in enumerate(LENGTHS)]
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet", row_group_size=4)
    return folder


@pytest.fixture
def documents(tmp_path):
    return write_documents(tmp_path / "corpus")


def score(folder, documents, model_dir, files=None, **options):
    settings = {"context_length": 16, "stride": 8, "dtype": "float32", "device": "cpu", **THRESHOLDS}
    settings |= {"model": str(model_dir), "output": str(folder / "out"), "key_column": "id", "columns": ["n"]}
    return score_corpus([str(files or documents)], CorpusConfig(**{**settings, **options}))


@pytest.fixture
def run(tmp_path, documents, model_dir):
    return functools.partial(score, tmp_path, documents, model_dir)


@pytest.fixture(scope="module")
def scored(tmp_path_factory, model_dir):
    """A folder with the scores of a finished run in three files, which tests copy."""
    folder = tmp_path_factory.mktemp("scored")
    score(folder, write_documents(folder / "corpus"), model_dir, shard_rows=2)
    return folder / "out"


def rows(output):
    found = pyarrow.parquet.read_table(output, partitioning=None).to_pylist()
    return sorted(found, key=lambda row: (row["file"], row["row"]))


def success(output):
    return json.loads((output / SUCCESS).read_text())


def test_each_document_has_the_row_that_its_log_likelihoods_make(run, model_dir, tmp_path):
    run(contexts=[8, 32], per_token="float32", gamma=3.0)
    tokenizer = load_tokenizer(str(model_dir))
    backbone = LongContextScorer(str(model_dir), dtype="float32", device="cpu").document_scorer.backbone
    scorer = DocumentScorer(backbone, "", ShortContext(16, 8), ContextLengths((8, 32), 8))
    found = rows(tmp_path / "out")
    assert [row["n"] for row in found] == list(range(6))
    for number, row in enumerate(found):
        text = make_text(LENGTHS[number], number)
        with torch.no_grad():
            (scores,) = scorer.score(encode_document(text, tokenizer))
        expected = {**document_scores(scores, **THRESHOLDS, gamma=3.0), **ladder_scores(scores, (8, 32), **THRESHOLDS)}
        assert {name: row[name] for name in expected} == expected
        assert (row["key"], row["file"], row["error"], row["truncated"]) == (f"d{number}", "a.parquet", None, False)
        assert (row["first_words"], row["text_hash"]) == (shorten_text(text), text_sha256(text))
        assert row["lsd"] == [None] * min(24, row["tokens"]) + (scores.long - scores.short)[24:].tolist()
        assert row["lcl"] == [None, *scores.long[1:].tolist()]
        assert [row["token_starts"], row["token_ends"]] == scores.offsets.T.tolist()
    assert any(row["benefit_mean"] is None for row in found)
    assert any(row["ladder_8_32_mean"] is not None for row in found)
    counts = success(tmp_path / "out")
    assert (counts["documents"], counts["failed"], counts["shards"]) == (6, 0, 1)
    assert counts["too_short"] == sum(row["compared_tokens"] == 0 for row in found) > 0
    assert counts["tokens"] == sum(row["tokens"] for row in found)


def test_a_model_with_an_extended_context_scores_and_resumes(run, tmp_path):
    extension = {"method": "pi", "original_length": 4096, "target_length": 8192}
    run(context_extension=extension)
    extended = rows(tmp_path / "out")
    run(context_extension=extension)
    assert rows(tmp_path / "out") == extended
    with pytest.raises(ValueError, match=r"`model` was 'sha256:.* with pi"):
        run()
    run(output=str(tmp_path / "plain"))
    assert rows(tmp_path / "plain")[-1]["perplexity"] != extended[-1]["perplexity"]


def test_a_run_goes_on_where_another_one_ended(run, documents, tmp_path, monkeypatch):
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        with pytest.raises(RuntimeError, match="no more"):
            run(shard_rows=2)
    assert sorted(len(pyarrow.parquet.read_table(path)) for path in output.glob("*.parquet")) == [1, 2]
    assert not (output / SUCCESS).exists()
    (output / f"{BUILDING}part-00000@here-1").write_bytes(b"half a file")
    first = {row["key"]: row for row in rows(output)}
    read = []
    tokenized = lambda text, *a, **k: read.append(text) or encode_document(text, *a, **k)  # noqa: E731
    monkeypatch.setattr(long_context_scorer, "encode_document", tokenized)
    run()
    assert len(read) == 3, "scored documents are not tokenized again"
    found = rows(output)
    assert [row["key"] for row in found] == [f"d{n}" for n in range(6)]
    assert all(row == first[row["key"]] for row in found if row["key"] in first)
    assert [path.name for path in output.iterdir() if not path.name.startswith("part-")] == [SUCCESS]
    # More files can come later, with columns of the same types.
    (documents / "b.jsonl").write_text(json.dumps({"id": "d5", "text": "more", "n": 9}))
    with pytest.raises(ValueError, match="`columns`"):
        run()
    (documents / "b.jsonl").unlink()
    more = pyarrow.Table.from_pylist([{"id": "d5", "text": make_text(9), "n": 6}])
    pyarrow.parquet.write_table(more, documents / "b.parquet")
    for _ in range(2):  # in the second one nothing is left to do
        run()
        assert (len(rows(output)), success(output)["documents"]) == (7, 7)
    run(files=documents / "b.parquet")
    assert success(output)["documents"] == 7, "the scores of other files stay"


def stop_after(count, monkeypatch, action=None):
    """Let the scorer do something, by default fail, after this number of documents."""
    plain, calls = LongContextScorer.score_encoded, []

    def fail():
        raise RuntimeError("no more")

    def counting(self, documents):
        if len(calls) == count:
            (action or fail)()
        calls.append(1)
        return plain(self, documents)

    monkeypatch.setattr(LongContextScorer, "score_encoded", counting)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"context_length": 17}, "`context_length`"),
        ({"contexts": [8]}, "`contexts`"),
        ({"attn_implementation": "eager"}, "`attention`"),
        ({"dtype": "float64"}, "`dtype`"),
        ({"alpha": 1.0}, "`alpha`"),
        ({"per_token": "float16"}, "`per_token`"),
        ({"max_tokens": 9}, "`max_tokens`"),
        ({"add_special_tokens": True}, "`add_special_tokens`"),
        ({"columns": []}, "`columns`"),
        ({"shard": "0/2"}, "`shard`"),
    ],
)
def test_scores_of_other_settings_are_not_mixed(run, scored, tmp_path, options, named):
    shutil.copytree(scored, tmp_path / "out")
    with pytest.raises(ValueError, match=named):
        run(**options)
    assert success(tmp_path / "out")["documents"] == 6, "a refused command changes nothing"


def test_scores_of_another_model_are_not_mixed(run, scored, tmp_path, model_dir):
    shutil.copytree(scored, tmp_path / "out")
    other = shutil.copytree(model_dir, tmp_path / "model")
    tiny_model("llama", len(load_tokenizer(str(model_dir))), seed=9).save_pretrained(other)
    with pytest.raises(ValueError, match="`model`"):
        run(model=str(other))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "copied", "foreign"])
def test_a_repeated_run_notices_that_files_of_scores_have_changed(run, scored, tmp_path, damage):
    folder = shutil.copytree(scored, tmp_path / "out")
    shards = sorted(folder.glob("part-*.parquet"))
    content = bytearray(shards[1].read_bytes())
    if damage == "truncated":
        shards[1].write_bytes(content[:-9])
    elif damage == "flipped":  # the footer stays as it was
        content[8 : len(content) * 2 // 3 : 16] = bytes(len(range(8, len(content) * 2 // 3, 16)))
        shards[1].write_bytes(content)
    elif damage == "copied":
        shutil.copy(shards[1], folder / "part-x.parquet")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"file": ["a"], "row": [1]}), shards[1])
    with pytest.raises(ValueError, match="part-x" if damage == "copied" else shards[1].stem):
        run()


def test_documents_of_a_file_that_is_deleted_are_scored_again(run, scored, tmp_path):
    folder = shutil.copytree(scored, tmp_path / "out")
    next(folder.glob("part-*.parquet")).unlink()
    run()
    assert rows(folder) == rows(scored)


def test_documents_that_fail_do_not_stop_the_others(run, documents, tmp_path, monkeypatch):
    (documents / "b.jsonl").write_text('{"id": "x", "text": "fine"}\n{broken\n{"id": "y", "text": " "}\n')
    longest = max(len(make_text(length, n)) for n, length in enumerate(LENGTHS))
    forward = Backbone.forward

    def too_large(self, batch, *arguments, **settings):
        if batch["input_ids"].shape[1] > longest / 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, batch, *arguments, **settings)

    monkeypatch.setattr(Backbone, "forward", too_large)
    assert "9 documents with" in run(allowed_failures=1.0)
    found = {(row["file"], row["row"]): row for row in rows(tmp_path / "out")}
    failed = {place: row["error"] for place, row in found.items() if row["error"]}
    assert "out of memory" in failed.pop(("a.parquet", 3))
    assert "malformed JSON" in failed.pop(("b.jsonl", 1))
    assert "is empty or only white space" in failed.pop(("b.jsonl", 2))
    assert set(failed) <= {("a.parquet", 5), ("a.parquet", 1)}
    assert len(found) == 9
    assert all((row["tokens"] is None) == (row["error"] is not None) for row in found.values())
    counts = success(tmp_path / "out")
    assert (counts["failed"], counts["left_out"]) == (2 + len(failed), 1)


def test_a_document_that_breaks_the_tokenizer_does_not_stop_a_corpus(run, tmp_path, model_dir):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"a": "a b c", "b": BREAKING, "c": "c d"}.items():
        (folder / f"{name}.txt").write_text(text)
    fragile = fragile_tokenizer()
    model = tmp_path / "model"
    tiny_model("llama", len(fragile), seed=1).save_pretrained(model)
    fragile.save_pretrained(model)
    run(files=folder, model=str(model), columns=[], allowed_failures=1.0)
    failed = {row["file"]: row["error"] for row in rows(tmp_path / "out") if row["error"]}
    assert list(failed) == ["b.txt"]
    assert "fails on" in failed["b.txt"]


def test_a_source_of_which_too_many_documents_fail_ends_in_a_report(run, documents, tmp_path):
    """The others are scored, the failures of earlier runs count, and the same command can accept them."""
    (documents / "a.parquet").unlink()
    lines = [{"id": f"j{n}", "text": "ba ce di"} for n in range(6)] + [{"id": f"k{n}", "body": "x"} for n in range(2)]
    (documents / "b.jsonl").write_text("\n".join([*map(json.dumps, lines), "{broken", '{"id": "e", "text": 3}']))
    for folder, texts in (("books", ["ba ce"] * 3 + ["\udcff"]), ("fine", ["ba"])):
        (documents / folder).mkdir()
        for number, text in enumerate(texts):
            (documents / folder / f"{number}.txt").write_text(text, errors="surrogateescape")
    report = r"(?s)`allowed_failures` = 0\.2 .*b\.jsonl: 4 of 10 .*row 6 .*'body'.*books: 1 of 4 "
    for _ in range(2):  # nothing is scored in the second run, which fails all the same
        with pytest.raises(IncompleteError, match=report):
            run(allowed_failures=0.2, columns=[])
        assert len(rows(tmp_path / "out")) == 10 + 4 + 1
        assert not (tmp_path / "out" / SUCCESS).exists()
    run(allowed_failures=0.4, columns=[])  # as many as are allowed
    assert (success(tmp_path / "out")["failed"], success(tmp_path / "out")["documents"]) == (5, 15)


def test_documents_that_are_left_out_on_purpose_do_not_count_as_failed(run, tmp_path):
    run(max_tokens=40, overlong="skip", allowed_failures=0.0)
    left_out = [row for row in rows(tmp_path / "out") if row["error"]]
    assert len(left_out) > 1
    assert all("tokens exceed `max_tokens` = 40" in row["error"] for row in left_out)
    counts = success(tmp_path / "out")
    assert (counts["documents"], counts["failed"], counts["left_out"]) == (6, 0, len(left_out))


def test_a_damaged_file_ends_in_an_error_when_all_else_is_done(run, documents, tmp_path):
    content = (documents / "a.parquet").read_bytes()
    pages = pyarrow.parquet.ParquetFile(documents / "a.parquet").metadata.row_group(1).column(1).data_page_offset
    (documents / "a.parquet").write_bytes(content[:pages] + bytes(60) + content[pages + 60 :])
    with pytest.raises(ValueError, match=r"a\.parquet"):
        run()
    assert [row["row"] for row in rows(tmp_path / "out")] == [0, 1, 2, 3]
    assert not (tmp_path / "out" / SUCCESS).exists()
    (documents / "a.parquet").write_bytes(content)
    run()
    assert success(tmp_path / "out")["documents"] == 6, "the documents that were scored are the same"


@pytest.mark.parametrize(
    "attack", ["edit", "edit while it is scored", "touch", "touch while it is scored", "copy", "append"]
)
def test_scores_belong_to_the_content_of_documents(run, tmp_path, monkeypatch, attack):
    file = tmp_path / "lines" / "b.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"id": n, "text": make_text(30, n), "n": n}) + "\n" for n in range(2)))
    other = {"id": "other", "text": make_text(20), "n": float("nan")}
    (file.parent / "a.jsonl").write_text(json.dumps(other))
    before = file.stat()

    def edit():
        file.write_bytes(file.read_bytes().replace(b"ba", b"bo", 1))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    if attack == "edit while it is scored":
        stop_after(2, monkeypatch, edit)
        with pytest.raises(ValueError, match=r"b\.jsonl"):
            run(files=file.parent)
        assert [row["file"] for row in rows(tmp_path / "out")] == ["a.jsonl"], "the scores of other files are kept"
        return
    if attack == "touch while it is scored":
        stop_after(2, monkeypatch, lambda: os.utime(file, (1, 1)))
    run(files=file.parent)
    if attack == "edit":
        edit()
        with pytest.raises(ValueError, match=r"b\.jsonl"):
            run(files=file.parent)
        return
    if attack == "touch":
        os.utime(file, (1, 1))
    elif attack == "copy":
        shutil.copyfile(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file)
    elif attack == "append":
        with file.open("a") as stream:
            stream.write('{"id": 2, "text": "ba ce", "n": 2}\n')
    run(files=file.parent)
    assert success(tmp_path / "out")["documents"] == (4 if attack == "append" else 3)


def test_a_model_that_changes_while_it_is_loaded_is_refused(run, tmp_path, model_dir, monkeypatch):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    load = long_context_scorer.load_scorer

    def exported_meanwhile(*arguments):
        scorer = load(*arguments)
        tiny_model("llama", scorer.base_model.config.vocab_size, seed=9).save_pretrained(folder)
        return scorer

    monkeypatch.setattr(long_context_scorer, "load_scorer", exported_meanwhile)
    with pytest.raises(ValueError, match="changed"):
        run(model=str(folder))
    assert not ScoreShards(str(tmp_path / "out")).names()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["while a document is scored", "while rows are added", "while they are written"])
def test_a_signal_stops_at_once_and_keeps_the_finished_documents(run, tmp_path, monkeypatch, number, where):
    before = signal.getsignal(number)

    def send():
        for each in (number, signal.SIGTERM, signal.SIGINT):  # no second one ends the writing
            os.kill(os.getpid(), each)

    with monkeypatch.context() as patch:
        if where == "while a document is scored":
            stop_after(3, patch, send)
        else:
            places = {"while they are written": (ScoreShards, "write"), "while rows are added": (Writer, "add")}
            owner, name = places[where]
            plain, calls = getattr(owner, name), []

            def interrupted(*arguments):
                calls.append(1)
                if len(calls) == 3:
                    send()
                return plain(*arguments)

            patch.setattr(owner, name, interrupted)
        with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt) as stopped:
            run(shard_rows=1)
    if number == signal.SIGTERM:
        assert stopped.value.code == 128 + signal.SIGTERM
    assert len(rows(tmp_path / "out")) == (2 if where == "while rows are added" else 3)
    assert signal.getsignal(number) == before
    run()
    assert success(tmp_path / "out")["documents"] == 6


def test_shards_have_folders_of_their_own_and_together_all_documents(run, scored, tmp_path):
    for shard in range(3):
        run(shard=f"{shard}/3")
    folders = sorted((tmp_path / "out").iterdir())
    assert [folder.name for folder in folders] == [f"shard-{shard:05d}-of-00003" for shard in range(3)]
    assert [success(folder)["documents"] for folder in folders] == [3, 1, 2]
    assert rows(tmp_path / "out") == rows(scored)
    (tmp_path / "corpus" / "a.parquet").rename(tmp_path / "corpus" / "b.parquet")
    with pytest.raises(ValueError, match="`shard`"):
        run(shard="0/3")
    (tmp_path / "corpus" / "b.parquet").rename(tmp_path / "corpus" / "a.parquet")
    for shard in ("0/1", "0/2"):
        with pytest.raises(ValueError, match=r"scores in 3 shard\(s\)"):
            run(shard=shard)
    run(shard="5/9", output=str(tmp_path / "many"))
    assert success(tmp_path / "many" / "shard-00005-of-00009")["documents"] == 1
    run(shard="7/9", output=str(tmp_path / "many"))
    assert success(tmp_path / "many" / "shard-00007-of-00009")["documents"] == 0


def test_processes_of_torchrun_score_shards(monkeypatch):
    assert CorpusConfig(model="m", output="o").shard == "0/1"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert CorpusConfig(model="m", output="o").shard == "3/8"
    assert CorpusConfig(model="m", output="o", shard="0/1").shard == "0/1"


def test_a_folder_has_one_writer(run, tmp_path):
    (tmp_path / "out").mkdir()
    lock = RunLock(tmp_path / "out")
    lock.begin()
    try:
        with pytest.raises(ValueError, match="is in use"):
            run()
    finally:
        lock.leave()
    run()


def test_scores_behind_an_address(run, scored, tmp_path, monkeypatch):
    place = f"memory:/{tmp_path}/out"
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(RuntimeError, match="no more"):
            run(output=place)
    run(output=place)
    shards = ScoreShards(place)
    found = pyarrow.concat_tables([table for _, _, table in shards.read(["row", "longppl"])]).sort_by("row")
    assert found["longppl"].to_pylist() == [row["longppl"] for row in rows(scored)]
    assert SUCCESS in shards.entries()


def test_batches_of_short_documents_are_nearly_full_and_hardly_padded():
    generator = random.Random(0)
    lengths = [round(math.exp(generator.uniform(math.log(100), math.log(2000)))) for _ in range(3000)]
    documents = [(None, EncodedDocument(pack_sequence([torch.zeros(length, dtype=torch.int64)]))) for length in lengths]
    scorer = LongContextScorer("a model that is not loaded", batch_tokens=32_768)
    batches = []
    for pool in reading.pools(iter(documents), 32_768, 1000):
        assert len(pool) <= 1000
        of_pool = [document for _, document in pool]
        groups = scorer.group_by_length(of_pool)
        batches += [[of_pool[place].tokens for place in group] for group in groups]
    padded = [max(batch) * len(batch) for batch in batches]
    assert max(padded) <= 32_768
    assert sum(padded) < 1.08 * sum(lengths)
    assert len(batches) < 1.2 * sum(padded) / 32_768


def test_documents_that_are_batched_have_nearly_the_same_scores(run, scored, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:  # stopped after three batches of a pool, whose scores are kept
        stop_after(3, patch)
        with pytest.raises(RuntimeError, match="no more"):
            run(batch_tokens=200)
    kept = len(rows(tmp_path / "out"))
    assert 3 <= kept < len(rows(scored))
    run(batch_tokens=200)
    for found, expected in zip(rows(tmp_path / "out"), rows(scored), strict=True):
        numbers = {name: value for name, value in expected.items() if isinstance(value, float)}
        assert {name: found[name] for name in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-5)
        assert found["key_tokens"] == expected["key_tokens"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"columns": ["tokens"]}, r"`columns`.*'tokens'"),
        ({"columns": ["n", "N"]}, r"`columns`.*'N'"),
        ({"columns": ["Tokens"]}, r"`columns`.*'Tokens'"),
        ({"output": "corpus/scores"}, "`output`.*corpus"),
        ({"output": "file/out"}, "file/out"),
        ({"alpha": -1.0}, "alpha"),
        ({"stride": 0}, "stride"),
        ({"contexts": [16, 8]}, "`contexts`"),
        ({"shard": "2/2"}, "`shard` must be I/N"),
        ({"shard": "1"}, "`shard` must be I/N"),
        ({"model": "http://127.0.0.1:1"}, "`tokenizer`"),
        ({"text_column": "body"}, "'body'"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_the_model_is_loaded(
    run, documents, tmp_path, monkeypatch, options, named
):
    table = pyarrow.parquet.read_table(documents / "a.parquet")
    pyarrow.parquet.write_table(table.append_column("tokens", table["n"]), documents / "a.parquet")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(long_context_scorer, "load_scorer", lambda *_: pytest.fail("the model is loaded"))
    with pytest.raises(ValueError, match=named):
        run(**options)


def check_outcome(found, kills):
    assert found["documents"] == 61
    assert len(found["errors"]) == 3
    assert found["shards"] == found["killed"] == 0.0
    assert 0 < found["batches"] < 1e-4
    assert len(found["killed at"]) == kills
    assert 0 < found["killed at"][-1] < 61
    assert (found["success"]["documents"], found["success"]["failed"], found["success"]["left_out"]) == (61, 2, 1)


@pytest.mark.slow
def test_the_same_rows_in_shards_and_after_kills(tmp_path):
    """One process and two shards, one document at a time and several; SIGKILL on the way."""
    check_outcome(call(score_and_kill, tmp_path, 2), 2)


@pytest.mark.long
@pytest.mark.slow
def test_the_same_rows_after_many_kills(record_property, tmp_path):
    found = call(score_and_kill, tmp_path, 5)
    record_property("documents at the kills", found["killed at"])
    check_outcome(found, 5)
