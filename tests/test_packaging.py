import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.longce.test_quickstart import rows


def test_no_folder_of_configs_is_taken_for_a_package():
    """While a config is read, the working directory is its folder, and `''` on the import path means that."""
    root = Path(__file__).parents[1]
    assert not [
        path.name
        for path in (root / "configs").iterdir()
        if path.is_dir() and importlib.util.find_spec(path.name) is not None
    ]


@pytest.fixture(scope="module")
def run_installed(tmp_path_factory):
    """Run the command of a built wheel, in a folder without a checkout."""
    root = Path(__file__).parents[1]
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    site = folder / "site"
    for package in ("lightning_modules", "datamodules", "callbacks", "benchmarks", "configs", "longce"):
        # With its links, as in a clone: the configs must be in the wheel through that of `longce`.
        unneeded = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / package, source / package, symlinks=True, ignore=unneeded)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(root / file, source / file)
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-cache-dir"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("longce-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    # Without the checkout, which an editable installation puts on the path or finds by a module of its own.
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(
        f"import sys\nsys.path = [path for path in sys.path if path != {str(root)!r}]\n"
        "sys.meta_path = [each for each in sys.meta_path if '__editable__' not in getattr(each, '__module__', '')]\n"
    )
    path = os.pathsep.join([str(folder / "path"), str(site)])
    environment = {**os.environ, "PYTHONPATH": path, "LONGCE_CACHE": str(folder / "cache")}

    def run(*words, cwd, **variables):
        command = [sys.executable, site / "bin" / "longce", *words]
        run = {"cwd": cwd, "env": environment | variables, "capture_output": True, "text": True}
        return subprocess.run(command, check=False, **run)

    run.site = site
    run.path = path
    return run


@pytest.mark.slow
def test_a_wheel_has_the_packages_and_the_configs_and_nothing_else(run_installed):
    names = {path.name for path in run_installed.site.iterdir() if not path.name.endswith(".dist-info")} - {"bin"}
    assert names == {"longce", "lightning_modules", "datamodules", "callbacks"}
    configs = Path(__file__).parents[1] / "configs"
    for kind in ("*.yaml", "*.sh"):
        installed = run_installed.site / "longce" / "configs"
        paths = {path.relative_to(configs) for path in configs.rglob(kind)}
        assert {path.relative_to(installed) for path in installed.rglob(kind)} == paths
        assert paths


@pytest.mark.slow
def test_a_wheel_has_everything_that_the_quickstart_needs(run_installed, tmp_path):
    """Each of its runs is a line, and its log has their commands."""
    options = "--trainer.max_steps 2 --data.train_documents 64 --data.validation_documents 8"
    # Nobody evaluates by a model of two steps: what it finds does not matter here, that it is asked does.
    options += " --trainer.log_every_n_steps 1 --trainer.val_check_interval 1"
    done = run_installed("quickstart", *options.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert [line[:5] for line in lines[:4]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert all(re.search(r" \.\. .*\d+ s$", line) for line in lines[:4])
    assert [step for step, *_ in rows(done.stdout)] == [0, 1, 2]
    assert len(lines) == 4 + 5 + 6
    report, page, log = (tmp_path / lines[n].split()[-1] for n in (-4, -3, -1))
    assert "perplexity" in report.read_text()
    assert "recall-7-1" in page.read_text()
    assert len(re.findall(r"^\$ longce ", log.read_text(), re.MULTILINE)) == 4
    assert f"tensorboard --logdir {log.parent.relative_to(tmp_path)}" in lines[-2]
    for name in ("base", "evaluator", "longce"):
        assert (tmp_path / "runs/quickstart/models" / name / "model.safetensors").is_file()


@pytest.mark.slow
def test_folders_of_the_user_replace_nothing_that_is_installed(run_installed, tmp_path):
    for name in ("callbacks", "datamodules", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('a decoy was run')")
    path = f"{tmp_path}{os.pathsep}{run_installed.path}"  # as `python -m` has it
    words = "plan --gpu H200 -c configs/base.yaml -c configs/debug.yaml --trainer.callbacks callbacks.StepCheckpoint"
    done = run_installed(*words.split(), cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "Measured (NVIDIA H200" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("has_own_benchmarks", [False, True])
def test_a_command_of_the_repository_alone_names_it(run_installed, tmp_path, has_own_benchmarks):
    path = run_installed.path
    if has_own_benchmarks:
        (tmp_path / "benchmarks").mkdir()
        path += f"{os.pathsep}{tmp_path}"
    done = run_installed("reproduce", "table5", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "a clone of the repository" in done.stderr
