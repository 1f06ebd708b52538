import importlib.metadata
import subprocess
import sys


def test_the_generic_package_names_belong_to_this_distribution_alone():
    owners = importlib.metadata.packages_distributions()
    for package in ("lightning_modules", "datamodules", "callbacks", "benchmarks"):
        assert set(owners.get(package, ["longce"])) == {"longce"}


def test_the_functional_core_is_light_to_import():
    heavy = {"lightning", "transformers", "datasets"}
    code = f"import sys, lightning_modules.functional; print(*({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_distribution_refuses_an_upload():
    assert "Private :: Do Not Upload" in importlib.metadata.metadata("longce").get_all("Classifier")
