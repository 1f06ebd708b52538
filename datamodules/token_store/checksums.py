"""Files that know when they were damaged: a checksum for every 64 KiB, checked where and when something is read.

CRC-32 finds every flipped bit and every torn or shifted write in a block but one in four billion, and nothing in the
standard library is faster. Small blocks keep reading at random cheap: a row of 32k tokens lies in one or two of them.
"""

import zlib
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 16
"""Bytes that share a checksum; part of the format of every file that has such checksums."""

_READ_BLOCKS = 16  # at a time, when a whole file is checked: what stays in a core's cache


class ChecksummedWriter:
    """Appends to a file, and the checksum of every :data:`BLOCK` bytes (``<u4``) to another one.

    Args:
        file: Open for writing, at its start.
        checksums: Likewise.
    """

    def __init__(self, file: BinaryIO, checksums: BinaryIO) -> None:
        self._file = file
        self._checksums = checksums
        self._crc = self._filled = 0

    def write(self, content: bytes | memoryview) -> None:
        """Append some bytes; blocks begin and end where they like."""
        self._file.write(content)
        view = memoryview(content)
        while view:
            piece, view = view[: BLOCK - self._filled], view[BLOCK - self._filled :]
            self._crc = zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            if self._filled == BLOCK:
                self.finish()

    def finish(self) -> None:
        """Write the checksum of the last block, though it is not full; nothing may be appended then."""
        if self._filled:
            self._checksums.write(self._crc.to_bytes(4, "little"))
            self._crc = self._filled = 0


class CheckedFile:
    """A memory-mapped array of numbers, of which every block is checked when it is first read.

    Args:
        path: The file.
        checksums: The file of its checksums.
        dtype: Of the numbers; their size divides :data:`BLOCK`.
    """

    def __init__(self, path: Path, checksums: Path, dtype: str) -> None:
        self.path = path
        self.values: NDArray = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
        self._expected = np.memmap(checksums, dtype="<u4", mode="r").view(np.ndarray)
        self._per_block = BLOCK // self.values.itemsize

    def read(self, start: int, stop: int) -> NDArray:
        """``values[start:stop]``, once they are sure to be what was written.

        Raises:
            ValueError: If a block that holds some of them is damaged; the message is a clause that names it.
        """
        first, last = start // self._per_block, -(-stop // self._per_block)
        if not self._checked[first:last].all():
            for block in range(first, last):
                self._check(block)
        return self.values[start:stop]

    @cached_property
    def _checked(self) -> NDArray[np.bool_]:
        """Whether this process has found a block whole."""
        return np.zeros(len(self._expected), dtype=np.bool_)

    def _check(self, block: int) -> None:
        if not self._checked[block]:
            found = zlib.crc32(self.values[block * self._per_block : (block + 1) * self._per_block].data)
            if found != self._expected[block]:
                raise ValueError(_damage(self.path, block))
            self._checked[block] = True


def check_file(path: Path, checksums: Path) -> None:
    """Read a whole file and compare; unlike a memory map this leaves no trace in the process's memory.

    Raises:
        ValueError: If a block is damaged; the message is a clause that names the first one.
    """
    expected = np.fromfile(checksums, dtype="<u4")
    buffer = memoryview(bytearray(_READ_BLOCKS * BLOCK))
    block = 0
    with path.open("rb", buffering=0) as file:
        while size := _filled(file, buffer):
            for start in range(0, size, BLOCK):
                if block >= len(expected) or zlib.crc32(buffer[start : min(start + BLOCK, size)]) != expected[block]:
                    raise ValueError(_damage(path, block))
                block += 1
    if block != len(expected):
        raise ValueError(f"{path.name} ends after {block:,} of {len(expected):,} blocks")


def _filled(file: BinaryIO, buffer: memoryview) -> int:
    """Fill the buffer as far as the file goes: a raw file may give less than it was asked for."""
    size = 0
    while size < len(buffer) and (count := file.readinto(buffer[size:])):  # type: ignore[attr-defined]
        size += count
    return size


def _damage(path: Path, block: int) -> str:
    return f"{path.name} is not what was written, somewhere in bytes {block * BLOCK:,} to {(block + 1) * BLOCK - 1:,}"
