"""Documents chosen by conditions, counted by source, and written as keys and as text."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import datasets
import duckdb
import fsspec
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from datamodules import TextDataModule
from lightning_modules.scoring.corpus.shards import SUCCESS, ScoreShards
from lightning_modules.scoring.corpus.table import ScoreTable
from lightning_modules.scoring.document_scorer import Failed
from lightning_modules.scoring.token_scores import text_sha256
from longce.cli.main import main
from longce.corpus.select.command import select
from tests.lightning_modules.scoring.corpus.test_columns import make_scores

CONTEXTS = (4, 8)


@pytest.fixture
def scored(tmp_path):
    """24 documents of two files and two sources in three shards, of which number 5 has failed."""
    records = [{"id": f"d{n}", "text": f"text {n}\nline", "source": "ab"[n % 2]} for n in range(24)]
    files = {"x/a.parquet": records[:12], "x/b.jsonl": records[12:]}
    corpus = tmp_path / "corpus"
    (corpus / "x").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(files["x/a.parquet"]), corpus / "x" / "a.parquet")
    (corpus / "x" / "b.jsonl").write_text("\n".join(map(json.dumps, files["x/b.jsonl"])))
    order = np.random.default_rng(0).permutation(24).tolist()
    for numbers in (order[:8], order[8:16], order[16:]):
        table = ScoreTable(CONTEXTS, per_token="float16")
        for number in numbers:
            about = {"text_hash": text_sha256(f"text {number}\nline"), "first_words": "text"}
            scores = make_scores(12 + number, number, ladder=(CONTEXTS[: 1 + number % 2], 3))
            table.add(about, Failed("broken") if number == 5 else scores)
        columns = {
            "key": [f"d{number}" for number in numbers],
            "file": ["x/a.parquet" if number < 12 else "x/b.jsonl" for number in numbers],
            "row": [number % 12 for number in numbers],
            "source": ["ab"[number % 2] for number in numbers],
        }
        write_scores(tmp_path / "scores", columns, table, [str(corpus)])
    return tmp_path


def write_scores(folder, columns, table, files, key_column="id"):
    """A file of scores, with the columns that name the documents first."""
    scores = table.table()
    for name in reversed(columns):
        scores = scores.add_column(0, name, [columns[name]])
    source = {"files": files, "text_column": "text", "key_column": key_column}
    folder.mkdir(exist_ok=True)
    ScoreShards(str(folder)).write(scores, {"settings": {}, "source": source, "files": {}})


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
    with pytest.raises(ValueError, match="`rank_by` = ladder_4_8_mean"):  # whose ladder has one length
        select(str(scored / "scores"), top=7, rank_by="ladder_4_8_mean", where="source == 'a'")


def table_of(report, name):
    lines = [line.split() for line in report.splitlines() if line]
    return next(line for line in lines if line[0] == name)


def test_report_by_source(scored):
    rows = everything(scored)
    told = select(str(scored / "scores"), where="tokens > 20", by="source")
    assert f"{SUCCESS} is missing" in told.splitlines()[0]
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
    with pytest.raises(ValueError, match=r"corpus.*`--files`"):
        select(str(scored / "scores"), output=str(scored / "docs.jsonl"))
    moved = [str(scored / "moved")]
    select(str(scored / "scores"), output=str(scored / "docs.jsonl"), files=moved[0])
    assert len((scored / "docs.jsonl").read_text().splitlines()) == 23
    changed = scored / "moved" / "x" / "b.jsonl"
    changed.write_text(changed.read_text().replace("text 20", "text 02"))
    with pytest.raises(ValueError, match=r"Row 8 of 'x/b\.jsonl' is no longer the document that was scored"):
        select(str(scored / "scores"), output=str(scored / "docs.jsonl"), files=moved)
    assert len((scored / "docs.jsonl").read_text().splitlines()) == 23, "the earlier file stays"


def test_scores_that_do_not_belong_together_are_refused(scored):
    """Shards twice, of another model, and of another program where texts are needed."""
    scores = scored / "scores"
    other = scored / "other"
    shutil.copytree(scores, other)
    with pytest.raises(ValueError, match="has 2 scores"):
        select([str(scores), str(other)])
    for path in [*scores.iterdir(), *other.iterdir()]:  # of a command that names a folder twice
        table = pyarrow.parquet.read_table(path)
        header = json.loads(table.schema.metadata[b"longce"])
        header["source"]["files"] *= 2
        pyarrow.parquet.write_table(table.replace_schema_metadata({b"longce": json.dumps(header)}), path)
    with pytest.raises(ValueError, match="has 2 scores"):
        select([str(scores), str(other)])
    for path in other.iterdir():
        table = pyarrow.parquet.read_table(path)
        header = json.loads(table.schema.metadata[b"longce"]) | {"settings": {"model": "another"}}
        pyarrow.parquet.write_table(table.replace_schema_metadata({b"longce": json.dumps(header)}), path)
    with pytest.raises(ValueError, match="`model`"):
        select([str(scores), str(other)])
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [3]}), scored / "foreign.parquet")
    paths = [str(scored / "foreign.parquet"), str(scores)]
    assert table_of(select(paths), "all")[1] == "25"
    with pytest.raises(ValueError, match=r"foreign\.parquet' was written by another program"):
        select(paths, output=str(scored / "docs.jsonl"))
    with pytest.raises(ValueError, match="would be read as scores"):
        select(str(scores), output=str(scores / "chosen.parquet"))


def test_shards_that_are_not_complete_are_named(scored):
    shards = scored / "shards"
    shards.mkdir()
    (scored / "scores").rename(shards / "shard-00001-of-00003")
    (shards / "shard-00001-of-00003" / SUCCESS).write_text("{}")
    told = select(str(shards))
    assert [f"shard-0000{index}-of-00003/{SUCCESS} is missing" in told for index in range(3)] == [True, False, True]


def test_names_of_folders_and_columns_with_signs(tmp_path):
    folder = tmp_path / "s[1]"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({'a"b': ["x", "y"], "tokens": [1, 2]}), folder / "x.parquet")
    assert table_of(select(str(folder), where="""\"a\"\"b\" = 'x'"""), "all")[2] == "1"


