"""The published numbers fit together where the paper says they do, and tables print them beside ours."""

import math
import re

import pytest

from benchmarks.reproduction.tables.published import as_json, find_model, find_table, markdown, published

NAMES = list(published()["tables"])
ROUNDING = 0.05 + 1e-9  # of a number printed with one digit


def cells(name):
    return find_table(name).cells()


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_full_and_refers_to_what_exists(name):
    table = find_table(name)
    # Figures are drawn, and the text prints few of their numbers.
    assert name.startswith("figure") or all(map(math.isfinite, table.cells().values()))
    for row in (*table.measures, *table.runs, *table.gains, *table.overhead):
        assert row in table.rows
    for run in table.runs.values():
        assert re.sub(r"-(50|100|200)$", "", run) in published()["runs"]
    for pair in table.gains.values():
        assert set(pair) <= set(table.rows)
    assert set(table.evaluators) <= set(published()["models"])
    assert (table.kind == "correlation") == bool(table.measures)


@pytest.mark.parametrize("name", ["table3", "table4"])
def test_gains_are_differences(name):
    table = find_table(name)
    wrong = [
        (row, column, round(table.cells()[more, column] - table.cells()[less, column], 1))
        for row, (more, less) in table.gains.items()
        for column in table.columns
        if abs(table.cells()[more, column] - table.cells()[less, column] - table.cells()[row, column]) > 1e-9
    ]
    # The paper prints +0.8 there; the remark says so.
    assert wrong == ([("Mistral-7B-v0.1: Gain", "LongBench 50", 1.2)] if name == "table4" else [])


def test_averages_of_rows_are_means_of_rounded_numbers():
    for name in ("table8", "table10"):
        for row, values in find_table(name).rows.items():
            assert abs(math.fsum(values[:-1]) / 6 - values[-1]) <= 2 * ROUNDING, row


def test_tables_repeat_each_other():
    longbench, default, ablation = cells("table3"), find_table("table2").rows, find_table("table7").rows
    for row, values in find_table("table8").rows.items():
        setting, steps = re.fullmatch(r"(.*) \((\d+) steps\)", row).groups()
        assert longbench[setting, f"LongBench {steps}"] == values[-1]
    assert find_table("table3").rows["A (PG-19, EABF): CE"] == ablation["CE"][1:]
    assert find_table("table3").rows["A (PG-19, EABF): LongCE"] == ablation["LongCE (K = 4k, d = 1k, default)"][1:]
    hard = find_table("table1").rows["LongPPL-hard (default)"]
    assert hard == default["alpha = 2, beta = -2 (default)"] == find_table("table11").rows["LongPPL"]
    # The same row with other numbers in the paper, as the remarks of both tables say.
    assert find_table("table1").rows["PPL"] != find_table("table11").rows["PPL"]


def test_models_of_ones_own(tmp_path):
    assert vars(find_model(f"Mistral={tmp_path}")) == {"name": "Mistral-7B-32k", "path": str(tmp_path)}
    assert find_model(f"mine={tmp_path}").path == str(tmp_path)
    assert find_model("someone/model").name == "someone/model"
    assert find_model(str(tmp_path)).path == str(tmp_path)
    for word in ("Mistrol", "=x", "x="):
        with pytest.raises(ValueError, match=word):
            find_model(word)


def test_ours_stand_beside_theirs_and_unknown_cells_are_blank():
    table = find_table("table6")
    ours = {("Yi-6B-200k", "LongPPL"): 1.754, ("mine", "LongPPL"): 3.0, ("FILM-7B-32k", "LongPPL"): math.nan}
    text = markdown(table, ours)
    assert "| Yi-6B-200k | 1.75 / 1.75 |" in text
    assert "| mine | / 3.00 |" in text
    assert "| FILM-7B-32k | 1.64 / |" in text
    content = as_json(table, ours)["cells"]
    assert content["Yi-6B-200k"]["LongPPL"] == {"paper": 1.75, "ours": 1.754}
    assert content["FILM-7B-32k"]["LongPPL"] == {"paper": 1.64, "ours": None}
    assert content["mine"]["LongPPL"] == {"paper": None, "ours": 3.0}
