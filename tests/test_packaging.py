import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_generic_package_names_belong_to_this_distribution_alone():
    owners = importlib.metadata.packages_distributions()
    for package in ("lightning_modules", "datamodules", "callbacks", "benchmarks"):
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
