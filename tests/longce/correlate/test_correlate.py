import json
import math
import re

import pytest
from scipy import stats

from benchmarks.reproduction.tables.published import published
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.scoring.records import read_records, write_records
from lightning_modules.utilities.identity import shorten_hashes
from lightning_modules.utilities.statistics import compare_correlations
from longce.cli.main import main
from longce.correlate.command import correlate
from longce.correlate.joining import join
from longce.correlate.result_files import Measured, Value
from tests.support.answers import write_evaluation
from tests.support.records import MODEL, make_record

TABLE = published()["tables"]["table5"]
MODELS = list(TABLE["rows"])
LONGPPL, PPL = ([row[column] for row in TABLE["rows"].values()] for column in (0, 3))
# The paper shows the benchmark scores of these models in figures only; made-up ones fall with LongPPL.
SCORES = [100 - 15 * value + (-1) ** number for number, value in enumerate(LONGPPL)]


@pytest.fixture
def files(tmp_path):
    """LongPPL and perplexity as `longce score` writes them, by folder; scores in a table, by name."""
    paths = []
    for model, longppl, ppl in zip(MODELS, LONGPPL, PPL, strict=True):
        paths.append(str(tmp_path / f"{model}.parquet"))
        source = MODEL._replace(name=f"/models/{model}", identity=model)
        write_records(paths[-1], [make_record("a.txt", longppl, ppl, model=source)])
    lines = [f"{model},{score}" for model, score in zip(MODELS, SCORES, strict=True)]
    (tmp_path / "scores.csv").write_text("\n".join(["model,LongBench", *lines]) + "\n")
    return [*paths, str(tmp_path / "scores.csv")]


