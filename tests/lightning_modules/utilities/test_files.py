import os

import pytest

from lightning_modules.utilities import files
from lightning_modules.utilities.files import (
    atomic_folder,
    default_cache_dir,
    remove_folder,
    writable_folder,
    write_atomically,
)


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0, 0o666, 0o777)])
def test_the_umask_decides_who_may_read(tmp_path, umask, file, folder):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", b"content")
        with atomic_folder(tmp_path / "folder") as unfinished:
            (unfinished / "inside").touch()
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("file", "folder", "folder/inside")]
    assert modes == [file, folder, file]


def test_a_failure_leaves_nothing(tmp_path):
    def interrupted():
        with atomic_folder(tmp_path / "target") as folder:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_who_publishes_first_wins(tmp_path):
    with atomic_folder(tmp_path / "target") as late:
        (late / "file").write_text("late")
        with atomic_folder(tmp_path / "target") as early:
            (early / "file").write_text("early")
            assert not (tmp_path / "target").exists(), "it appears whole"
    assert (tmp_path / "target" / "file").read_text() == "early"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    remove_folder(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_remedy(tmp_path):
    with pytest.raises(OSError) as error, atomic_folder(tmp_path / "target"):  # noqa: PT011 - the note is checked below
        raise OSError(28, "No space left on device")
    assert "`cache_dir`" in error.value.__notes__[0]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="`cache_dir`"):
        writable_folder(tmp_path / "file" / "cache")


def test_the_cache_is_the_folder_of_the_environment_or_one_at_home(monkeypatch):
    monkeypatch.setenv("LONGCE_CACHE", "/scratch/cache")
    assert str(default_cache_dir()) == "/scratch/cache"
    monkeypatch.delenv("LONGCE_CACHE")
    assert str(default_cache_dir()).endswith("/.cache/longce")


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_folder_is_replaced(tmp_path, monkeypatch, in_one_step):
    if not in_one_step:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda _: None)
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "target", replace=True) as folder:
            (folder / content).mkdir()
            (folder / content / "file").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["new"]
    with pytest.raises(KeyError), atomic_folder(tmp_path / "target", replace=True):
        raise KeyError
    assert (tmp_path / "target" / "new" / "file").read_text() == "new"
