"""A corpus into shards: what is in them, and what a run does that goes on, fails, or must not begin."""

import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks import DocumentScoresWriter, TokenScoresWriter
from callbacks.document_scores_writer import _checkpoint_identity
from datamodules import DocumentCorpus, TextDataModule
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models import progress as model_progress
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.context_lengths import ContextLadder
from lightning_modules.scoring.corpus.columns import document_scores, ladder_scores
from lightning_modules.scoring.corpus.shards import SUCCESS, ScoreShards
from lightning_modules.scoring.corpus.table import ScoreTable
from lightning_modules.scoring.document_scorer import DocumentScorer
from lightning_modules.scoring.token_scores import shorten_text, text_sha256
from lightning_modules.training.preemption import EvaluationStop, StopSignal
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.files import BUILDING
from tests.conftest import make_text, tiny_model
from tests.support.bars import replace_bars
from tests.support.trainers import quiet_trainer

ROOT = Path(__file__).parents[2]
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


def predict(folder, documents, model_dir, output=None, callbacks=None, trainer=(), data=(), model=(), writer=()):
    writers = [DocumentScoresWriter(str(output or folder / "out"), **{**THRESHOLDS, **dict(writer)})]
    settings = {"pretrained_model_name_or_path": str(model_dir), "context_length": 16, "stride": 8, **dict(model)}
    module = LongContextLM(**settings)
    settings = {"files": str(documents), "key_column": "id", "columns": ["n"], "num_workers": 0, **dict(data)}
    one = quiet_trainer(folder, *(writers if callbacks is None else callbacks), **dict(trainer))
    one.predict(module, datamodule=DocumentCorpus(**settings), return_predictions=False)
    return module


@pytest.fixture
def run(tmp_path, documents, model_dir):
    return functools.partial(predict, tmp_path, documents, model_dir)


@pytest.fixture(scope="module")
def scored(tmp_path_factory, model_dir):
    """A folder with the scores of a finished run in three shards, which tests copy."""
    folder = tmp_path_factory.mktemp("scored")
    predict(folder, write_documents(folder / "corpus"), model_dir, writer={"shard_rows": 2})
    return folder / "out"


def rows(output):
    found = pyarrow.parquet.read_table(output).to_pylist()
    return sorted(found, key=lambda row: (row["file"], row["row"]))


def success(output):
    return json.loads((output / SUCCESS).read_text())


def test_each_document_has_the_row_that_its_log_likelihoods_make(run, model_dir, tmp_path):
    module = run(model={"ladder": ContextLadder([8, 32], window=8)}, writer={"per_token": "float32", "gamma": 3.0})
    tokenizer = load_tokenizer(str(model_dir))
    scorer = DocumentScorer(module.backbone, "", 16, 8, module.document_scorer().context_lengths)
    found = rows(tmp_path / "out")
    assert [row["n"] for row in found] == list(range(6))
    for number, row in enumerate(found):
        text = make_text(LENGTHS[number], number)
        with torch.no_grad():
            (scores,) = scorer.score(encode_document(text, tokenizer))
        expected = {**document_scores(scores, **THRESHOLDS, gamma=3.0), **ladder_scores(scores, (8, 32), **THRESHOLDS)}
        assert {name: row[name] for name in expected} == expected
        assert (row["key"], row["file"], row["error"], row["truncated"]) == (f"d{number}", "a.parquet", None, False)
        assert row["first_words"] == shorten_text(text)
        assert row["lsd"] == [None] * min(24, row["tokens"]) + (scores.long - scores.short)[24:].tolist()
        assert row["lcl"] == [None, *scores.long[1:].tolist()]
        assert sum(value is not None for value in row["lsd"]) == row["compared_tokens"]
        assert [row["token_starts"], row["token_ends"]] == scores.offsets.T.tolist()
    assert any(row["benefit_mean"] is None for row in found)
    assert any(row["ladder_8_32_mean"] is not None for row in found)
    counts = success(tmp_path / "out")
    assert (counts["documents"], counts["failed"], counts["shards"]) == (6, 0, 1)
    assert counts["too_short"] == sum(row["compared_tokens"] == 0 for row in found) > 0
    assert counts["tokens"] == sum(row["tokens"] for row in found)


