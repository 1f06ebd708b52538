"""Two processes for a whole run, a limit on the CPU time of the quick tier, and results of the release tests.

``pytest -m core`` runs the core, ``pytest`` alone the quick tier, ``pytest -m "not long"`` also the slow one, and
``pytest -m long`` the release tests, which take minutes. `.ci/run` limits the CPU seconds of all quick tests together
(``--quick-cpu-limit``), so that the quick tier stays quick.
"""

import gc
import json
import platform
import resource
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

gc.disable()  # until all tests are collected: of what is imported, nothing is garbage

GATES = {}
"""Outcome, seconds and measured values of each `long` test of this run."""

QUICK_CPU_SECONDS = []
"""CPU seconds of each quick test of this run, in all processes."""

CPU_AT_SETUP = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption(
        "--quick-cpu-limit", type=float, help="fail the run if its tests not marked slow take more CPU seconds together"
    )
    parser.addoption(
        "--gates-json", type=Path, help="file for the results of `long` tests (benchmarks/results/gates.json)"
    )


def pytest_xdist_auto_num_workers(config):
    """Use two processes for a whole run, none for files or the core: importing the libraries again takes longer."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and config.option.markexpr != "core":
        return 2
    config.option.dist = "no"
    return 0


def pytest_ignore_collect(collection_path, config):
    """Import only the files with core tests for ``-m core``: others need packages that `dev-core` leaves out."""
    if config.option.markexpr != "core":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return all("pytest.mark.core" not in file.read_text(encoding="utf-8") for file in files) or None


def pytest_collection_modifyitems(items):
    """`-m "not slow"` must leave out every long test as well."""
    if wrong := [
        item.nodeid for item in items if item.get_closest_marker("long") and not item.get_closest_marker("slow")
    ]:
        raise pytest.UsageError(f"A `long` test must be marked `slow` as well: {', '.join(wrong)}.")
    # The files that take longest first, so that both processes end together. Benchmarks last: they start threads, with
    # which a process should not be forked.
    items.sort(key=lambda item: ("tests/benchmarks" in item.nodeid) - ("tests/reliability" in item.nodeid))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # or libraries report at the end what was not freed


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[CPU_AT_SETUP] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    finally:
        # With the fixtures that this test is the first to need. xdist sends properties to the controller.
        used = _cpu_seconds() - item.stash[CPU_AT_SETUP]
        item.user_properties.append(("cpu_seconds", round(used, 3)))


def _cpu_seconds():
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_runtest_logreport(report):
    if report.when != "call":
        return
    measured = dict(report.user_properties)
    if "slow" not in report.keywords:
        QUICK_CPU_SECONDS.append(measured["cpu_seconds"])
    if "long" in report.keywords:
        GATES[report.nodeid] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "cpu_seconds": measured.pop("cpu_seconds"),
            "measured": measured,
        }


def pytest_sessionfinish(session):
    """Fail the run, not a test: a busy machine doubles the time of single tests, and no single test slows the tier."""
    if _exceeds_quick_limit(session.config) and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _exceeds_quick_limit(config):
    limit = config.getoption("--quick-cpu-limit")
    return limit is not None and sum(QUICK_CPU_SECONDS) > limit


def pytest_terminal_summary(terminalreporter, config):
    used = f"{len(QUICK_CPU_SECONDS)} quick tests took {sum(QUICK_CPU_SECONDS):.0f} CPU s"
    if _exceeds_quick_limit(config):
        limit = config.getoption("--quick-cpu-limit")
        terminalreporter.write_line(f"{used}, above the limit of {limit:g}: make some cheaper, or mark them `slow`.")
    elif config.getoption("--quick-cpu-limit") is not None:
        terminalreporter.write_line(f"{used}.")
    if GATES:
        _write_gates(terminalreporter, config)


def _write_gates(terminalreporter, config):
    """Write the results of the release tests to a file, which keeps those of earlier runs."""
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