def _write_slowly(options):
    """Run the command, which stays in the middle of a write until it gets a signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = lambda _: time.sleep(60)
    main(["corpus", "select", *options])


@pytest.mark.parametrize("kind", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_stopped_command_leaves_the_old_files_and_can_be_repeated(scored, kind, capfd):
    folder = scored / "chosen"
    folder.mkdir()
    options = [str(scored / "scores"), "--rank_by", "perplexity"]
    for option, name in {"output": "ids.txt", "figure": "figure.svg"}.items():
        (folder / name).write_text("old")
        options += [f"--{option}", str(folder / name)]
    process = multiprocessing.get_context("fork").Process(target=_write_slowly, args=(options,))
    process.start()
    while not list(folder.glob(".building-ids.txt*")):
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, kind)
    process.join()
    assert {path.read_text() for path in folder.glob("[!.]*")} == {"old"}
    if kind == signal.SIGINT:
        assert process.exitcode == 130
        assert capfd.readouterr().err == "\nlongce: interrupted\n"
        assert len(list(folder.iterdir())) == 2
    main(["corpus", "select", *options])
    assert sorted(path.name for path in folder.iterdir()) == ["figure.svg", "ids.txt"]
    assert "old" not in {path.read_text() for path in folder.iterdir()}


REFUSED = {
    "where": [
        "tokens > 1000",  # which no document meets
        "tokens >",
        "key > 3",
        "tokens",
        "NULL",
        "sum(tokens) > 1",
        "nope = 1",
        "tokens > 1, tokens > 2",
        "COLUMNS('tokens|benefit_mean') > 1",
        "unnest([true, true])",
        "tokens > ?",
        "$1",
        "tokens > 1) FROM documents; SELECT (1",
        "(SELECT count(*) FROM read_text('secret.csv')) > 0",
        "(SELECT count(*) FROM read_csv('secret.csv')) > 0",
        "(SELECT count(*) FROM read_parquet('scores/*.parquet')) > 0",
        "(SELECT count(*) FROM 'secret.csv') > 0",
        "(SELECT count(*) FROM glob('*')) > 0",
        "true); COPY documents TO 'written.csv'; SELECT (true",
        "true); ATTACH 'written.csv' AS other; SELECT (true",
        "true); PRAGMA database_list; SELECT (true",
        "true); SET enable_external_access = true; SELECT (true",
    ],
    "output": ["ids.csv"],
    "figure": ["figure.html"],
    "rank_by": ["nope", "key", "truncated", "tokens; DROP TABLE documents"],
    "by": ["nope", "lsd"],
    "top": [0.0, 1.5],
    "sample_weight": ["tokens", "key", "tokens > 1", "-tokens", "1e308 * 10", "(SELECT count(*) FROM glob('*'))"],
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_refuses_a_value_is_named(option, scored, monkeypatch):
    monkeypatch.chdir(scored)
    Path("secret.csv").write_text("a\n1\n")
    for value in REFUSED[option]:
        options = {option: value}
        if option == "sample_weight" and value != "tokens":  # without a sample, any weight is refused
            options["sample"] = 2
        with pytest.raises(ValueError, match=f"`{option}`") as caught:
            select("scores", **options)
        assert "\n" not in str(caught.value), value
        assert not Path("written.csv").exists(), value


@pytest.mark.parametrize(
    ("option", "column"), [("unique", "text_hash"), ("sample_tokens", "tokens"), ("figure", "key_token_ratio")]
)
def test_an_option_names_the_column_that_it_needs(option, column, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"other": ["a"]}), tmp_path / "bare.parquet")
    value = {"unique": True, "sample_tokens": 5, "figure": str(tmp_path / "f.svg")}[option]
    with pytest.raises(ValueError, match=f"`{option}`.*{column}"):
        select(str(tmp_path / "bare.parquet"), output=str(tmp_path / "ids.txt"), **{option: value})
    assert not (tmp_path / "ids.txt").exists()


def test_a_condition_that_fails_on_a_value_is_one_line(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"n": ["1", "x"]}), tmp_path / "text.parquet")
    with pytest.raises(ValueError, match=r"`where`.*'x'") as caught:
        select(str(tmp_path), where="n::INT > 0")
    assert "\n" not in str(caught.value)


def test_keys_that_are_not_one_line_are_named_and_do_not_stop_the_others(tmp_path):
    table = ScoreTable()
    keys = ["first", "two\nlines", "", "with space", "return\rhere", "a\u2028b" * 30, " \t", "last"]
    for _ in keys:
        table.add({}, make_scores(12))
    columns = {"key": keys, "file": ["a.jsonl"] * len(keys), "row": [*range(len(keys))]}
    write_scores(tmp_path, columns, table, [])
    with pytest.warns(UserWarning, match=r"5 selected document\(s\) .*ids\.txt.* the first is row 1 of 'a\.jsonl'"):
        told = select(str(tmp_path), output=str(tmp_path / "ids.txt"))
    assert (tmp_path / "ids.txt").read_text() == "first\nwith space\nlast\n"
    assert table_of(told, "all")[2] == "8"


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_documents_are_read_by_other_programs(scored, ending):
    """Infinite perplexities do not make the lines invalid JSON."""
    for path in (scored / "scores").glob("*.parquet"):
        table = pyarrow.parquet.read_table(path)
        place = table.schema.get_field_index("perplexity")
        infinite = pyarrow.array([float("inf")] * len(table), pyarrow.float64())
        pyarrow.parquet.write_table(table.set_column(place, table.schema.field(place), infinite), path)
    path = scored / f"docs{ending}"
    select(str(scored / "scores"), by="source", output=str(path))
    read = {".jsonl": (pd.read_json, "json"), ".parquet": (pd.read_parquet, "parquet")}[ending]
    found = read[0](path, **({"lines": True} if ending == ".jsonl" else {}))
    loaded = datasets.load_dataset(read[1], data_files=str(path), split="train", cache_dir=str(scored / "cache"))
    assert sorted(found["key"]) == sorted(loaded["key"]) == sorted(keys(scored))
    assert duckdb.sql(f"SELECT count(*), count(text) FROM '{path}'").fetchall() == [(23, 23)]


def test_rows_of_other_programs_and_of_several_folders(tmp_path):
    """A column that is null in a whole file has another type there, or is missing."""
    data = tmp_path / "data"
    for number, longppl in enumerate([[None, None], [2.0, 3.0]]):
        table = pyarrow.table({"tokens": [5 + number, 7], "longppl": longppl})
        (data / str(number)).mkdir(parents=True)
        pyarrow.parquet.write_table(table, data / str(number) / "x.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [9]}), data / "_hidden.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [1, 2]}), data / "1" / "short.parquet")
    output = tmp_path / "chosen.parquet"
    for paths in ([str(data)], [str(data / "0"), f"{data}/1/*.parquet"], str(data / "**/*.parquet")):
        told = select(paths, where="longppl > 2 or tokens < 6", output=str(output))
        rows = pyarrow.parquet.read_table(output).to_pylist()
        found = [(Path(row["file"]).name, row["row"], row["tokens"], row["longppl"]) for row in rows]
        expected = [("x.parquet", 0, 5, None), ("short.parquet", 0, 1, None), ("short.parquet", 1, 2, None)]
        assert sorted(found, key=str) == sorted([*expected, ("x.parquet", 1, 7, 3.0)], key=str)
        assert table_of(told, "all")[1:5] == ["6", "4", "28", "15"]
        assert table_of(told, "tokens")[1:] == ["1.03", "1.3", "1.75", "3.5", "5.5", "6.4", "6.94"]


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_a_figure_is_that_of_the_selected_documents(scored, ending):
    figure = scored / f"figure{ending}"
    printed = select(str(scored / "scores"), where="tokens > 20", figure=str(figure))
    assert printed.splitlines()[-1] == f"Written: {figure}"
    assert figure.read_bytes().startswith({".svg": b"<?xml", ".png": b"\x89PNG"}[ending])
    if ending == ".svg":
        assert figure.read_text().count("documents") == 4


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "zeros"])
def test_a_damaged_shard_is_named(scored, damage):
    path = sorted((scored / "scores").glob("*.parquet"))[1]
    content = path.read_bytes()
    zeros = content[:8] + bytes(len(content) // 2) + content[8 + len(content) // 2 :]  # with the footer
    path.write_bytes({"truncated": content[:-9], "empty": b"", "text": b"key,tokens\n", "zeros": zeros}[damage])
    with pytest.raises(ValueError, match=f"'{path}' cannot be read as a parquet file") as caught:
        select(str(scored / "scores"))
    assert "\n" not in str(caught.value)


@pytest.fixture
def foreign(tmp_path):
    """Four documents by another program, one of which lacks its tokens; two lack the hash of their text."""
    columns = {
        "tokens": [10, None, 30, 40],
        "text_hash": ["a", None, None, "a"],
        "perplexity": [2.0, float("nan"), 4.0, 6.0],
        "weight": [1.0, -1.0, 1.0, 1.0],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "foreign.parquet")
    return tmp_path


def ids(folder, **options):
    select(str(folder / "foreign.parquet"), output=str(folder / "ids.txt"), **options)
    return [key.rpartition(":")[2] for key in (folder / "ids.txt").read_text().split()]


def test_documents_of_other_programs_may_lack_values(foreign):
    assert ids(foreign, unique=True) == ["0", "1", "2"], "two texts without a hash are two texts"
    with pytest.raises(ValueError, match=r"`sample_tokens` needs .* which 1 of those that pass do not have"):
        ids(foreign, sample_tokens=100)
    assert ids(foreign, sample_tokens=100, where="tokens IS NOT NULL") == ["0", "2", "3"]
    assert ids(foreign, sample=3, sample_weight="weight", where="weight > 0") == ["0", "2", "3"]
    told = select(str(foreign / "foreign.parquet"))
    assert table_of(told, "perplexity")[1:] == ["2.04", "2.4", "3", "4", "5", "5.6", "5.96"]
    assert table_of(told, "all")[-1] == "4", "NaN counts as missing in means as well"


def test_a_damaged_column_that_only_the_output_has_is_named(tmp_path):
    scores = tmp_path / "scores"
    scores.mkdir()
    path = scores / "b.parquet"
    table = pyarrow.table({"tokens": range(1000), "other": [str(n * n) for n in range(1000)]})
    for file in (scores / "a.parquet", path):
        pyarrow.parquet.write_table(table, file, compression="zstd")
    column = pyarrow.parquet.read_metadata(path).row_group(0).column(1)
    content = bytearray(path.read_bytes())
    content[column.dictionary_page_offset + 40 : column.dictionary_page_offset + 240] = bytes(200)
    path.write_bytes(content)
    assert table_of(select(str(scores)), "all")[1] == "2,000"
    (tmp_path / "out").mkdir()
    for ending in ("jsonl", "parquet"):
        with pytest.raises(ValueError, match=f"'{path}' cannot be read as a parquet file"):
            select(str(scores), output=str(tmp_path / "out" / f"chosen.{ending}"))
    assert not list((tmp_path / "out").glob("chosen.*"))


def test_fsspec_urls_and_names_with_pattern_characters(tmp_path):
    """The file system of the URL is opened by fsspec, and all of its shards are read by DuckDB."""
    system = fsspec.filesystem("memory")
    for name, tokens in {"a[1]": [1, 2], "b": [3], ".hidden": [9]}.items():
        pyarrow.parquet.write_table(pyarrow.table({"tokens": tokens}), tmp_path / f"{name}.parquet")
        system.pipe_file(f"/scores/deep/{name}.parquet", (tmp_path / f"{name}.parquet").read_bytes())
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [100]}), tmp_path / "a1.parquet")
    output = tmp_path / "chosen.jsonl"
    for scores, total in ((str(tmp_path), "106"), ("memory://scores", "6"), ("memory://scores/*/b.parquet", "3")):
        told = select(scores, output=str(output))
        assert table_of(told, "all")[3] == total
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert [row["key"] for row in rows] == [f"{row['file']}:{row['row']}" for row in rows]
        assert sum(row["tokens"] for row in rows) == int(total)
    assert rows[0]["file"] == "memory:///scores/deep/b.parquet"
    with pytest.raises(ValueError, match="'memory://nowhere' contains no scores"):
        select("memory://nowhere")


def test_columns_of_different_types_are_refused_in_one_line(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [{"a": 1}]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="cannot be read together") as caught:
        select(str(tmp_path))
    assert "\n" not in str(caught.value)