@pytest.mark.parametrize("damage", ["deleted", "truncated", "renamed", "copied", "changed", "unlisted"])
def test_a_repeated_run_notices_that_shards_have_changed(run, scored, tmp_path, damage):
    folder = shutil.copytree(scored, tmp_path / "out")
    shards = sorted(folder.glob("part-*.parquet"))
    if damage == "deleted":
        shards[1].unlink()
    elif damage == "truncated":
        shards[1].write_bytes(shards[1].read_bytes()[:-9])
    elif damage == "renamed":
        shards[1].rename(folder / "part-00009-x.parquet")
    elif damage == "copied":
        shutil.copy(shards[1], folder / "part-00009-x.parquet")
    elif damage == "changed":
        table = pyarrow.parquet.read_table(shards[1])
        pyarrow.parquet.write_table(table.set_column(0, "key", table["key"]).slice(0, 1), shards[1])
    else:
        listed = success(folder)
        listed["shard_bytes"].pop(shards[1].name)
        (folder / SUCCESS).write_text(json.dumps(listed))
    with pytest.raises(ValueError, match="part-00009-x" if damage == "copied" else shards[1].stem):
        ScoreShards(str(folder)).check_success()
    if damage in ("deleted", "unlisted"):
        with pytest.warns(UserWarning, match="out' has changed"):
            run(writer={"shard_rows": 2})
        assert len(rows(folder)) == 6
        ScoreShards(str(folder)).check_success()


def test_scores_whose_shards_are_not_listed_are_refused(scored, tmp_path):
    folder = shutil.copytree(scored, tmp_path / "out")
    listed = {name: value for name, value in success(folder).items() if name != "shard_bytes"}
    (folder / SUCCESS).write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=r"_SUCCESS\.json' is damaged"):
        ScoreShards(str(folder)).check_success()


@pytest.mark.slow
def test_a_run_goes_on_where_another_one_ended(run, documents, tmp_path):
    output = tmp_path / "out"
    run(trainer={"limit_predict_batches": 3}, writer={"shard_rows": 2})
    assert sorted(len(pyarrow.parquet.read_table(path)) for path in output.glob("*.parquet")) == [1, 2]
    assert not (output / SUCCESS).exists()
    first = {row["key"]: row for row in rows(output)}
    with pytest.MonkeyPatch.context() as patch:
        read = []
        tokenised = lambda text, *a, **k: read.append(text) or encode_document(text, *a, **k)  # noqa: E731
        patch.setattr("datamodules.packing.evaluation_documents.encode_document", tokenised)
        run()
    assert len(read) == 3
    found = rows(output)
    assert [row["key"] for row in found] == [f"d{n}" for n in range(6)]
    assert all(row == first[row["key"]] for row in found if row["key"] in first)
    (documents / "b.jsonl").write_text(json.dumps({"id": "d5", "text": "more", "n": 9}))
    with pytest.raises(ValueError, match="`columns`"):
        run()
    (documents / "b.jsonl").unlink()
    more = pyarrow.Table.from_pylist([{"id": "d5", "text": make_text(9), "n": 6}])
    pyarrow.parquet.write_table(more, documents / "b.parquet")
    for _ in range(2):  # in the second one nothing is left to do
        run()
        counts = success(output)
        assert (len(rows(output)), counts["documents"]) == (7, 7)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model": {"context_length": 17}}, "`context_length`"),
        ({"model": {"ladder": ContextLadder([8])}}, "`ladder`"),
        ({"model": {"attn_implementation": "eager"}}, "`attention`"),
        ({"writer": {"alpha": 1.0}}, "`alpha`"),
        ({"writer": {"per_token": "float16"}}, "`per_token`"),
        ({"data": {"max_tokens": 9}}, "`max_tokens`"),
        ({"data": {"columns": []}}, "`columns`"),
    ],
)
def test_scores_of_other_settings_are_not_mixed(run, scored, tmp_path, settings, named):
    shutil.copytree(scored, tmp_path / "out")
    with pytest.raises(ValueError, match=named):
        run(**settings)


