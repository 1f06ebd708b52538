"""Processes forked from a server that has imported everything, which takes a new process seven CPU seconds.

The server has no threads but one of jemalloc, which knows of forks, so that the forked processes may fork as well.
"""

import atexit
import contextlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver

from tests.support.pages import ROOT


def forks():
    """Return multiprocessing's context of the server, which is started if needed."""
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    with contextlib.chdir(ROOT):  # where the server looks for modules
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def call(function, *arguments):
    """Return what a function returns in a process of its own."""
    pool = ProcessPoolExecutor(1, mp_context=forks(), initializer=enter, initargs=(dict(os.environ),))
    with pool:
        try:
            return pool.submit(function, *arguments).result()
        except BaseException:  # such as a timeout, after which the pool would wait for the process
            for process in list(pool._processes.values()):
                process.kill()
            raise


def start(function, *arguments, out, err=None):
    """Start a function in a process of its own, which appends what it prints to one or two files."""
    process = forks().Process(target=_run, args=(dict(os.environ), out, err or out, function, arguments))
    process.start()
    atexit.register(process.kill)  # or multiprocessing would wait for one that a failed test has left
    return process


def enter(variables):
    """Set the environment variables of a forked process, and the start method of those it starts as in a command."""
    os.environ.clear()
    os.environ |= variables
    multiprocessing.set_start_method(None, force=True)


def _run(variables, out, err, function, arguments):
    enter(variables)
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY), descriptor)
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not, unlike the end of a command