def test_published_perplexities_against_scores(files, tmp_path, capsys):
    main(["correlate", *files, "--metrics", "longppl", "perplexity", "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    pairs = {pair["metric"]: pair for pair in json.loads((tmp_path / "out" / "correlation.json").read_text())["pairs"]}
    for name, values in (("longppl", LONGPPL), ("perplexity", PPL)):
        linear = pairs[name]["pearson"]
        assert linear["value"] == pytest.approx(stats.pearsonr(values, SCORES).statistic)
        assert pairs[name]["spearman"]["value"] == pytest.approx(stats.spearmanr(values, SCORES).statistic)
        low, high = linear["interval"]
        assert low <= linear["value"] <= high
        assert f"{linear['value']:.2f} [{low:.2f}, {high:.2f}]" in printed
        assert pairs[name]["models"] == MODELS
    assert pairs["longppl"]["pearson"]["value"] < -0.95
    (difference,) = json.loads((tmp_path / "out" / "correlation.json").read_text())["differences"]
    expected = compare_correlations(LONGPPL, PPL, SCORES)
    assert difference["spearman"] == {"value": expected.value, "interval": [*expected.interval], "p": expected.p}
    assert f"longppl - perplexity  {len(MODELS)}" in printed
    report = (tmp_path / "out" / "report.md").read_text()
    assert "figures/LongBench-longppl.svg" in report
    svg = (tmp_path / "out" / "figures" / "LongBench-longppl.svg").read_text()
    assert svg.startswith("<?xml")
    assert all(f">{model}</text>" in svg for model in MODELS)
    assert "data:image/svg+xml" in (tmp_path / "out" / "report.html").read_text()


def test_too_few_models_and_unknown_names_are_refused(files, tmp_path):
    out = str(tmp_path / "out")
    with pytest.raises(ValueError, match=r"needs at least 3 models .* have 2\. .*Yarn-7B-128k: no longppl"):
        correlate([*files[:2], files[-1]], out)
    with pytest.raises(ValueError, match=r"No scores 'LongBnch' in these files, only LongBench"):
        correlate(files, out, scores=["LongBnch"])
    with pytest.raises(ValueError, match="These files have no scores"):
        correlate(files[:-1], out)
    with pytest.raises(SystemExit) as stopped:
        main(["correlate", files[-1], "--output", out])
    assert stopped.value.code == 2
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"Cannot write to the folder .*Choose another one with `--output`"):
        correlate(files, files[0])


def measured(model, values, **settings):
    return Measured("a.csv", model, {name: Value(number, settings) for name, number in values.items()})


def test_models_are_the_same_by_the_last_part_of_their_names():
    entries = [measured("a/M", {"x": 1.0}), measured("M", {"y": 2.0}), measured("b/N/", {"x": 3.0})]
    assert join(entries).values == {"M": {"x": 1.0, "y": 2.0}, "N": {"x": 3.0}}
    other = [measured("a/M", {"x": 1.0}), measured("b/M", {"x": 2.0}), measured("M", {"y": 3.0})]
    assert set(join(other).values) == {"a/M", "b/M", "M"}
    with pytest.raises(ValueError, match=r"'M' has x = 1 in a.csv and 2 in a.csv"):
        join([measured("M", {"x": 1.0}), measured("M", {"x": 2.0})])
    same = join([measured("M", {"x": math.nan}), measured("M", {"x": math.nan})])
    assert math.isnan(same.values["M"]["x"])


def test_other_settings_make_another_metric():
    entries = [measured("M", {"longppl": float(number)}, evaluator=name, K=9) for number, name in enumerate("ab")]
    joined = join([*entries, measured("M", {"perplexity": 5.0})])
    assert joined.names("metrics") == ["longppl [evaluator=a]", "longppl [evaluator=b]", "perplexity"]
    assert join(entries[:1]).names("metrics") == ["longppl"]


def provenance(**changed):
    return Provenance(
        **{"identity": "sha256:" + 64 * "a", "tokenizer": "t", "dtype": "float32", "attention": "sdpa"} | changed
    )


@pytest.mark.parametrize(
    "changed", [{"identity": "sha256:" + 64 * "b"}, {"tokenizer": "u"}, {"dtype": "bfloat16"}, {"attention": "eager"}]
)
def test_models_of_one_name_but_different_content_or_numerics_are_different(changed):
    one, other = (
        measured("M", {name: 1.0})._replace(provenance=found)
        for name, found in (("longppl", provenance()), ("score", provenance(**changed)))
    )
    assert set(join([one, one._replace(values={"score": Value(2.0)})]).values) == {"M"}
    (key,) = changed
    assert set(join([one, other]).values) == {
        f"M [{key}={shorten_hashes(getattr(found, key))}]" for found in (provenance(), provenance(**changed))
    }
    unknown = measured("M", {"ppl": 3.0})
    assert set(join([one, unknown]).values) == {"M"}
    with pytest.raises(ValueError, match="but the other files have 2 versions of it"):
        join([one, other, unknown])


def test_a_model_may_be_given_by_several_paths():
    def names(first, second):
        entries = (("models/M", "longppl", first), ("./models/M", "score", second))
        return set(join([measured(path, {name: 1.0})._replace(provenance=of) for path, name, of in entries]).values)

    assert names(provenance(), provenance()) == {"M"}
    assert names(provenance(), provenance(identity="sha256:" + 64 * "b")) == {"models/M", "./models/M"}
    in_training = provenance(identity="")
    assert names(in_training, in_training) == {"models/M", "./models/M"}


@pytest.mark.parametrize("table", ["models/M", "org/M", "M"])
def test_a_table_may_have_any_name_of_a_model(table):
    content = provenance()
    of_folder = measured("models/M", {"longppl": 1.0})._replace(provenance=content)
    of_hub = measured("org/M", {"perplexity": 1.0})._replace(provenance=content)
    entries = [of_folder, of_hub, measured(table, {"score": 1.0})]
    assert list(join(entries).values) == ["M"]
    changed = of_hub._replace(provenance=provenance(identity="sha256:" + 64 * "b"))
    with pytest.raises(ValueError, match="2 versions"):
        join([*entries, changed])


def change_models(file, **changed):
    """Write the records of a file again, as of a model that differs in this."""
    write_records(file, [record._replace(model=record.model._replace(**changed)) for record in read_records(file)])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"precision": "bf16-mixed"}, "none (`{0}`) against bf16-mixed (`{1}`"),
        ({"dtype": "served", "attention": "served", "precision": "served"}, "The precision of "),
    ],
)
def test_values_of_other_numerics_are_another_metric_and_the_difference_is_named(files, tmp_path, changed, said):
    for file in files[1:-1]:
        change_models(file, **changed)
    printed = correlate(files, str(tmp_path / "out"))
    assert re.search(rf"longppl \[({'|'.join(changed)})=", printed)
    assert not re.search(r"longppl +9", printed)
    assert said.format(*(f"/models/{model}" for model in MODELS)) in printed
    with pytest.raises(ValueError, match="differ" if len(changed) == 1 else "not recorded"):
        correlate([*files[:3], files[-1]], str(tmp_path / "few"))


def test_equal_scores_have_no_correlation_and_the_others_do(tmp_path):
    (tmp_path / "a.csv").write_text("model,LongPPL,x,y\nA,1,3,5\nB,2,2,5\nC,3,1,5\n")
    said = correlate([str(tmp_path / "a.csv")], str(tmp_path / "out"))
    assert "all models have the value 5" in said
    assert "-1.00 (p = 0.33)" in said
    assert re.search(r"x +longppl ", said)
    assert f"The precision of `{tmp_path / 'a.csv'}` is not recorded" in said


def test_means_over_other_lengths_are_not_thrown_together(tmp_path):
    for number, lengths in enumerate(((4096, 8192), (4096, 8192), (4096, 8192), (4096,))):
        scores = {("vt", length): [0.9 - length / 102400 - number / 100] for length in lengths}
        write_evaluation(tmp_path / f"m{number}", scores, model=f"m{number}", mode="generate")
    (tmp_path / "ppl.csv").write_text("model,ppl\n" + "".join(f"m{number},{number + 2}\n" for number in range(4)))
    files = [str(tmp_path / name) for name in ("m0", "m1", "m2", "m3", "ppl.csv")]
    correlate(files, str(tmp_path / "out"))
    pairs = {pair["score"]: pair for pair in json.loads((tmp_path / "out" / "correlation.json").read_text())["pairs"]}
    assert pairs["average [lengths=[4096, 8192]]"]["models"] == ["m0", "m1", "m2"]
    assert pairs["average [lengths=[4096]]"]["models"] == ["m3"]
    assert len(list((tmp_path / "out" / "figures").iterdir())) == 2
