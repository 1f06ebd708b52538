"""Runs of several seeds, compared as groups."""

import math
import re

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from lightning_modules.utilities.statistics import UNITS, corpus_mean, paired_ratio, weighted_mean_interval
from longce.cli.main import main
from longce.compare.command import compare, compare_runs
from longce.compare.groups import average_documents, group_runs
from longce.compare.ratios import shared_documents
from longce.compare.runs import Cell, ComparedRun
from tests.longce.compare.test_compare import make_run

CELL = Cell("books", "judge", "alpha 2, beta -2")
TOKENS = 20.0


def tabulate(values, tokens=TOKENS):
    """Documents of which a model has these LongPPL."""
    numbers = {
        "longppl": values,
        "perplexity": np.asarray(values) * 3,
        "document": [f"{n}" for n in range(len(values))],
    }
    table = pd.DataFrame(numbers | dict.fromkeys(UNITS.values(), tokens))
    table = table.assign(key_bits_per_byte=np.log2(values), bits_per_byte=np.log2(values))
    table["longppl_per_evaluator_token"] = table["longppl_soft"] = values
    table.index = pd.MultiIndex.from_tuples([(f"text {n}", 0) for n in range(len(values))])
    return table


def draw_runs(generator, mean, seeds, documents, *, between_seeds, within):
    """``[seeds, documents]`` log LongPPL of runs: what a document costs is shared, what a seed adds is not."""
    seed_effects = between_seeds * generator.standard_normal((seeds, 1))
    noise = within * generator.standard_normal((seeds, len(documents)))
    return math.log(mean) + documents + seed_effects + noise


def is_covered(generator, *, seeds, between_seeds, documents, counts_seeds=True):
    """Whether the interval of one study holds the true ratio, 0.8."""
    costs = 0.3 * generator.standard_normal(documents)
    effects = 0.05 * generator.standard_normal(documents)  # training helps some documents more
    noise = {"between_seeds": between_seeds, "within": 0.02}
    old = draw_runs(generator, 20.0, seeds, costs, **noise)
    new = draw_runs(generator, 16.0, seeds, costs + effects, **noise)
    others = [(runs.mean(axis=1).var(ddof=1) / seeds, seeds - 1) for runs in (old, new)] if counts_seeds else []
    low, high = weighted_mean_interval(new.mean(axis=0) - old.mean(axis=0), np.ones(documents), others)
    return low < math.log(0.8) < high


@pytest.mark.parametrize(("seeds", "between_seeds"), [(3, 0.05), (2, 0.02), (5, 0.0)])
def test_the_interval_covers_the_true_ratio_of_seeds_and_documents(seeds, between_seeds):
    generator = np.random.default_rng(0)
    settings = {"seeds": seeds, "between_seeds": between_seeds, "documents": 8}
    assert 0.92 < np.mean([is_covered(generator, **settings) for _ in range(1000)]) < 0.99


def test_the_choice_of_documents_alone_would_cover_too_little():
    """With many documents, seeds decide."""
    settings = {"seeds": 3, "between_seeds": 0.05, "documents": 40}
    generator = np.random.default_rng(1)
    assert np.mean([is_covered(generator, **settings, counts_seeds=False) for _ in range(500)]) < 0.6
    assert 0.92 < np.mean([is_covered(generator, **settings) for _ in range(500)]) < 0.99


def test_the_interval_of_groups_counts_their_seeds():
    """By hand, for log LongPPL and for bits."""
    old = [tabulate(values) for values in ([4.0, 5.0, 6.0, 7.0, 9.0], [4.4, 5.2, 6.1, 7.3, 9.9])]
    new = [tabulate(values) for values in ([3.0, 4.5, 5.1, 6.0, 7.0], [3.1, 4.1, 5.5, 6.2, 7.5], [3.3, 4.4, 5, 6, 7.7])]
    shared = shared_documents(average_documents(new), average_documents(old))
    for kind in ("longppl", "key_bits_per_byte"):
        logs = [[math.log(corpus_mean(table, kind)) for table in tables] for tables in (new, old)]
        variances = [np.var(each, ddof=1) / len(each) for each in logs]
        value, (low, high) = paired_ratio(shared, kind)
        plain = paired_ratio(shared.assign(runs=1, runs_baseline=1), kind)
        assert plain[0] == value
        scale = 1.0 if kind == "longppl" else value  # of the interval: of logarithms, or of the ratio
        ends = np.log([low, high]) if kind == "longppl" else np.array([low, high])
        plain_ends = np.log(plain[1]) if kind == "longppl" else np.array(plain[1])
        by_documents = ((plain_ends[1] - plain_ends[0]) / 2 / stats.t.ppf(0.975, 4)) ** 2
        parts = [by_documents, *(scale**2 * each for each in variances)]
        freedom = sum(parts) ** 2 / sum(part**2 / each for part, each in zip(parts, (4, 2, 1), strict=True))
        assert (ends[1] - ends[0]) / 2 == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts)))