def test_documents_that_fail_do_not_stop_the_others(run, documents, tmp_path, monkeypatch, caplog):
    (documents / "b.jsonl").write_text('{"id": "x", "text": "fine"}\n{broken\n{"id": "y", "text": " "}\n')
    longest = max(len(make_text(length, n)) for n, length in enumerate(LENGTHS))
    score = Backbone.forward

    def too_large(self, batch, *arguments, **settings):
        if batch["input_ids"].shape[1] > longest / 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(self, batch, *arguments, **settings)

    monkeypatch.setattr(Backbone, "forward", too_large)
    caplog.set_level(logging.INFO)
    run(data={"allowed_failures": 1.0})
    assert "9 documents with" in caplog.text
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


def test_a_source_of_which_too_many_documents_fail_ends_in_a_report(run, documents, tmp_path):
    """The others are scored, the failures of earlier runs count, and the same command can accept them."""
    (documents / "a.parquet").unlink()
    lines = [{"id": f"j{n}", "text": "ba ce di"} for n in range(6)] + [{"id": f"k{n}", "body": "x"} for n in range(2)]
    (documents / "b.jsonl").write_text("\n".join([*map(json.dumps, lines), "{broken", '{"id": "e", "text": 3}']))
    for folder, texts in (("books", ["ba ce"] * 3 + ["\udcff"]), ("fine", ["ba"])):
        (documents / folder).mkdir()
        for number, text in enumerate(texts):
            (documents / folder / f"{number}.txt").write_text(text, errors="surrogateescape")
    report = r"(?s)`data\.allowed_failures` = 0\.2 .*b\.jsonl: 4 of 10 .*row 6 .*'body'.*books: 1 of 4 "
    for _ in range(2):  # nothing is scored in the second run, which fails all the same
        with pytest.raises(IncompleteError, match=report):
            run(data={"allowed_failures": 0.2, "columns": []})
        assert len(rows(tmp_path / "out")) == 10 + 4 + 1
        assert not (tmp_path / "out" / SUCCESS).exists()
    run(data={"allowed_failures": 0.4, "columns": []})  # as many as are allowed
    assert (success(tmp_path / "out")["failed"], success(tmp_path / "out")["documents"]) == (5, 15)


def test_documents_that_are_left_out_on_purpose_do_not_count_as_failed(run, tmp_path):
    run(data={"max_tokens": 40, "overlong": "skip", "allowed_failures": 0.0})
    left_out = [row for row in rows(tmp_path / "out") if row["error"]]
    assert len(left_out) > 1
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
    with pytest.raises(ValueError, match=r"a\.parquet"):
        run()
    for shard in (tmp_path / "out").glob("part-*.parquet"):
        if "a.parquet" in pyarrow.parquet.read_table(shard)["file"].to_pylist():
            shard.unlink()
    run()
    assert success(tmp_path / "out")["documents"] == 6


@pytest.mark.parametrize("attack", ["edit", "edit while it is scored", "touch", "copy"])
def test_scores_belong_to_the_content_of_files(run, tmp_path, monkeypatch, attack):
    file = tmp_path / "lines" / "b.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"id": n, "text": make_text(30, n), "n": n}) + "\n" for n in range(2)))
    before = file.stat()

    def edit():
        file.write_bytes(file.read_bytes().replace(b'"n": 1', b'"n": 7'))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    settings = {"data": {"files": str(file.parent)}}
    if attack == "edit while it is scored":
        end = DocumentScoresWriter.on_predict_end
        monkeypatch.setattr(DocumentScoresWriter, "on_predict_end", lambda *args: (edit(), end(*args)))
        with pytest.raises(ValueError, match=r"b\.jsonl"):
            run(**settings)
        assert not ScoreShards(str(tmp_path / "out")).sizes()
        return
    run(**settings)
    if attack == "edit":
        edit()
        with pytest.raises(ValueError, match=r"b\.jsonl"):
            run(**settings)
    else:
        shutil.copyfile(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file) if attack == "copy" else os.utime(file, (1, 1))
        run(**settings)
        assert success(tmp_path / "out")["documents"] == 2


