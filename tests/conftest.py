"""Fixtures: a tiny model on disk, and real daemons in short-lived homes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import tiny
from daemons import Daemon

# A runner in the background of a shell ignores Ctrl-C, and so would every command under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def daemons(tiny_model: Path) -> Iterator[Callable[..., Daemon]]:
    """Make daemons (not started), each in a home of its own; ends them all afterwards."""
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
    """A daemon that runs for all tests that do it no harm."""
    started = daemons()
    started.start()
    return started