def test_numbers_are_means_over_the_runs_of_the_documents_that_all_have():
    first, second = tabulate([2.0, 3.0, 4.0]), tabulate([8.0, 3.0, 4.0])
    second.loc[("text 2", 0), "key_tokens"] = 21.0  # of another tokenizer
    found = average_documents([first, second])
    assert list(found["document"]) == ["0", "1"]
    assert list(found["longppl"]) == pytest.approx([4.0, 3.0])
    assert list(found["key_bits_per_byte"]) == pytest.approx([2.0, math.log2(3)])
    logs = [(math.log(2) + math.log(3)) / 2, (math.log(8) + math.log(3)) / 2]
    assert list(found["longppl_seed_variance"]) == pytest.approx([np.var(logs, ddof=1) / 2] * 2)
    alone = average_documents([first])
    pd.testing.assert_frame_equal(alone[first.columns], first)
    assert set(alone["longppl_seed_variance"]) == {0.0}


def make_runs(values):
    """Runs of two settings, each with a seed of its own."""
    return [
        ComparedRun(f"{setting} {seed}", {CELL: {5: tabulate(table)}}, {"model.stride": setting, "seed": f"{seed}"}, {})
        for seed, (setting, table) in enumerate(values)
    ]


def test_groups_of_one_run_are_the_runs():
    runs = make_runs([("512", [4.0, 5.0, 6.0, 7.0, 9.0]), ("1024", [3.0, 4.5, 6.5, 6.0, 8.0])])
    grouped = compare_runs(runs, group_by=["model.stride"])
    plain = compare_runs(runs).replace("512 0", "stride 512 (1 run)").replace("1024 1", "stride 1024 (1 run)")
    numbers = re.compile(r"\d+\.\d+")
    assert numbers.findall(grouped.partition("Final")[2]) == numbers.findall(plain.partition("Final")[2])


def test_what_differs_within_a_group_tells_no_groups_apart():
    runs = make_runs([("512", [4.0] * 5), ("512", [4.4] * 5), ("64", [2.0] * 5), ("64", [2.2] * 5)])
    first, second = group_runs(runs, ["model.stride"])
    assert (first.name, second.name) == ("stride 512 (2 runs)", "stride 64 (2 runs)")
    assert (first.config, second.config) == ({"model.stride": "512"}, {"model.stride": "64"})
    printed = compare_runs(runs, group_by=["model.stride"])
    assert "0.500" in printed
    assert "seed" not in printed.partition("Settings")[2]


@pytest.mark.parametrize(
    ("group_by", "named"), [(["model.strid"], "model.stride"), (["same"], "all runs have the same same")]
)
def test_settings_that_make_no_groups_are_refused(group_by, named):
    runs = [run._replace(config=run.config | {"same": "1"}) for run in make_runs([("512", [4.0]), ("64", [3.0])])]
    with pytest.raises(ValueError, match=named):
        group_runs(runs, group_by)


@pytest.mark.slow
def test_objectives_with_two_seeds_each_from_the_command_line(tmp_path, capsys):
    factors = {"CrossEntropy": (1.0, 1.02), "LongCE": (0.8, 0.81)}
    folders = []
    for objective, own in factors.items():
        for seed, factor in enumerate(own):
            folder = make_run(tmp_path / f"{objective}-{seed}", {0: 1.0, 10: factor}, objective=objective)
            settings = yaml.safe_load((folder / "hparams.yaml").read_text()) | {"seed_everything": seed}
            (folder / "hparams.yaml").write_text(yaml.safe_dump(settings))
            folders.append(str(folder))
    page = tmp_path / "page.html"
    main(["compare", *folders, "--group_by", "model.objective", "--output", str(page)])
    printed = " ".join(capsys.readouterr().out.split())
    ratio = math.sqrt(0.8 * 0.81 / 1.02)
    assert f"{ratio:.3f} [" in printed
    assert "`LongCE (2 runs)` predicts key tokens better".replace("`", "") in printed
    assert "cover the choice of documents and the seeds of the runs." in printed
    assert "seed_everything" not in printed
    assert page.stat().st_size > 1000
    assert "choice of documents; another seed" in " ".join(compare(folders).split())