def test_scores_belong_to_the_content_of_the_checkpoint_and_of_a_bare_config(tmp_path, model_dir):
    checkpoints, models = [], []
    config = (model_dir / "config.json").read_text()
    for name, content in (("a", "1e-06"), ("copy/a", "1e-06"), ("other/a", "1e-02")):
        path = tmp_path / name / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(config.replace("1e-06", content))
        os.utime(path, (1, 1))
        checkpoints.append(_checkpoint_identity(SimpleNamespace(ckpt_path=str(path))))
        models.append(LongContextLM(str(path), context_length=16, stride=8).scoring_settings()["model"])
    for found in (checkpoints, models):
        assert found[0] == found[1] != found[2]


def test_a_model_that_changes_while_it_is_loaded_is_refused(run, tmp_path, model_dir, monkeypatch):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    load = LongContextLM.configure_model

    def exported_meanwhile(self):
        load(self)
        tiny_model("llama", self.backbone.base_model.config.vocab_size, seed=9).save_pretrained(folder)

    monkeypatch.setattr(LongContextLM, "configure_model", exported_meanwhile)
    with pytest.raises(ValueError, match="changed"):
        run(model={"pretrained_model_name_or_path": str(folder)})
    assert not ScoreShards(str(tmp_path / "out")).sizes()


def test_what_is_scored_is_kept_when_a_run_is_stopped(run, tmp_path, monkeypatch):
    add, count = DocumentScoresWriter.on_predict_batch_end, []

    def interrupted(*arguments, **settings):
        add(*arguments, **settings)
        count.append(1)
        if len(count) == 4:
            raise RuntimeError("no more")

    monkeypatch.setattr(DocumentScoresWriter, "on_predict_batch_end", interrupted)
    with pytest.raises(RuntimeError, match="no more"):
        run(writer={"shard_minutes": 1e-9})
    assert [len(pyarrow.parquet.read_table(path)) for path in (tmp_path / "out").glob("*.parquet")] == [1] * 4
    (tmp_path / "out" / f"{BUILDING}part-00000@here-1").write_bytes(b"half a shard")
    assert not (tmp_path / "out" / SUCCESS).exists()
    run()
    assert success(tmp_path / "out")["documents"] == 6
    others = [path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("part-")]
    assert sorted(others) == [SUCCESS]


def test_a_shard_that_is_gone_at_the_end_is_noticed(run, tmp_path, monkeypatch):
    """As if another process had written it to a disk of its own."""
    finish = DocumentScoresWriter._write_success

    def lose_a_shard(*arguments, **settings):
        next((tmp_path / "out").glob("*.parquet")).unlink()
        return finish(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(DocumentScoresWriter, "_write_success", lose_a_shard)
        with pytest.raises(ValueError, match="5 documents instead of the 6"):
            run(writer={"shard_rows": 1})
    assert not (tmp_path / "out" / SUCCESS).exists()
    run()
    assert success(tmp_path / "out")["documents"] == 6


@pytest.mark.parametrize("where", ["predict_step", "on_predict_batch_end"])
def test_sigterm_stops_in_seconds_and_keeps_the_finished_documents(run, tmp_path, monkeypatch, capfd, where):
    owner = LongContextLM if where == "predict_step" else ScoreTable
    method, calls = ("predict_step" if where == "predict_step" else "add"), []
    plain, handler = getattr(owner, method), signal.getsignal(signal.SIGTERM)

    def warned(*arguments, **settings):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments, **settings)

    writer = DocumentScoresWriter(str(tmp_path / "out"), **THRESHOLDS)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, warned)
        with pytest.raises(SIGTERMException):
            run(callbacks=[EvaluationStop(StopSignal()), writer])
    kept = 2 if where == "predict_step" else 3  # a row that is added is not left half done
    assert len(rows(tmp_path / "out")) == kept
    assert "SIGTERM: stopping" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == handler
    run()
    assert success(tmp_path / "out")["documents"] == 6


