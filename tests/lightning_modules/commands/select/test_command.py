"""Documents chosen by conditions, counted by source, and written as ids, as text and as weights of a mixture."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import datasets
import duckdb
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from datamodules import DocumentCorpus, MixtureDataModule, TextDataModule
from datamodules.corpus.files import find_corpus
from lightning_modules.batch import DocumentRef
from lightning_modules.commands.cli.main import main
from lightning_modules.commands.select.choice import meets_conditions
from lightning_modules.commands.select.command import select
from lightning_modules.commands.select.output import write_mixture
from lightning_modules.scoring.corpus.shards import SUCCESS, ScoreShards
from lightning_modules.scoring.corpus.table import ScoreTable, count_rows
from lightning_modules.scoring.document_scorer import Failed
from lightning_modules.scoring.token_scores import text_sha256
from tests.lightning_modules.scoring.corpus.test_columns import make_scores

CONTEXTS = (4, 8)
TYPES = {"source": pyarrow.string()}


@pytest.fixture
def scored(tmp_path):
    """24 documents of two files and two sources in three shards, of which number 5 has failed."""
    records = [{"id": f"d{n}", "text": f"text {n}\nline", "source": "ab"[n % 2]} for n in range(24)]
    files = {"x/a.parquet": records[:12], "x/b.jsonl": records[12:]}
    corpus = tmp_path / "corpus"
    (corpus / "x").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(files["x/a.parquet"]), corpus / "x" / "a.parquet")
    (corpus / "x" / "b.jsonl").write_text("\n".join(map(json.dumps, files["x/b.jsonl"])))
    module = DocumentCorpus([str(corpus)], key_column="id", columns=["source"])
    versions = find_corpus(module.files, module.column_names).versions()
    shards = ScoreShards(str(tmp_path / "scores"))
    table = ScoreTable(TYPES, CONTEXTS, per_token="float16")
    order = np.random.default_rng(0).permutation(24)
    for place, number in enumerate(order.tolist()):
        name = "x/a.parquet" if number < 12 else "x/b.jsonl"
        text_hash = text_sha256(f"text {number}\nline")
        about = {"text_hash": text_hash, "first_words": "text"}
        ref = DocumentRef(f"d{number}", name, number % 12, {"source": "ab"[number % 2]}, **about)
        scores = make_scores(12 + number, number, ladder=(CONTEXTS[: 1 + number % 2], 3))
        table.add(ref, Failed("broken") if number == 5 else scores)
        if place % 8 == 7:
            header = {"settings": {}, "source": module.source_settings(), "files": versions}
            header["counts"] = count_rows(table.table())
            shards.write(table.table(), header, 0)
            table.clear()
    return tmp_path


def everything(scored):
    """All rows, as a slow and obvious list."""
    rows = pyarrow.parquet.read_table(scored / "scores").to_pylist()
    return sorted(rows, key=lambda row: int(row["key"][1:]))


def keys(scored, **options):
    select(str(scored / "scores"), output=str(scored / "ids.txt"), **options)
    return set((scored / "ids.txt").read_text().split())


def test_conditions(scored):
    rows = [row for row in everything(scored) if row["error"] is None]
    assert len(rows) == 23
    assert keys(scored) == {row["key"] for row in rows}
    for where, wanted in {
        "tokens >= 20": lambda row: row["tokens"] >= 20,
        "benefit_mean>0 and source=='b'": lambda row: row["benefit_mean"] > 0 and row["source"] == "b",
        "longppl <= 2.5": lambda row: row["longppl"] is not None and row["longppl"] <= 2.5,
        "tokens < 16 or tokens > 30": lambda row: not 16 <= row["tokens"] <= 30,
        "ladder_4_8_mean is null": lambda row: row["ladder_4_8_mean"] is None,
        "ladder_4_8_mean > -1": lambda row: row["ladder_4_8_mean"] is not None and row["ladder_4_8_mean"] > -1,
    }.items():
        expected = {row["key"] for row in rows if wanted(row)}
        assert 0 < len(expected) < 23
        assert keys(scored, where=where) == expected, where


def test_the_largest(scored):
    rows = [row for row in everything(scored) if row["error"] is None]
    ranked = [row["key"] for row in sorted(rows, key=lambda row: -row["benefit_mean"])]
    assert keys(scored, top=5) == set(ranked[:5])
    assert keys(scored, top=0.25) == set(ranked[:6])
    assert keys(scored, top=1) == keys(scored, top=500) == set(ranked)
    some = [row for row in rows if row["tokens"] > 20]
    ranked = [row["key"] for row in sorted(some, key=lambda row: -row["perplexity"])]
    assert keys(scored, top=0.5, rank_by="perplexity", where="tokens > 20") == set(ranked[: round(len(some) / 2)])
    assert len(keys(scored, top=7, rank_by="key_tokens")) == 7, "of equal ones as many as asked for"
    with pytest.raises(ValueError, match="No document meets"):  # whose ladder has one length
        select(str(scored / "scores"), top=7, rank_by="ladder_4_8_mean", where="source == 'a'")


def table_of(report, name):
    lines = [line.split() for line in report.splitlines() if line]
    return next(line for line in lines if line[0] == name)


def test_report_by_source(scored):
    rows = everything(scored)
    told = select(str(scored / "scores"), where="tokens > 20", by="source")
    assert "4 > whole" in told
    assert told.startswith(f"{SUCCESS} is missing")
    for source in "ab":
        own = [row for row in rows if row["source"] == source]
        chosen = [row for row in own if row["error"] is None and row["tokens"] > 20]
        line = table_of(told, source)
        assert line[1:5] == [
            str(len(own)),
            str(len(chosen)),
            str(sum(row["tokens"] or 0 for row in own)),
            str(sum(row["tokens"] for row in chosen)),
        ]
        assert float(line[6]) == pytest.approx(np.mean([row["benefit_mean"] for row in chosen]), rel=1e-3)
    assert table_of(told, "all")[1] == "24"
    assert table_of(select(str(scored / "scores"), by="folder"), "x")[1] == "24"
    (scored / "scores" / SUCCESS).write_text("{}")
    assert select(str(scored / "scores")).startswith("source")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_documents_come_with_text_and_scores(scored, ending):
    path = scored / f"docs{ending}"
    select(str(scored / "scores"), where="tokens > 20", top=6, output=str(path))
    found = (
        [json.loads(line) for line in path.read_text().splitlines()]
        if ending == ".jsonl"
        else pyarrow.parquet.read_table(path).to_pylist()
    )
    expected = {row["key"]: row for row in everything(scored)}
    assert len(found) == 6
    for row in found:
        number = int(row["key"][1:])
        assert row.pop("text") == f"text {number}\nline"
        assert row == {name: value for name, value in expected[row["key"]].items() if name in row}
        assert "lsd" not in row
    assert [(row["file"], row["row"]) for row in found] == sorted((row["file"], row["row"]) for row in found)
    module = TextDataModule("x", train=str(path), name_field="key")
    assert {document.name for document in module.source("train")} == {row["key"] for row in found}


def test_documents_that_are_elsewhere_or_others(scored):
    (scored / "corpus").rename(scored / "moved")
    with pytest.raises(FileNotFoundError, match="corpus"):
        select(str(scored / "scores"), output=str(scored / "docs.jsonl"))
    moved = [str(scored / "moved")]
    select(str(scored / "scores"), output=str(scored / "docs.jsonl"), files=moved[0])
    assert len((scored / "docs.jsonl").read_text().splitlines()) == 23
    changed = scored / "moved" / "x" / "b.jsonl"
    changed.write_text(changed.read_text().replace("text 20", "text 02"))
    with pytest.raises(ValueError, match=r"1 file\(s\) have changed since .*'x/b\.jsonl'"):
        select(str(scored / "scores"), output=str(scored / "docs.jsonl"), files=moved)
    assert len((scored / "docs.jsonl").read_text().splitlines()) == 23, "the earlier file stays"


def test_weights_for_a_mixture(scored, word_tokenizer_folder):
    weights = scored / "weights.yaml"
    select(str(scored / "scores"), by="source", where="row > 2", rank_by="benefit_p90", weights=str(weights))
    rows = [row for row in everything(scored) if row["row"] > 2 and row["benefit_p90"] is not None]
    means = {source: np.mean([row["benefit_p90"] for row in rows if row["source"] == source]) for source in "ab"}
    found = yaml.safe_load(weights.read_text())["data"]["init_args"]["weights"]
    assert found == pytest.approx({source: mean / sum(means.values()) for source, mean in means.items()}, abs=1e-5)
    source = {"class_path": "datamodules.TextDataModule", "init_args": {"train": "x", "validation": "x"}, "weight": 9}
    mixture = MixtureDataModule(word_tokenizer_folder, sources={"a": source, "b": source}, weights=found)
    assert mixture.weights == found
    with pytest.raises(ValueError, match=r"same sources.*\['c'\]"):
        MixtureDataModule(word_tokenizer_folder, sources={"a": source, "b": source, "c": source}, weights=found)
    with pytest.raises(ValueError, match=r"mean `benefit_p10` of source '.' is -.*weights must be above 0"):
        select(str(scored / "scores"), by="source", rank_by="benefit_p10", weights=str(weights))


@pytest.fixture
def word_tokenizer_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.mark.parametrize(
    "where",
    [
        "tokens >",
        "key > 3",
        "tokens",
        "",
        "sum(tokens) > 1",
        "tokens > 1) FROM documents; SELECT (1",
        "(SELECT count(*) FROM read_csv('secret.csv')) > 0",
    ],
)
def test_conditions_without_a_meaning(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("secret.csv").write_text("a\n1\n")
    documents = pyarrow.table({"tokens": [1, 2], "key": ["a", "b"]})
    with pytest.raises(ValueError, match=r"(?s)is not valid .*of these columns: tokens, key"):
        meets_conditions(documents, where)


def _write_slowly(options):
    """Run the command, which stays in the middle of a write until it gets a signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = lambda _: time.sleep(60)
    main(["select", *options])


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_command_leaves_the_old_files_and_can_be_repeated(scored, kind, capfd):
    folder = scored / "chosen"
    folder.mkdir()
    options = [str(scored / "scores"), "--rank_by", "perplexity"]
    for option, name in {"output": "ids.txt", "weights": "weights.yaml", "page": "page.html"}.items():
        (folder / name).write_text("old")
        options += [f"--{option}", str(folder / name)]
    process = multiprocessing.get_context("fork").Process(target=_write_slowly, args=(options,))
    process.start()
    while not list(folder.glob(".building-ids.txt*")):
        time.sleep(0.01)
    os.kill(process.pid, kind)
    process.join()
    assert {path.read_text() for path in folder.glob("[!.]*")} == {"old"}
    if kind == signal.SIGINT:
        assert process.exitcode == 130
        assert capfd.readouterr().err == "\nlongce: interrupted\n"
        assert len(list(folder.iterdir())) == 3
    main(["select", *options])
    assert sorted(path.name for path in folder.iterdir()) == ["ids.txt", "page.html", "weights.yaml"]
    assert "old" not in {path.read_text() for path in folder.iterdir()}


