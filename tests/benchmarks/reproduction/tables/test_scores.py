import pytest

from benchmarks.reproduction.tables.scores import benchmarks, read_scores, without_steps


def test_files_and_folders_are_read_alike(tmp_path):
    (tmp_path / "a.csv").write_text("model,LongBench,RULER\nQwen/Qwen2-7B,42.5,\nA-CE-50,24,34.5\n")
    (tmp_path / "b.csv").write_text("model,RULER,LongEval\nQwen2,80,\n")
    expected = {"Qwen2-7B-128k": {"LongBench": 42.5, "RULER": 80.0}, "A-CE-50": {"LongBench": 24.0, "RULER": 34.5}}
    assert read_scores([str(tmp_path)]) == expected
    assert read_scores([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]) == expected
    assert read_scores([]) == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "name,LongBench\nM,1\n", "model"),
        ("a.csv", "model,LongBnch\nM,1\n", "LongBnch"),
        ("a.csv", "model,LongBench\nM,nan\n", "LongBench"),
        ("a.csv", "model,LongBench\nM,1\nM,2\n", "LongBench"),
        ("a.json", "[]", r"a\.json"),
        ("a.txt", "", r"a\.txt"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_scores([str(tmp_path / name)])


def test_columns_and_their_steps():
    assert without_steps("LongBench 50") == ("LongBench", 50)
    assert without_steps("Few-shot Learning") == ("Few-shot Learning", None)
    assert without_steps("LongEval 2k") == ("LongEval 2k", None)
    assert {"LongBench", "LongEval", "RULER", "MMLU", "Synthetic Tasks", "LongEval 28k"} <= benchmarks()
    assert not any(name.endswith((" 50", " 100", " 200")) for name in benchmarks())
