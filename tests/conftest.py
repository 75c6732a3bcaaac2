"""Fixtures: a tiny model on disk, and real daemons in short-lived homes."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
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

import tiny
from daemons import Daemon
from desks import Desk
from waiting import wait_until

from warmd.configs.config import WorkerConfig

# A deadline for each example would fail on a busy machine.
settings.register_profile("warmd", deadline=None)
settings.load_profile("warmd")

# A runner in the background of a shell ignores Ctrl-C, and so would every command under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The files whose slow tests take longest, the longest first: `make test-slow` begins with them, so
# that none is left when the other processes have nothing to do.
LONGEST = (
    "system/test_networks.py",
    "system/test_network_storm.py",
    "system/test_nodes.py",
    "compute/test_levels.py",
    "cli/test_bench_works.py",
    "supervise/test_retention.py",
    "gateway/test_attack.py",
    "system/test_exact_moments.py",
    "supervise/test_daemon.py",
    "system/test_gangs.py",
    "system/test_run_store.py",
    "system/test_interrupted_homes.py",
    "curriculum/test_daemon.py",
    "gpu/test_check.py",
    "compute/test_native.py",
    "gateway/page/test_views.py",
    "supervise/test_reload.py",
    "system/test_random_storm.py",
    "training/test_processes.py",
    "system/test_gang_kinds.py",
    "system/test_disturbed_starts.py",
    "gateway/test_connections.py",
    "gateway/test_hostile_requests.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by file: the longest files, then the others as they are."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


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
def shared_daemon(daemons: Callable[..., Daemon]) -> Daemon:
    """A daemon with a worker for each queue and a gateway, for all tests that do it no harm."""
    started = daemons(
        http_port=0,
        workers=(
            WorkerConfig(name="train-0", queue="train", threads=1),
            WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
        ),
    )
    started.start()
    return started


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
    (daemon.folder / "calls").unlink(missing_ok=True)
    yield daemon
    for name in ("gate", "broken"):
        (daemon.folder / name).unlink(missing_ok=True)
    if daemon.home.is_locked():
        daemon.wake()
        daemon.leave_idle()