BAD_OPTIONS = [
    ("where", "tokens > 1000"),
    ("output", "ids.csv"),
    ("rank_by", "nope"),
    ("rank_by", "key"),
    ("by", "nope"),
    ("by", "lsd"),
    ("top", 0.0),
    ("sample_weight", "tokens"),
    ("mixture", "m.yaml"),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS)
def test_an_option_that_refuses_a_value_is_named(option, value, scored):
    named = {"by": "source|column 'nope'"}
    with pytest.raises(ValueError, match=named.get(option, option if value != "nope" else "column 'nope'")):
        select(str(scored / "scores"), **{option: value})


def test_keys_that_are_not_one_line_are_named_and_do_not_stop_the_others(tmp_path):
    table = ScoreTable({})
    for row, key in enumerate(
        ["first", "two\nlines", "", "with space", "return\rhere", "a\u2028b" * 30, " \t", "last"]
    ):
        table.add(DocumentRef(key, "a.jsonl", row, {}), make_scores(12))
    header = {"settings": {}, "source": {}, "files": {}, "counts": {}}
    ScoreShards(str(tmp_path)).write(table.table(), header, 0)
    with pytest.warns(UserWarning, match=r"5 selected document\(s\) are not in .*ids\.txt") as caught:
        told = select(str(tmp_path), output=str(tmp_path / "ids.txt"))
    named = r"row 1 of 'a.jsonl' ('two\nlines'), row 2 of 'a.jsonl' (''), row 4 of 'a.jsonl' ('return\rhere') and"
    assert named in str(caught[0].message)
    assert (tmp_path / "ids.txt").read_text() == "first\nwith space\nlast\n"
    assert table_of(told, "all")[2] == "8"


