"""A corpus into shards: what is in them, and what a run does that goes on, fails, or must not begin."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from callbacks import DocumentScoresWriter, TokenScoresWriter
from callbacks.document_scores_writer import _checkpoint_identity
from datamodules import DocumentCorpus, TextDataModule
from lightning_modules.commands.select.command import select
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.context_lengths import ContextLadder
from lightning_modules.scoring.corpus.columns import document_scores, ladder_scores
from lightning_modules.scoring.corpus.shards import SUCCESS, ReadProgress, ScoreShards
from lightning_modules.scoring.document_scorer import DocumentScorer
from lightning_modules.scoring.token_scores import text_sha256
from lightning_modules.utilities import progress
from lightning_modules.utilities.collectives import gathered, patient_group
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.files import BUILDING
from lightning_modules.visualization.corpus.page import PAGE
from tests.conftest import make_text, tiny_model

ROOT = Path(__file__).parents[2]
LENGTHS = [1, 30, 4, 60, 12, 45]
THRESHOLDS = {"alpha": 0.5, "beta": -6.0}


@pytest.fixture
def documents(tmp_path):
    rows = [{"id": f"d{n}", "text": make_text(length, n), "n": n} for n, length in enumerate(LENGTHS)]
    (tmp_path / "corpus").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "corpus" / "a.parquet", row_group_size=4)
    return tmp_path / "corpus"


@pytest.fixture
def run(tmp_path, documents, model_dir):
    def run(output=None, callbacks=None, trainer=(), data=(), model=(), writer=()):
        writers = [DocumentScoresWriter(str(output or tmp_path / "out"), **{**THRESHOLDS, **dict(writer)})]
        settings = {"pretrained_model_name_or_path": str(model_dir), "context_length": 16, "stride": 8, **dict(model)}
        module = LongContextLM(**settings)
        settings = {"key_column": "id", "columns": ["n"], "num_workers": 0, **dict(data)}
        settings["files"] = settings.get("files", str(documents))
        Trainer(
            accelerator="cpu",
            logger=False,
            callbacks=writers if callbacks is None else callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            **dict(trainer),
        ).predict(module, datamodule=DocumentCorpus(**settings), return_predictions=False)
        return module

    return run


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


def test_a_finished_run_has_a_page_and_a_broken_page_does_not_fail_it(run, documents, tmp_path, monkeypatch):
    run()
    page = (tmp_path / "out" / PAGE).read_text()
    assert "6 documents with" in page
    assert f"longce inspect {documents}/a.parquet --row" in page
    assert len(pyarrow.parquet.read_table(tmp_path / "out")) == 6, "readers of the folder skip the page"
    run(trainer={"limit_predict_batches": 1})
    (tmp_path / "out" / PAGE).unlink()
    monkeypatch.setattr(
        "callbacks.document_scores_writer.write_page", lambda *_: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.warns(UserWarning, match=r"page of the corpus is not written \(full\)"):
        run()
    assert (tmp_path / "out" / SUCCESS).exists()


@pytest.mark.parametrize("damage", ["deleted", "truncated", "renamed", "copied", "changed", "flipped", "unlisted"])
def test_select_and_a_repeated_run_notice_that_shards_have_changed(run, tmp_path, damage):
    run(writer={"shard_rows": 2})
    folder = tmp_path / "out"
    before, shards = len(rows(folder)), sorted(folder.glob("part-*.parquet"))
    if damage == "deleted":
        shards[1].unlink()
    elif damage == "truncated":
        shards[1].write_bytes(shards[1].read_bytes()[:-9])
    elif damage == "renamed":
        shards[1].rename(folder / "part-00009-x.parquet")
    elif damage == "flipped":  # the footer stays as it was
        content = bytearray(shards[1].read_bytes())
        content[8 : len(content) * 2 // 3 : 16] = bytes(len(range(8, len(content) * 2 // 3, 16)))
        shards[1].write_bytes(content)
    elif damage == "copied":
        shutil.copy(shards[1], folder / "part-00009-x.parquet")
    elif damage == "changed":
        table = pyarrow.parquet.read_table(shards[1])
        pyarrow.parquet.write_table(table.set_column(0, "key", table["key"]).slice(0, 1), shards[1])
    else:
        listed = success(folder)
        listed["contents"].pop(shards[1].name)
        (folder / SUCCESS).write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=f"{'part-00009-x' if damage == 'copied' else shards[1].stem}.* again"):
        select(str(folder))
    if damage in ("deleted", "changed", "unlisted", "renamed"):
        with pytest.warns(UserWarning, match="out' has changed"):
            run(writer={"shard_rows": 2})
        assert len(rows(folder)) == before
        select(str(folder))


def test_scores_of_an_older_version_are_selected_with_a_warning(run, tmp_path, caplog):
    run()
    listed = {name: value for name, value in success(tmp_path / "out").items() if name != "contents"}
    (tmp_path / "out" / SUCCESS).write_text(json.dumps(listed))
    select(str(tmp_path / "out"))
    assert "by an older version" in caplog.text


def test_other_attention_is_refused(run, tmp_path):
    run(trainer={"limit_predict_batches": 1})
    with pytest.raises(ValueError, match="`attention` was 'sdpa' and is 'eager'"):
        run(model={"attn_implementation": "eager"})


def test_values_of_tokens_in_16_bits(run, tmp_path):
    for kind in ("float16", "float32"):
        run(output=tmp_path / kind, writer={"per_token": kind})
    table = pyarrow.parquet.read_table(tmp_path / "float16")
    assert table.schema.field("lsd").type == pyarrow.list_(pyarrow.float16())
    for half, whole in zip(rows(tmp_path / "float16"), rows(tmp_path / "float32"), strict=True):
        assert [value is None for value in half["lsd"]] == [value is None for value in whole["lsd"]]
        np.testing.assert_allclose(np.float32(half["lsd"]), np.float32(whole["lsd"]), rtol=2e-3, atol=1e-3)
        assert half["benefit_mean"] == whole["benefit_mean"], "statistics are not those of rounded values"


def test_a_run_goes_on_where_another_one_ended(run, documents, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    output = tmp_path / "out"
    run(trainer={"limit_predict_batches": 3}, writer={"shard_rows": 2})
    assert sorted(len(pyarrow.parquet.read_table(path)) for path in output.glob("*.parquet")) == [1, 2]
    assert not (output / SUCCESS).exists()
    assert "without a limit of batches" in caplog.text
    first = {row["key"]: row for row in rows(output)}
    with pytest.MonkeyPatch.context() as patch:
        read = []
        tokenised = lambda text, *a, **k: read.append(text) or encode_document(text, *a, **k)  # noqa: E731
        patch.setattr("datamodules.packing.evaluation_documents.encode_document", tokenised)
        run()
    assert len(read) == 3
    assert "already has scores of 3 documents" in caplog.text
    found = rows(output)
    assert [row["key"] for row in found] == [f"d{n}" for n in range(6)]
    assert all(row == first[row["key"]] for row in found if row["key"] in first)
    assert success(output)["documents"] == 6
    (documents / "b.jsonl").write_text(json.dumps({"id": "d5", "text": "more", "n": 9}))
    with pytest.raises(ValueError, match=r"`columns` was {'n': 'int64'} and is {'n': 'string'}"):
        run()
    (documents / "b.jsonl").unlink()
    more = pyarrow.Table.from_pylist([{"id": "d5", "text": make_text(9), "n": 6}])
    pyarrow.parquet.write_table(more, documents / "b.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backbone, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("no more")))
        with pytest.raises(RuntimeError, match="no more"):
            run()
    assert not (output / SUCCESS).exists(), "not all documents are done"
    run()
    assert success(output)["documents"] == 7
    assert success(output)["repeated_keys"] == 2
    assert "2 documents have keys that are not unique" in caplog.text
    run()  # nothing is left to do
    assert len(rows(output)) == success(output)["documents"] == 7


def test_scores_of_other_settings_are_not_mixed(run, tmp_path):
    run()
    for settings, name in (
        ({"model": {"context_length": 17}}, "`context_length` was 16 and is 17"),
        ({"model": {"ladder": ContextLadder([8])}}, "`ladder` was None and is"),
        ({"writer": {"alpha": 1.0}}, "`alpha` was 0.5 and is 1.0"),
        ({"writer": {"per_token": "float16"}}, "`per_token`"),
        ({"data": {"max_tokens": 9}}, "`max_tokens` was None and is 9"),
        ({"data": {"columns": []}}, "`columns`"),
    ):
        with pytest.raises(ValueError, match=name):
            run(**settings)
    run(data={"batch_tokens": 100, "num_workers": 1})  # which change nothing but the order


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
    assert "1 document(s) left out: the text is empty or only white space (row 2 of 'b.jsonl')" in caplog.text
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


def test_a_source_of_which_too_many_documents_fail_ends_in_a_report(run, documents, tmp_path, caplog):
    """The others are scored, the failures of earlier runs count, and the same command can accept them."""
    caplog.set_level(logging.INFO)
    lines = [{"id": f"j{n}", "text": "ba ce di"} for n in range(30)] + [{"id": f"k{n}", "body": "x"} for n in range(8)]
    (documents / "b.jsonl").write_text("\n".join([*map(json.dumps, lines), "{broken", '{"id": "e", "text": 3}']))
    for folder, texts in (("books", ["ba ce"] * 9 + ["\udcff"]), ("fine", ["ba"])):
        (documents / folder).mkdir()
        for number, text in enumerate(texts):
            (documents / folder / f"{number}.txt").write_text(text, errors="surrogateescape")
    report = (
        r"2 source\(s\) have more failed documents than `data.allowed_failures` = 0.09 allows:\n"
        r"  b\.jsonl: 10 of 40 documents failed \(25\.0%\)\n"
        r"    8 x no text in 'text': found \['body', 'id'\]\. \(row 30 of 'b\.jsonl'\)\n"
        r"    1 x malformed JSON .* \(row 38 of 'b\.jsonl'\)\n"
        r"    1 x the text must be a string.* \(row 39 of 'b\.jsonl'\)\n"
        r"  books: 1 of 10 documents failed \(10\.0%\)\n"
        r"    1 x .*byte 0 is not UTF-8.* \(row 0 of 'books/9\.txt'\)\n"
        r"All scores are kept in .* without _SUCCESS\.json"
    )
    for _ in range(2):  # nothing is scored in the second run, which fails all the same
        with pytest.raises(IncompleteError, match=report):
            run(data={"allowed_failures": 0.09, "columns": []})
        assert len(rows(tmp_path / "out")) == 6 + 40 + 10 + 1
        assert not (tmp_path / "out" / SUCCESS).exists()
    caplog.clear()
    run(data={"allowed_failures": 0.25, "columns": []})  # as many as are allowed
    assert (success(tmp_path / "out")["failed"], success(tmp_path / "out")["documents"]) == (11, 57)
    assert "b.jsonl: 10 of 40 documents failed (25.0%)" in caplog.text


def test_documents_that_are_left_out_on_purpose_do_not_count_as_failed(run, tmp_path):
    run(data={"max_tokens": 40, "overlong": "skip", "allowed_failures": 0.0})
    left_out = [row for row in rows(tmp_path / "out") if row["error"]]
    assert f"{6 - len(left_out)} documents with" in (tmp_path / "out" / PAGE).read_text()
    assert len(left_out) > 1
    counts = success(tmp_path / "out")
    assert (counts["documents"], counts["failed"], counts["left_out"]) == (6, 0, len(left_out))


def test_a_trial_of_some_documents_reports_failures_too(run, documents, caplog, tmp_path):
    (documents / "a.parquet").unlink()
    texts = ["ba", 7, "ce", "di", "fo"]
    (documents / "b.jsonl").write_text("\n".join(json.dumps({"id": "x", "text": text}) for text in texts))
    run(trainer={"limit_predict_batches": 2}, data={"columns": []})
    assert "more than `data.allowed_failures` allows" in caplog.text
    assert "1 of 3 documents failed" in caplog.text
    assert not (tmp_path / "out" / SUCCESS).exists()


def test_a_damaged_file_ends_in_an_error_when_all_else_is_done(run, documents, tmp_path):
    content = (documents / "a.parquet").read_bytes()
    pages = pyarrow.parquet.ParquetFile(documents / "a.parquet").metadata.row_group(1).column(1).data_page_offset
    (documents / "a.parquet").write_bytes(content[:pages] + bytes(60) + content[pages + 60 :])
    with pytest.raises(
        ValueError, match=r"1 file\(s\) or parts of files could not be read.*a\.parquet.*run the same command again"
    ):
        run()
    assert [row["row"] for row in rows(tmp_path / "out")] == [0, 1, 2, 3]
    assert not (tmp_path / "out" / SUCCESS).exists()
    (documents / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match="have changed since"):
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
        with pytest.raises(ValueError, match=r"1 file\(s\) changed while their documents were scored, such as \['b"):
            run(**settings)
        assert not ScoreShards(str(tmp_path / "out")).names()
        return
    run(**settings)
    if attack == "edit":
        edit()
        with pytest.raises(ValueError, match=r"have changed since .*'b\.jsonl'"):
            run(**settings)
    else:
        shutil.copyfile(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file) if attack == "copy" else os.utime(file, (1, 1))
        run(**settings)
        assert success(tmp_path / "out")["documents"] == 2


def test_scores_belong_to_the_content_of_the_checkpoint(tmp_path):
    names, found = ("a.ckpt", "copy/a.ckpt", "other/a.ckpt"), []
    for name, content in zip(names, (b"one", b"one", b"two"), strict=True):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (1, 1))
        found.append(_checkpoint_identity(SimpleNamespace(ckpt_path=str(path))))
    assert found[0] == found[1] != found[2]


def test_scores_belong_to_the_content_of_a_bare_config(tmp_path, model_dir):
    config, found = tmp_path / "config.json", []
    for content in ("1e-06", "1e-02", "1e-06"):
        config.write_text((model_dir / "config.json").read_text().replace("1e-06", content))
        os.utime(config, (1, 1))
        found.append(LongContextLM(str(config), context_length=16, stride=8).scoring_settings()["model"])
    assert found[0] == found[2] != found[1]


def test_a_model_that_changes_while_it_is_loaded_is_refused(run, tmp_path, model_dir, monkeypatch):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    load = LongContextLM.configure_model

    def exported_meanwhile(self):
        load(self)
        tiny_model("llama", self.backbone.base_model.config.vocab_size, seed=9).save_pretrained(folder)

    monkeypatch.setattr(LongContextLM, "configure_model", exported_meanwhile)
    with pytest.raises(ValueError, match=r"changed during loading\. Start again"):
        run(model={"pretrained_model_name_or_path": str(folder)})
    assert not ScoreShards(str(tmp_path / "out")).names()


def test_what_is_scored_is_kept_when_a_run_is_stopped(run, tmp_path, monkeypatch):
    add, count = DocumentScoresWriter.on_predict_batch_end, []

    def interrupted(*arguments, **settings):
        add(*arguments, **settings)
        count.append(1)
        if len(count) == 4:
            raise RuntimeError("no more")

    monkeypatch.setattr(DocumentScoresWriter, "on_predict_batch_end", interrupted)
    with pytest.raises(RuntimeError, match="no more"):
        run()
    assert len(rows(tmp_path / "out")) == 4
    run()
    assert success(tmp_path / "out")["documents"] == 6


def test_a_document_that_is_missing_in_the_end_is_noticed(run, tmp_path, monkeypatch):
    monkeypatch.setattr("datamodules.corpus.module.CorpusLoader.read_progress", lambda self: ReadProgress(7, True, []))
    with pytest.raises(ValueError, match="has 6 documents instead of 7"):
        run()
    assert not (tmp_path / "out" / SUCCESS).exists()


def test_nothing_is_lost_after_a_warning(run, tmp_path, monkeypatch, capfd):
    add, shards, handler = DocumentScoresWriter.on_predict_batch_end, [], signal.getsignal(signal.SIGTERM)

    def warned(*arguments, **settings):
        if len(shards) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        add(*arguments, **settings)
        shards.append(len(list((tmp_path / "out").glob("*.parquet"))))

    monkeypatch.setattr(DocumentScoresWriter, "on_predict_batch_end", warned)
    run()
    assert shards == [0, 0, 1, 2, 3, 4]
    assert "is now written immediately" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == handler


def test_shards_end_with_time(run, tmp_path):
    run(writer={"shard_minutes": 1e-9})
    assert success(tmp_path / "out")["shards"] == 6


def test_shards_behind_an_address(run, tmp_path):
    place = f"memory:/{tmp_path}/out"
    run(output=place, trainer={"limit_predict_batches": 2})
    run(output=place)
    shards = ScoreShards(place)
    assert shards.existing_scores().rows["a.parquet"].tolist() == list(range(6))
    assert json.loads(shards.folder.open(SUCCESS).read())["documents"] == 6


def test_what_killed_runs_have_left_is_removed(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{BUILDING}part-00000@here-1").write_bytes(b"half a shard")
    run()
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("part-")) == [
        SUCCESS,
        PAGE,
    ]


def wait_for_one_that_ends(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    group = patient_group()
    assert gathered(rank, group) == [0, 1]
    if rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError):
        gathered(rank, group)


def test_nobody_waits_for_a_process_that_has_ended():
    """Its share may take days, so no time limit tells."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=wait_for_one_that_ends, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 3]


