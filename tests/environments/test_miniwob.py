"""Web pages of MiniWoB++ in a real browser as environments: scripted, trained on, and learned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from browser import has_chromium
from environments import environment
from episode_pools import answers, pool
from needs import needs
from running import running
from waiting import wait_until

pytestmark = pytest.mark.timeout(900)

PACKAGE = "miniwob==1.1.0"
TASKS = ("click-test", "click-test-2", "click-button", "click-link", "click-tab", "click-option")
TASKS += ("click-checkboxes", "click-button-sequence")
MEMBERS = 8
MOST_TURNS = 15
MOST_BYTES = 4_000_000_000  # of eight browsers; measured: 2.1 GB
HOLDING = """
import time
from episode_pools import answers, pool

with pool("miniwob_pages:Text") as made:
    for number in range(2):
        made.reset(number, seed=number, row={"task": "click-test-2"})
    answers(made, 2)
    print("ready", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of MiniWoB++ and of what it needs that warmd does not."""
    needs(has_chromium(), "chromium and chromedriver")
    folder = tmp_path_factory.mktemp("miniwob") / "environment"
    environment(folder, PACKAGE, shares=True)
    (found,) = folder.glob("lib/python*/site-packages")
    return found


@pytest.fixture
def pages(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the processes of `miniwob_pages` need, and a folder for what Chromium leaves behind."""
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)  # not tmp_path: too long for the path of a socket
        yield


def plan(seen: str) -> list[str]:
    """The texts of the elements that a task's instruction names, in its order."""
    instruction, *lines = seen.splitlines()
    texts = [line.split(" ", 2)[2] for line in lines if line.count(" ") > 1]
    if quoted := re.findall('"(.+)"', instruction):
        return quoted
    places = {text: re.search(rf"(?<!\w){re.escape(text)}(?!\w)", instruction) for text in texts}
    named = {text: place.start() for text, place in places.items() if place}
    return sorted(named, key=named.__getitem__) or texts


def number_of(text: str, seen: str) -> str:
    found = re.search(rf"^(\d+) \w+ {re.escape(text)}( checked)?$", seen, re.MULTILINE)
    assert found is not None, (text, seen)
    return found[1]


def are_gone(processes: Sequence[psutil.Process]) -> bool:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def browsers(of: psutil.Process) -> list[psutil.Process]:
    """The processes that a process has started, which have Chromium and its driver among them."""
    found = of.children(recursive=True)
    names = [one.name() for one in found]
    assert "chromium" in names and "chromedriver" in names  # noqa: PT018
    return found


@pytest.mark.nightly(
    part="episodes", catches="an environment with a browser whose pages or processes get mixed up"
)
def test_a_script_solves_eight_pages_at_once_and_no_browser_is_left(pages):
    seen: dict[tuple[str, int], list[str]] = {}
    plans: dict[Any, list[str]] = {}
    rewards, peak = {}, 0
    with pool("miniwob_pages:Text", size=8) as made:
        for seed, task in enumerate(TASKS):
            for member in range(MEMBERS):
                made.reset((task, member), seed=seed, row={"task": task})
        while len(rewards) < len(TASKS) * MEMBERS:
            for one in made.poll(60.0):
                assert one.failure is None, one.failure
                key: Any = one.episode
                if one.found.get("terminated"):
                    rewards[key] = one.found["reward"]
                    assert one.found["info"] == {"success": True}
                    made.release(key)
                    continue
                page = one.found["observation"]
                seen.setdefault(key, []).append(page)
                texts = plans.setdefault(key, plan(page))
                made.act(key, f"The number is {number_of(texts.pop(0), page)}.")
            peak = max(peak, memory_bytes())
        started = browsers(psutil.Process())
    wait_until(lambda: are_gone(started), timeout_s=5)
    assert peak < MOST_BYTES, peak
    assert set(rewards.values()) == {1.0}
    assert max(len(one) for one in seen.values()) in range(2, MOST_TURNS + 1)
    for task in TASKS:  # the same seed is the same page, also after the same clicks
        assert all(seen[task, member] == seen[task, 0] for member in range(MEMBERS))
    assert len({seen[task, 0][0] for task in TASKS}) == len(TASKS)


def memory_bytes() -> int:
    """Memory of all that this process has started; what is shared counts once."""
    total = 0
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += one.memory_full_info().pss
    return total


@pytest.mark.nightly(
    part="episodes", catches="a job that is killed and leaves the browsers of its environments"
)
def test_the_browsers_end_with_a_pool_that_is_killed(pages):
    support = str(Path(__file__).parents[1] / "support")
    path = os.pathsep.join((os.environ["PYTHONPATH"], *sys.path, support))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        started = browsers(psutil.Process(holder.pid))
        holder.kill()
        wait_until(lambda: are_gone(started), timeout_s=5)


@pytest.mark.nightly(
    part="episodes", catches="a browser that is left when its environment has been killed"
)
def test_a_browser_ends_with_an_environment_that_is_killed(pages):
    with pool("miniwob_pages:Text", size=1) as made:
        made.reset("a", seed=1, row={"task": "click-test-2"})
        answers(made)
        started = browsers(psutil.Process())
        (server,) = running("warmd.jobs.environments.server")
        server.kill()
        failure = answers(made)["a"].failure
        assert failure is not None
        assert failure.words == "its process ended with signal SIGKILL"
        wait_until(lambda: are_gone(started), timeout_s=5)
