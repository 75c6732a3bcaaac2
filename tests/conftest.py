"""Fixtures: a tiny model on disk, and real daemons in short-lived homes."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# The imports create millions of objects that live to the end: the garbage collector would scan them
# hundreds of times, a quarter of the time of test collection.
gc.disable()

# As in the daemon: threads that spin for milliseconds at each barrier take the processors from the
# other test process and from the daemons under test. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import torch
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"

import durations
import tiny
from daemons import Daemon
from desks import Desk
from waiting import wait_until

from warmd.configs.config import WorkerConfig
from warmd.daemon.lifecycle.statuses import PENDING
from warmd.daemon.lifecycle.view import JobFilter

# A deadline for each example would fail on a busy machine.
settings.register_profile("warmd", deadline=None)
settings.load_profile("warmd")

# A runner in the background of a shell ignores Ctrl-C, and so would every command under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which `durations.json` is renewed."""
    parser.addoption("--record-durations", action="store_true", help="update tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Record durations in the process that reports, not in those that xdist starts for it."""
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder(), "record durations")


def pytest_itemcollected(item: pytest.Item) -> None:
    """A nightly test is a slow one: no command but `make test-nightly` selects it otherwise."""
    if item.get_closest_marker("nightly") is not None:
        item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Begin test collection at another folder in each process of xdist.

    Without cached bytecode, pytest spends half of the time of test collection on rewriting
    assertions: this way each process finds most files rewritten by another.
    """
    report = yield
    about = getattr(collector.config, "workerinput", None)
    if about is not None and collector.path == Path(__file__).parent:
        folders, number = report.result, int(about["workerid"].removeprefix("gw"))
        first = len(folders) * number // about["workercount"]
        report.result = [*folders[first:], *folders[:first]]
    return report


@pytest.hookimpl(trylast=True)  # when the tests that are not to run have been taken out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that none is left when the other processes are done."""
    durations.sort_by_file(items)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish() -> None:
    """Exclude the objects of the imports from all later garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A home with a Redis, in which the test runs commands and acts as the worker."""
    made = Desk(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def daemons(tiny_model: Path) -> Iterator[Callable[..., Daemon]]:
    """Make daemons (not started), each in its own home; ends all of them afterwards."""
    made: list[Daemon] = []
    # Not a folder of pytest's: a unix socket's path has room for 107 bytes.
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:

        def make(**settings: Any) -> Daemon:
            daemon = Daemon(Path(folder, f"d{len(made)}", "home"), tiny_model, **settings)
            made.append(daemon)
            return daemon

        yield make
        for daemon in made:
            daemon.close()


@pytest.fixture(scope="module")
def like_a_work_horse() -> Iterator[None]:
    """Trainings in this process, on one thread."""
    # Two threads are slower on tiny models, and no child of a later test may be forked after them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads of torch, the parameter of the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def make_daemon(daemons: Callable[..., Daemon]) -> Iterator[Callable[..., Daemon]]:
    """Make daemons that end with the test."""
    made: list[Daemon] = []

    def make(**settings: Any) -> Daemon:
        made.append(daemons(**settings))
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon that runs, for this test alone."""
    started = make_daemon()
    started.start()
    return started


@pytest.fixture(scope="session")
def shared_daemon(daemons: Callable[..., Daemon]) -> Iterator[Daemon]:
    """A daemon with a worker for each queue and a gateway, for all tests that do it no harm.

    A test ends the jobs that it has submitted: others see them in the queue.
    """
    started = daemons(
        http_port=0,
        workers=(
            WorkerConfig(name="train-0", queue="train", threads=1),
            WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
        ),
    )
    started.start()
    yield started
    for job in started.client.jobs.all(JobFilter(statuses=PENDING)):
        started.wait(job["id"])  # fails for one that a test has left waiting


@pytest.fixture(scope="session")
def sturdy_daemon(daemons: Callable[..., Daemon]) -> Daemon:
    """The daemon that `sturdy` starts and gives to one test after another; it may not run yet."""
    return daemons()


@pytest.fixture
def sturdy(sturdy_daemon: Daemon) -> Iterator[Daemon]:
    """One daemon for all tests that kill or stop it, up and idle when a test begins.

    A start takes seconds for its imports, so it is done only after a test has ended the daemon.
    """
    daemon = sturdy_daemon
    if not daemon.home.is_locked():
        daemon.start()
    wait_until(daemon.is_settled, timeout_s=60)
    for name in ("calls", "requested"):
        (daemon.folder / name).unlink(missing_ok=True)
    yield daemon
    for name in ("gate", "broken"):
        (daemon.folder / name).unlink(missing_ok=True)
    if daemon.home.is_locked():
        daemon.wake()
        daemon.leave_idle()
