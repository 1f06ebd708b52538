import pytest

from lightning_modules.commands.plan.flops import Flops
from lightning_modules.commands.plan.hardware import EFFICIENCY, GPU, GPUS, find_gpu, seconds


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"A40, .*H200"):
        find_gpu("H1000")
    with pytest.raises(ValueError, match="gpu_tflops"):
        find_gpu(None, memory=24)


def test_another_card():
    assert find_gpu(None, tflops=100, memory=32) == GPU("GPU", 100, 32)
    assert find_gpu("mine", tflops=100, memory=32) == GPU("mine", 100, 32)
    assert find_gpu("H200", memory=70) == GPU("H200", GPUS["H200"].tflops, 70)


def test_each_kind_of_work_has_its_rate():
    work = Flops(**{kind: 100e12 * rate for kind, rate in EFFICIENCY.items()})
    assert seconds(work, GPU("", 100, 1)) == pytest.approx(3)
    assert seconds(work, GPU("", 200, 1)) == pytest.approx(1.5)


def test_rates_are_dense_ones():
    assert GPUS["H100"].tflops == pytest.approx(1979 / 2, rel=0.001)
    assert GPUS["A100-80"].tflops == 312