def test_shards_behind_an_address(run, tmp_path):
    place = f"memory:/{tmp_path}/out"
    run(output=place, trainer={"limit_predict_batches": 2})
    run(output=place)
    shards = ScoreShards(place)
    assert shards.existing_scores().rows["a.parquet"].tolist() == list(range(6))
    assert shards.check_success()


def test_what_cannot_be_written_or_goes_with_other_data(run, documents, tmp_path, model_dir):
    table = pyarrow.parquet.read_table(documents / "a.parquet")
    pyarrow.parquet.write_table(table.append_column("tokens", table["n"]), documents / "a.parquet")
    (tmp_path / "file").write_text("")
    (tmp_path / "a.txt").write_text("a text")
    texts = TextDataModule(str(model_dir), test=str(tmp_path / "a.txt"))
    writer = quiet_trainer(tmp_path, DocumentScoresWriter("x"))
    for refused, named in (
        (lambda: run(data={"columns": ["tokens"]}), r"`data\.columns`.*'tokens'"),
        (lambda: run(output=tmp_path / "file" / "out"), "file/out"),
        (lambda: DocumentScoresWriter("x", alpha=-1), "alpha"),
        (lambda: writer.predict(LongContextLM(str(model_dir)), datamodule=texts), "TextDataModule"),
    ):
        with pytest.raises(ValueError, match=named):
            refused()


def test_the_pairs_of_a_corpus_become_files_too(run, documents, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(
        Backbone, "check_length", lambda self, n: (_ for _ in ()).throw(ValueError("long")) if n > 99 else None
    )
    (documents / "b.jsonl").write_text('{"id": "x", "text": "ba"}\n{"id": "y", "text": ""}')
    run(callbacks=[TokenScoresWriter(str(tmp_path / "pairs"))], data={"columns": []})
    texts = ["ba", *(make_text(length, n) for n, length in enumerate(LENGTHS))]
    written = {path.stem for path in (tmp_path / "pairs").iterdir()}
    assert 1 < len(written) < 7
    assert written < {text_sha256(text) for text in texts}
    assert "has no scores: long" in caplog.text
    assert "'y' has no scores: left out: the text is empty" in caplog.text


def outcome(kills):
    command = [sys.executable, "-m", "tests.support.corpus_runs", str(kills)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])


def check_outcome(found, kills):
    assert found["documents"] == 61
    assert len(found["errors"]) == 3
    assert found["two processes"] == found["fsdp"] == found["shards"] == found["killed"] == 0.0
    assert 0 < found["batches"] < 1e-4
    assert len(found["killed at"]) == kills
    assert 0 < found["killed at"][-1] < 61
    assert (found["success"]["documents"], found["success"]["failed"], found["success"]["left_out"]) == (61, 2, 1)


@pytest.mark.slow
def test_the_same_rows_by_several_processes_and_after_kills():
    """One process and two, DDP and FSDP2, one document at a time and several; SIGKILL on the way."""
    check_outcome(outcome(2), 2)


@pytest.mark.long
@pytest.mark.slow
def test_the_same_rows_after_many_kills(record_property):
    found = outcome(5)
    record_property("documents at the kills", found["killed at"])
    check_outcome(found, 5)


def test_a_batch_on_a_cpu_shows_its_tokens_also_if_it_fails(run, monkeypatch):
    bars = replace_bars(monkeypatch, model_progress)
    run()
    assert {bar.name for bar in bars} == {"this batch"}
    assert all(bar.seen[-1] == "closed" for bar in bars)
    assert sum(bar.n for bar in bars) >= sum(LENGTHS)
    bars.clear()
    monkeypatch.setattr(LongContextLM, "predict_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(output="again")
    assert bars[0].seen == ["closed"]
    assert model_progress._bar.get() is None
