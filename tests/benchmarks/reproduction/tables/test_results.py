import json
import math

import numpy as np
import pytest

from benchmarks.reproduction.tables.results import (
    DocumentResult,
    Result,
    mean_seconds,
    read_result,
    read_results,
    read_times,
    result_path,
    save_times,
)
from lightning_modules.utilities.statistics import weighted_mean_interval

SETTINGS = {"stride": 16, "documents": 2}


def result(model="M", evaluator="E", settings=SETTINGS, failure=None, total=-6.0):
    documents = [
        DocumentResult("a", 10, 2.0, {"hard": (total, 3.0), "none": (0.0, 0.0)}),
        DocumentResult("b", 20, 1.0, {"hard": (-1.0, 1.0), "none": (0.0, 0.0)}),
    ]
    return Result(model, evaluator, settings, {"model_path": "x"}, [] if failure else documents, failure)


def test_both_averages_by_hand():
    assert result().value("hard", "tokens") == pytest.approx(math.exp(7 / 4))
    assert result().value("hard", "documents") == pytest.approx((3 * math.exp(2) + math.exp(1)) / 4)
    assert math.isnan(result().value("none", "tokens"))
    assert math.isnan(result().value("unknown", "documents"))


def test_folders_are_merged_and_success_goes_before_failure(tmp_path):
    one, two, three = (tmp_path / name for name in "123")
    result(failure="later").save(two)
    result(failure="out of memory").save(one)
    result(model="N").save(one)
    result().save(two)
    result(total=-60.0).save(three)
    merged = read_results([one, two, three])
    assert set(merged) == {("M", "E"), ("N", "E")}
    assert merged["M", "E"].value("hard", "tokens") == result().value("hard", "tokens")


def test_other_settings_are_refused_by_name(tmp_path):
    result().save(tmp_path / "1")
    result(model="N", settings=SETTINGS | {"stride": 32}).save(tmp_path / "2")
    with pytest.raises(ValueError, match="stride"):
        read_results([tmp_path / "1", tmp_path / "2"])
    with pytest.raises(ValueError, match="documents"):
        read_results([tmp_path / "1"], SETTINGS | {"documents": 3})


@pytest.mark.parametrize("content", ["", '{"format": "longce-reproduce-1"}'])
def test_damaged_files_are_named(tmp_path, content):
    path = result_path(tmp_path, "M", "E")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ValueError, match=r"M/E\.json' is not a result"):
        read_result(path)


def test_the_first_time_measured_counts_for_nothing(tmp_path):
    assert mean_seconds([None, 9.0, 1.0, None, 3.0]) == 2.0
    assert math.isnan(mean_seconds([None, 9.0]))
    save_times(tmp_path / "empty", "E/x", SETTINGS, [9.0])
    save_times(tmp_path / "full", "E/x", SETTINGS, [9.0, 1.5])
    assert not (tmp_path / "empty").exists()
    assert mean_seconds(read_times([tmp_path / "empty", tmp_path / "full"], "E/x")) == 1.5
    assert read_times([tmp_path], "E/x") == []
    json.loads(next((tmp_path / "full" / "evaluators").iterdir()).read_text())


def test_intervals_are_over_documents():
    sums = [(-20.0, 10.0), (-33.0, 11.0), (-24.0, 12.0), (-39.0, 13.0), (-28.0, 14.0), (0.0, 0.0)]
    documents = [DocumentResult(str(number), 20, 1.0, {"all": pair}) for number, pair in enumerate(sums)]
    result = Result("M", "E", {}, documents=documents)
    means, weights = np.array([2.0, 3.0, 2.0, 3.0, 2.0]), np.arange(10.0, 15.0)
    expected = weighted_mean_interval(means, weights)
    assert result.interval("all", "tokens") == pytest.approx(tuple(np.exp(expected)))
    assert result.interval("all", "documents") == weighted_mean_interval(np.exp(means), weights)
    low, high = result.interval("all", "tokens")
    assert low < result.value("all", "tokens") < high
    assert Result("M", "E", {}, documents=documents[:4]).interval("all", "tokens") is None
    assert Result("M", "E", {}).interval("all", "tokens") is None
