import zlib

import numpy as np
import pytest

from datamodules.token_store import checksums
from datamodules.token_store.checksums import CheckedFile, ChecksummedWriter, check_file

BLOCK = 16  # bytes, 8 numbers


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", BLOCK)
    monkeypatch.setattr(checksums, "_READ_BLOCKS", 3)


@pytest.fixture
def files(tmp_path):
    """50 numbers in 6 blocks and a quarter."""
    return written(np.arange(50, dtype="<u2"), tmp_path, pieces=[7, 1, 8, 0, 20])


def written(numbers, folder, pieces):
    with (folder / "numbers").open("wb") as file, (folder / "checksums").open("wb") as checksum_file:
        writer = ChecksummedWriter(file, checksum_file)
        for piece in np.split(numbers, np.cumsum(pieces)):
            writer.write(piece.data.cast("B"))
        writer.finish()
    return folder / "numbers", folder / "checksums"


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_checksum_for_each_block_however_it_was_written(files):
    content = np.arange(50, dtype="<u2").tobytes()
    assert files[0].read_bytes() == content
    expected = [zlib.crc32(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK)]
    assert np.fromfile(files[1], dtype="<u4").tolist() == expected


@pytest.mark.parametrize("count", [0, 8, 16])
def test_no_checksum_of_an_empty_block(tmp_path, count):
    files = written(np.arange(count, dtype="<u2"), tmp_path, pieces=[])
    assert files[1].stat().st_size == count // 8 * 4
    check_file(*files)


def test_reads_are_slices(files):
    for start, stop in [(0, 50), (0, 1), (7, 9), (8, 16), (48, 50), (20, 20)]:
        checked = CheckedFile(*files, "<u2")
        for _ in range(2):
            assert checked.read(start, stop).tolist() == list(range(start, stop))
    check_file(*files)


def test_every_flipped_bit_is_found_where_it_is_read_and_nowhere_else(files):
    for bit in np.random.default_rng(0).choice(800, 60, replace=False).tolist():
        flip(files[0], bit)
        first = bit // 8 // BLOCK * 8  # number in the block
        with pytest.raises(ValueError, match=f"numbers is not what was written.* {first * 2} to {first * 2 + 15}"):
            check_file(*files)
        checked = CheckedFile(*files, "<u2")
        number = min(bit // 16, 49)
        with pytest.raises(ValueError, match="is not what was written"):
            checked.read(number, number + 1)
        assert checked.read(0, first).tolist() == list(range(first))
        assert checked.read(first + 8, 50).tolist() == list(range(first + 8, 50))
        flip(files[0], bit)
    check_file(*files)


def test_a_block_is_checked_once(files):
    checked = CheckedFile(*files, "<u2")
    checked.read(0, 10)
    flip(files[1], 0)  # the map sees it
    checked.read(0, 10)
    with pytest.raises(ValueError, match="not what was written"):
        CheckedFile(*files, "<u2").read(0, 10)


@pytest.mark.parametrize("size", [0, 48, 95, 99, 101, 112, 113])
def test_a_file_of_another_size_is_found(files, size):
    files[0].write_bytes((files[0].read_bytes() + bytes(20))[:size])
    with pytest.raises(ValueError, match=r"is not what was written|ends after"):
        check_file(*files)
