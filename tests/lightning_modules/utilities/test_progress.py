import contextlib
import io
import logging
import os
import sys

import pytest
from lightning.pytorch.utilities import rank_zero_only

from lightning_modules.utilities import progress
from lightning_modules.utilities.progress import progress_bar


@pytest.fixture
def stream(monkeypatch):
    def use(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return use


def work(**options):
    with progress_bar("Tokenising", unit="B", **options) as bar:
        for _ in range(4):
            bar.set_postfix(tokens=7, refresh=False)
            bar.update(250_000)


def test_lines_in_the_log_where_there_is_no_terminal(stream, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    output = stream(io.StringIO())
    work(total=1_000_000)
    assert [" 25%" in line for line in caplog.messages[-4:]] == [True, False, False, False]
    assert "1.00M/1.00M" in caplog.messages[-1]
    assert "tokens=7" in caplog.messages[-1]
    assert output.getvalue() == ""


def test_a_terminal_without_a_width_shows_progress(stream, caplog):
    caplog.set_level(logging.INFO)
    reader, writer = os.openpty()  # 0 columns
    with os.fdopen(writer, "w") as terminal:
        stream(terminal)
        work(total=1_000_000)
    shown = read_terminal(reader)
    assert b"1.00M/1.00M" in shown
    assert b"B/s" in shown
    assert caplog.messages == []


def read_terminal(reader):
    # A pseudo-terminal hands over what was written piece by piece, and at its end raises OSError.
    pieces = []
    with open(reader, "rb", buffering=0) as stream, contextlib.suppress(OSError):
        while piece := stream.read(65_536):
            pieces.append(piece)
    return b"".join(pieces)


def test_short_work_and_other_processes_log_nothing(stream, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    output = stream(io.StringIO())
    work()
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    work()
    assert caplog.messages == []
    assert output.getvalue() == ""
