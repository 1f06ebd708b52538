"""Two processes for a whole run, a limit on the CPU time of quick tests, and results of the release tests.

``pytest`` alone runs the quick tier, ``pytest -m "not long"`` also the slow one, and ``pytest -m long`` the release
tests, which take minutes. `.ci/run` enforces the limit (``--enforce-limit``), so that the quick tier stays quick.
"""

import importlib
import json
import platform
import resource
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

LIMIT = 1.0
"""CPU seconds of a test that is not marked slow, without its fixtures."""

TOLERANCE = 5.0
"""How many times the limit a test may take: the same test has taken 1.5 s on an idle machine and 4 s on a busy one."""

GATES = {}
"""Outcome, seconds and measured values of each `long` test of this run."""

IMPORTED_LATE = (
    "datasets",
    "lightning.pytorch.cli",
    "lm_eval.tasks",
    "matplotlib.pyplot",
    "pandas",
    "peft",
    "scipy.stats",
    "torchmetrics",
)
"""Libraries that some tests are the first to need. Their import is not a part of these tests."""


def pytest_addoption(parser):
    parser.addoption("--enforce-limit", action="store_true", help=f"fail tests above {LIMIT} CPU s not marked slow")
    parser.addoption(
        "--gates-json", type=Path, help="file for the results of `long` tests (benchmarks/results/gates.json)"
    )


def pytest_xdist_auto_num_workers(config):
    """Use two processes for a whole run, and none for single files: importing the libraries again takes longer."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        return 2
    config.option.dist = "no"
    return 0


def pytest_sessionstart(session):
    if session.config.getoption("--enforce-limit"):
        for name in IMPORTED_LATE:
            importlib.import_module(name)


def pytest_collection_modifyitems(items):
    """`-m "not slow"` must leave out every long test as well."""
    if wrong := [
        item.nodeid for item in items if item.get_closest_marker("long") and not item.get_closest_marker("slow")
    ]:
        raise pytest.UsageError(f"A `long` test must be marked `slow` as well: {', '.join(wrong)}.")
    # The files that take longest first, so that both processes end together. Benchmarks last: they start threads, with
    # which a process should not be forked.
    items.sort(key=lambda item: ("tests/benchmarks" in item.nodeid) - ("tests/reliability" in item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = _cpu_seconds()
    try:
        yield
    finally:
        used = _cpu_seconds() - before
        item.user_properties.append(("cpu_seconds", round(used, 1)))
    marker = item.get_closest_marker("limit")
    limit = marker.args[0] if marker else LIMIT
    if item.config.getoption("--enforce-limit") and used > limit * TOLERANCE and not item.get_closest_marker("slow"):
        pytest.fail(f"The test took {used:.1f} CPU s, above the limit of {limit}: mark it `slow`, or make it cheaper.")


def _cpu_seconds():
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_runtest_logreport(report):
    if report.when == "call" and "long" in report.keywords:
        measured = dict(report.user_properties)
        GATES[report.nodeid] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "cpu_seconds": measured.pop("cpu_seconds"),
            "measured": measured,
        }


def pytest_terminal_summary(terminalreporter, config):
    """Write the results of the release tests to a file, which keeps those of earlier runs."""
    if not GATES:
        return
    from benchmarks import results

    path = config.getoption("--gates-json") or results.FOLDER / "gates.json"
    others = ["--", ".", ":!benchmarks/results", ":!benchmarks/RESULTS.md"]
    if path.parent == results.FOLDER and results._git("status", "--porcelain", "--untracked-files=no", *others):
        terminalreporter.write_line(f"{path.name} is not written: commit or stash your changes first.")
        return
    run = {
        "commit": results._git("rev-parse", "HEAD"),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": results.describe_machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in results.LIBRARIES}},
    }
    gates = json.loads(path.read_text())["gates"] if path.exists() else {}
    gates |= {name: {**gate, **run} for name, gate in GATES.items()}
    names = ("outcome", "seconds", "cpu_seconds", "measured", "commit")
    rows = [[test, *(_as_text(gate[name]) for name in names)] for test, gate in sorted(gates.items())]
    content = {
        "title": "Release tests",
        "command": "python -m pytest -m long -n 0",
        **run,
        "data": None,
        "remark": "Tests that take minutes, each with the commit of its last run. Machine and versions: the last run.",
        "output": [{"head": ["test", "outcome", "seconds", "CPU s", "measured", "commit"], "rows": rows}],
        "gates": gates,
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    terminalreporter.write_line(
        f"The results of {len(GATES)} release tests are in {path}. `python benchmarks/results.py render` reports them."
    )


def _as_text(value):
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return value[:10] if isinstance(value, str) else str(value)