def test_progress_tells_documents_tokens_and_time_left(run, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    run()
    lines = [line for line in caplog.messages if line.startswith("Scoring:")]
    assert "/6.00" in lines[-1]
    assert "doc" in lines[-1]
    assert "tokens/s" in lines[-1]
    assert "<" in lines[0], "time left"


def test_what_cannot_be_written_or_goes_with_other_data(run, documents, tmp_path, model_dir):
    table = pyarrow.parquet.read_table(documents / "a.parquet")
    pyarrow.parquet.write_table(table.append_column("tokens", table["n"]), documents / "a.parquet")
    with pytest.raises(ValueError, match=r"`data.columns` has \['tokens'\]"):
        run(data={"columns": ["tokens"]})
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Cannot write"):
        run(output=tmp_path / "file" / "out")
    with pytest.raises(ValueError, match="alpha"):
        DocumentScoresWriter("x", alpha=-1)
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[DocumentScoresWriter("x")], enable_checkpointing=False
    )
    (tmp_path / "a.txt").write_text("a text")
    module = LongContextLM(str(model_dir))
    with pytest.raises(ValueError, match=r"datamodules\.DocumentCorpus, got TextDataModule"):
        trainer.predict(module, datamodule=TextDataModule(str(model_dir), test=str(tmp_path / "a.txt")))


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
    assert found["two processes"] == found["fsdp"] == found["killed"] == 0.0
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
