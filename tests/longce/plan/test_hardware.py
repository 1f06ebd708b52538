import json

import pytest

from longce.plan import hardware
from longce.plan.flops import Flops
from longce.plan.hardware import GPU, GPUS, Range, Rates, find_gpu, find_rates, recognize_gpu

WORK = Flops(gemm=800e12, attention=300e12, attention_backward=100e12)
MEASURED = {
    "gpu": "H200",
    "peak_tflops": 1000.0,
    "date": "2026-12-01",
    "source": "NVIDIA H200, 2026-12-01",
    "rates": {"gemm": 800.0, "attention": 600.0, "attention_backward": 500.0},
    # At these rates, WORK takes 1 + 0.5 + 0.2 s.
    "rows": {
        "bf16": {"seconds": 2.04, "flops": WORK.__dict__, "autocast": False, "plain": True},
        "also bf16": {"seconds": 1.87, "flops": WORK.__dict__, "autocast": False, "plain": True},
        "compiled": {"seconds": 1.0, "flops": WORK.__dict__, "autocast": False, "plain": False},
        "autocast": {"seconds": 3.4, "flops": WORK.__dict__, "autocast": True, "plain": True},
        "does not fit": {"skipped": "needs 200 GiB"},
    },
}


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"A40, .*H200"):
        find_gpu("H1000")
    with pytest.raises(ValueError, match="gpu_tflops"):
        find_gpu(None, memory=24)


@pytest.mark.parametrize("name", ["A100", "a100_80", "NVIDIA A100-SXM4-80GB"])
def test_other_spellings_of_a_name_are_known(name):
    assert find_gpu(name) == GPUS["A100-80"]


def test_another_card():
    assert find_gpu(None, tflops=100, memory=32)[:3] == ("GPU", 100, 32)
    assert find_gpu("mine", tflops=100, memory=32)[:3] == ("mine", 100, 32)
    assert find_gpu("H200", memory=70) == GPUS["H200"]._replace(memory=70)


def test_each_kind_of_work_has_its_rate():
    rates = Rates(slowdown=Range(1.0, 1.5))
    kinds = ("gemm", "attention", "attention_backward")
    work = Flops(**{kind: 100e12 * getattr(rates, kind) for kind in kinds})
    assert rates.seconds(work, GPU("", 100, 1)) == pytest.approx((3, 4.5))
    assert rates.seconds(work, GPU("", 200, 1)) == pytest.approx((1.5, 2.25))


def test_measured_rates_replace_assumed_ones_of_the_same_card(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "RESULTS", tmp_path)
    assert find_rates(GPUS["H200"], autocast=False) == Rates()
    (tmp_path / "gpu_old.json").write_text(json.dumps({**MEASURED, "date": "2026-11-30", "rates": {"gemm": 1.0}}))
    (tmp_path / "gpu_h200.json").write_text(json.dumps(MEASURED))
    assert find_rates(GPUS["H100"], autocast=False) == Rates()
    rates = find_rates(GPUS["H200"], autocast=False)
    assert (rates.gemm, rates.attention, rates.attention_backward) == (0.8, 0.6, 0.5)
    assert rates.slowdown == pytest.approx((0.95 * 1.87 / 1.7, 1.05 * 2.04 / 1.7)), "of the steps in bfloat16"
    assert rates.measured == ("gemm", "attention", "attention_backward", "slowdown")
    assert find_rates(GPUS["H200"], autocast=True).slowdown == pytest.approx((0.95 * 2, 1.05 * 2))
    assert find_rates(GPUS["H100"], str(tmp_path / "gpu_h200.json"), autocast=False) == rates, "named explicitly"


def test_what_a_measurement_lacks_is_assumed(tmp_path):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({**MEASURED, "rates": {"gemm": 790.0}}))
    rates = find_rates(GPUS["H200"], str(file), autocast=False)
    assert (rates.gemm, rates.measured) == (0.79, ("gemm",))
    assert (rates.attention, rates.slowdown) == (Rates().attention, Rates().slowdown)
    for text in ("{}", "{"):
        file.write_text(text)
        with pytest.raises(ValueError):  # noqa: PT011, JSON's own or ours
            find_rates(GPUS["H200"], str(file), autocast=False)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_gpu_is_recognized_by_its_name_in_cuda(device, name):
    assert recognize_gpu(device) == (name and GPUS[name])


def test_an_h200_has_the_rates_that_were_measured(assumed_rates, monkeypatch):
    assert find_rates(GPUS["H200"], autocast=False) == Rates()
    monkeypatch.setattr(hardware, "RESULTS", assumed_rates)
    rates = find_rates(GPUS["H200"], autocast=False)
    assert rates.measured == ("gemm", "attention", "attention_backward", "slowdown")
    assert (
        0.5 < rates.attention_backward < rates.attention < rates.gemm < 1 < rates.slowdown.low < rates.slowdown.high < 2
    )
    assert find_rates(GPUS["H100"], autocast=False) == Rates(), "another card"
