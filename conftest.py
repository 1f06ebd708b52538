"""Two processes for a whole run, and a limit on the CPU time of tests that are not marked slow.

``pytest`` alone runs the quick tier, ``pytest -m "not long"`` also the slow one, and ``pytest -m long`` the gates that
take minutes. `.ci/run` enforces the limit (``--enforce-limit``), so that the quick tier stays quick.
"""

import importlib
import resource

import pytest

LIMIT = 3.0
"""CPU seconds of a test that is not marked slow, without its fixtures: three times what it should take, as a busy
machine needs more for the same work."""

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
    yield
    used = _cpu_seconds() - before
    if item.config.getoption("--enforce-limit") and used > LIMIT and not item.get_closest_marker("slow"):
        pytest.fail(f"The test took {used:.1f} CPU s, above the limit of {LIMIT}: mark it `slow`, or make it cheaper.")


def _cpu_seconds():
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