def test_repeated_texts_and_samples_are_chosen_in_this_order(scored):
    rows = pyarrow.parquet.read_table(scored / "scores").to_pylist()
    assert len({row["text_hash"] for row in rows if row["error"] is None}) == 23
    assert keys(scored, unique=True) == keys(scored)
    for path in (scored / "scores").glob("*.parquet"):
        table = pyarrow.parquet.read_table(path)
        place = table.schema.get_field_index("text_hash")
        same = table.set_column(place, table.schema.field(place), pyarrow.array(["ab"] * len(table)))
        pyarrow.parquet.write_table(same, path)
    assert keys(scored, unique=True, where="row > 2") == {"d3"}
    assert keys(scored, top=8, unique=True) == {"d0"}, "repeated texts are dropped before the largest are chosen"
    drawn = keys(scored, where="tokens > 20", sample=4, sample_weight="tokens * (source = 'b')::INT", seed=7)
    assert len(drawn) == 4
    assert drawn <= {row["key"] for row in rows if row["source"] == "b" and (row["tokens"] or 0) > 20}
    assert keys(scored, top=8, sample=4) < keys(scored, top=8)
    some = keys(scored, sample_tokens=100)
    assert 60 < sum(row["tokens"] for row in rows if row["key"] in some) <= 100


