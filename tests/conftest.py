"""What every test starts from, and who runs which of them when processes share the work (`-n 3`, make test)."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

try:
    import hypothesis
except ModuleNotFoundError:  # tests/gpu need none, and a GPU host may have none
    pass
else:
    # How long it takes to make an example says how busy the machine is, not whether the code is right.
    hypothesis.settings.register_profile("project", suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("project")

STALLS = 0.02
"""Of the callbacks of event loops, the share that begins late ..."""
STALL_SECONDS = 0.03
"""... and by how much, at most (`--stall`)."""

# What tests of several files, and of several folders, are made of; child processes of tests find it as well.
sys.path += [str(parts) for parts in sorted(Path(__file__).parent.glob("*/parts"))]

# A shell that runs pytest in the background makes it ignore Ctrl-C, and its children inherit that; some tests
# send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Of OpenMP's threads those that wait sleep: here processes share the processors, and one that spins at a barrier keeps
# another from coming to it. For this process, whose torch is not loaded yet, and for all that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Which start checks its programs by tracing is drawn at random; a test that wants it says so.
os.environ.setdefault("TORCHRELAY_PROGRAMS_CHECK", "0")

QUICK = (
    "tests/unit/",
    "tests/service/access/test_access.py",
    "tests/service/access/test_tokens.py",
    "tests/service/cache/test_cache.py",
    "tests/service/compile/test_compile.py",
    "tests/service/compile/test_single_flight.py",
    "tests/workers/process/",
    "tests/e2e/client/test_commands.py",
    "tests/e2e/training/test_jobs.py",
    "tests/e2e/tuning/test_tune_jobs.py",
)
"""What `make test` runs, files and folders: what takes milliseconds, and of each part of the system something real. The
last three share one service, and compile, tune and train on it."""
NOT_QUICK = tuple(f"tests/unit/project/test_{name}.py" for name in ("docs", "site", "two_processes"))
"""Files in these folders that `make test` leaves out: `make check` runs the first two, the third runs pytest itself.
Tests with Hypothesis are left out too, since each of them runs hundreds of examples."""
SLOW_SECONDS = 1500
"""After which a slow test is stopped; others after `timeout` of pyproject.toml."""
SHARE = re.compile(r"\d+/[1-9]\d*")

ONE_SERVICE = ("tests/compile/", "tests/e2e/", "tests/train_parallel/")
"""Folders whose tests share one service: each folder goes to one process, as a whole ..."""
OWN_SERVICES = (
    "tests/compile/databases/test_captured.py",
    "tests/e2e/own_service/",
    "tests/e2e/apart/test_two_clusters.py",
    "tests/e2e/apart/test_up_apart.py",
)
"""... but for files that start services of their own, or none, and long ones: these begin next."""


def _shared(nodeid: str) -> str:
    """The folder with which a test must go; '' if it goes with its file alone."""
    folders = [folder for folder in ONE_SERVICE if nodeid.startswith(folder)]
    return folders[0] if folders and not nodeid.startswith(OWN_SERVICES) else ""


class FailuresAtOnce:
    """Names what fails as it does: its error comes at the end, which may be half an hour away."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"failed: {report.nodeid} ({report.when})", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "event loops stall now and then: what a test owes to a quick machine shows"
    parser.addoption("--stall", type=int, metavar="SEED", help=text)
    text = "of the tests chosen otherwise, part K of N; all N parts together are all tests"
    parser.addoption("--share", default="0/1", metavar="K/N", help=text)


@pytest.hookimpl(trylast=True)  # there is a reporter then
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: what `make test` runs, by QUICK in tests/conftest.py")
    if not SHARE.fullmatch(config.getoption("--share")):
        raise pytest.UsageError("--share takes K/N, with K below N: 0/8, 1/8, ... 7/8")
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(FailuresAtOnce(reporter))
    seed = config.getoption("--stall")
    if seed is None:
        return
    dice, run, sleep = random.Random(seed), asyncio.Handle._run, time.sleep

    def late(handle: asyncio.Handle) -> None:
        if dice.random() < STALLS:
            sleep(dice.uniform(0, STALL_SECONDS))
        run(handle)

    asyncio.Handle._run = late  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the quick tests, leave out what is another share's, and order the rest. What cannot be divided comes first,
    the small tests last: all processes then end at the same time."""
    part, parts = map(int, config.getoption("--share").split("/"))
    others = [item for item in items if crc32(item.nodeid.encode()) % parts != part]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % parts == part]
    for item in items:
        drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if item.nodeid.startswith(QUICK) and not item.nodeid.startswith(NOT_QUICK) and not drawn:
            item.add_marker("quick")
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))

    def turn(item: pytest.Item) -> tuple[bool, bool, bool]:
        name = item.nodeid
        return (not _shared(name), not name.startswith(OWN_SERVICES), name.startswith("tests/unit/"))

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling  # here: a machine without it runs one process

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        """A file's tests run in one process, in their order, and so do those of a folder with one service."""

        def _split_scope(self, nodeid: str) -> str:
            return _shared(nodeid) or nodeid.partition("::")[0]

        def remove_node(self, node: Any) -> str | None:
            """The test that ended its process has failed, and is not tried again; the others of its are."""
            crashed, left = None, OrderedDict[str, dict[str, bool]]()
            for scope, tests in self.assigned_work.pop(node).items():
                for name in [name for name, done in tests.items() if not done]:
                    if crashed is None:
                        crashed = name
                    else:
                        left.setdefault(scope, {})[name] = False
            self.workqueue = OrderedDict([*left.items(), *self.workqueue.items()])
            return crashed

    config.option.loadscopereorder = False
    return Scheduling(config, log)
