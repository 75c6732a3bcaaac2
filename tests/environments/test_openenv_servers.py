"""Servers that OpenEnv itself makes, of both its packages, as environments."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from environments import environment
from episode_pools import pool
from ports import free_port
from waiting import wait_until

from warmd.jobs.environments.pool import Answer, Pool, described

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.nightly(
        part="oracles", catches="servers of OpenEnv whose schemas and answers are other ones"
    ),
]

NEW, OLD = "openenv>=0.10", "openenv-core>=0.3,<0.4"
GAMES = Path(__file__).parents[1] / "support" / "openenv_games.py"


@pytest.fixture(scope="module", params=[NEW, OLD])
def package(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def python(package: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("openenv") / "venv", package)


@contextmanager
def serving(python: Path, game: str) -> Iterator[str]:
    port = free_port()

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with subprocess.Popen([python, GAMES, game, str(port)]) as process:
        try:
            wait_until(listens, timeout_s=120)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def answer(made: Pool) -> Answer:
    (found,) = made.poll(60.0)
    assert found.failure is None, found.failure
    return found


def test_a_game_of_text_is_played(python, package):
    with serving(python, "text") as url, pool(url, size=1) as made:
        assert made.interface == "gymnasium"
        for _ in range(2):
            made.reset("a", seed=7, row={"prompt": "ignored"})
            assert answer(made).found == {"observation": "?=", "info": {}}
            rewards = []
            for guess in (0, 9, 5):
                made.act("a", str(guess))
                last = answer(made).found
                rewards.append(last["reward"])
            assert rewards == [0.0, 0.0, 1.0]
            assert last["terminated"]
            assert last["info"] == ({} if package == OLD else {"success": True})
            made.release("a")


def test_a_game_of_tools_is_played(python):
    with serving(python, "tools") as url:
        tools = described(url, [], 60.0).tools
        assert tools is not None
        (tool,) = tools[None]
        assert tool["function"]["name"] == "read"
        assert tool["function"]["parameters"]["properties"]["cell"]["type"] == "integer"
        with pool(url, size=1) as made:
            made.reset("a", seed=7, row={"cells": [5, 6]})
            answer(made)
            calls = [("read", {"cell": 1}), ("read", {"cell": 9}), ("write", {})]
            made.act("a", [{"name": name, "arguments": given} for name, given in calls])
            found = answer(made).found
            contents = [one["content"] for one in found["observation"]]
            assert contents[0] == "6"
            assert all(one.startswith("{'error': ") for one in contents[1:]), contents
            assert found["failures"] == 2
            assert not found["terminated"]