@pytest.mark.limit(3)  # reads with datasets
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_documents_are_read_by_other_programs_and_trained_on(scored, ending, word_tokenizer_folder, monkeypatch):
    """Infinite perplexities do not make the lines invalid JSON."""
    for path in (scored / "scores").glob("*.parquet"):
        table = pyarrow.parquet.read_table(path)
        place = table.schema.get_field_index("perplexity")
        infinite = pyarrow.array([float("inf")] * len(table), pyarrow.float64())
        pyarrow.parquet.write_table(table.set_column(place, table.schema.field(place), infinite), path)
    path, mixture = scored / f"docs{ending}", scored / "mixture.yaml"
    select(str(scored / "scores"), by="source", output=str(path), mixture=str(mixture))
    read = {".jsonl": (pd.read_json, "json"), ".parquet": (pd.read_parquet, "parquet")}[ending]
    found = read[0](path, **({"lines": True} if ending == ".jsonl" else {}))
    loaded = datasets.load_dataset(read[1], data_files=str(path), split="train", cache_dir=str(scored / "cache"))
    assert sorted(found["key"]) == sorted(loaded["key"]) == sorted(keys(scored))
    assert duckdb.sql(f"SELECT count(*), count(text) FROM '{path}'").fetchall() == [(23, 23)]
    monkeypatch.setenv("LONGCE_CACHE", str(scored / "tokens"))
    settings = yaml.safe_load(mixture.read_text())["data"]["init_args"]
    tokens = found.groupby("source")["tokens"].sum()
    assert {name: source["weight"] for name, source in settings["sources"].items()} == tokens.to_dict()
    module = MixtureDataModule(word_tokenizer_folder, sequence_length=8, isolate_documents=False, **settings)
    assert set(settings["evaluate_on"]) <= {"a", "b"}
    module.prepare_data()
    module.setup("fit")
    assert set(module.mixed_rows) == {"a", "b"}
    assert len(module.validation.documents) >= 1


def test_a_mixture_of_sources_too_small_to_hold_any_out(tmp_path):
    chosen = pd.DataFrame({"source": ["a", "b"], "tokens": [3, 5], "text_hash": ["f" * 64, "e" * 64]})
    write_mixture(tmp_path / "m.yaml", chosen, tmp_path / "d.parquet", "kind")
    settings = yaml.safe_load((tmp_path / "m.yaml").read_text())["data"]["init_args"]
    assert set(settings) == {"sources"}
    assert settings["sources"]["b"]["init_args"]["where"] == ["kind", "b"]
    # The hashes 0 and 1 are held out for validation and test, so that only `b` has documents in all splits.
    hashes = {"a": (0, 1), "b": (0, 2)}
    rows = [{"source": name, "tokens": 1, "text_hash": f"{n:016x}"} for name, own in hashes.items() for n in own]
    write_mixture(tmp_path / "m.yaml", pd.DataFrame(rows), tmp_path / "d.parquet", "kind")
    assert yaml.safe_load((tmp_path / "m.yaml").read_text())["data"]["init_args"]["evaluate_on"] == ["b"]
    assert "holdout" not in settings["sources"]["a"]["init_args"]


@pytest.mark.limit(2)  # draws five figures
def test_the_page_is_that_of_the_selected_documents(scored):
    page = scored / "pages" / "page.html"
    files = {"output": str(scored / "keys.txt"), "page": str(page), "weights": str(scored / "weights.yaml")}
    printed = select(str(scored / "scores"), by="source", where="tokens > 20", rank_by="tokens", **files)
    assert printed.splitlines()[-3:] == [
        f"Written: {files['output']} (15 keys)",
        f"Written: {files['weights']} (weights of 2 sources)",
        f"Written: {files['page']} (page of 15 documents)",
    ]
    content = page.read_text()
    assert "15 documents that meet <code>tokens &gt; 20</code>" in content
    assert "Context ladder" in content
    assert "Documents by key-token ratio, sources stacked" in content
    with pytest.raises(ValueError, match=r"for `mixture` one of text, but is 'folder'"):
        select(str(scored / "scores"), by="folder", output=str(scored / "d.jsonl"), mixture=str(scored / "m.yaml"))
