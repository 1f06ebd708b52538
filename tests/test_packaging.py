import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_generic_package_names_belong_to_this_distribution_alone():
    owners = importlib.metadata.packages_distributions()
    for package in ("lightning_modules", "datamodules", "callbacks", "longce"):
        assert set(owners.get(package, ["longce"])) == {"longce"}


@pytest.mark.slow
def test_the_functional_core_is_light_to_import():
    heavy = {"lightning", "transformers", "datasets"}
    code = f"import sys, lightning_modules.functional; print(*({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.slow
def test_peft_and_bitsandbytes_are_imported_for_adapters_only():
    code = "import sys, callbacks, datamodules, lightning_modules.long_context_lm; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"peft", "bitsandbytes"} & set(loaded)


def test_no_folder_of_configs_is_taken_for_a_package():
    """While a config is read, the working directory is its folder, and `''` on the import path means that."""
    root = Path(__file__).parents[1]
    assert not [
        path.name
        for path in (root / "configs").iterdir()
        if path.is_dir() and importlib.util.find_spec(path.name) is not None
    ]


def test_distribution_refuses_an_upload():
    assert "Private :: Do Not Upload" in importlib.metadata.metadata("longce").get_all("Classifier")


@pytest.mark.slow
def test_a_wheel_has_everything_that_the_quickstart_needs(tmp_path):
    root, source, site = Path(__file__).parents[1], tmp_path / "source", tmp_path / "site"
    for package in ("lightning_modules", "datamodules", "callbacks", "benchmarks", "configs", "longce"):
        # With the files that links lead to, as in an archive.
        shutil.copytree(root / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(root / file, source / file)
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-cache-dir"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = tmp_path.glob("longce-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    names = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} - {"bin"}
    assert names == {"longce", "lightning_modules", "datamodules", "callbacks"}
    (tmp_path / "empty").mkdir()
    code = "import sys, longce; from longce.__main__ import main; main(sys.argv[1:])"
    code += f"; assert longce.__file__.startswith({str(site)!r}), longce.__file__"
    options = "--trainer.max_steps 2 --trainer.val_check_interval 1 --trainer.log_every_n_steps 1"
    options += " --data.train_documents 64 --data.validation_documents 8"
    run = [sys.executable, "-c", code, "quickstart", *options.split()]
    environment = {**os.environ, "PYTHONPATH": str(site), "LONGCE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(run, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # A command of the repository alone names it, and a package of the user's replaces none of ours.
    (tmp_path / "empty" / "callbacks").mkdir()
    (tmp_path / "empty" / "callbacks" / "__init__.py").write_text("raise RuntimeError")
    for words, printed in (
        (["reproduce", "table5"], "a clone of the repository"),
        (["plan", "--gpu", "H200", "-c", "configs/base.yaml"], "measured"),
    ):
        run = [sys.executable, "-c", code, *words]
        done = subprocess.run(run, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, check=False)
        assert printed in done.stdout + done.stderr
