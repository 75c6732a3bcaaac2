"""A training on episodes that is killed at random moments ends as one that was not."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from daemons import Daemon
from disturbing import weights
from waiting import wait_until

from warmd.jobs import spec_class

KILLS = 20
GAMES = Path(__file__).parents[1] / "environments"
OPTIONS: dict[str, Any] = {
    "model": "tiny",
    "environment": "games:SlowCountedDigits",
    "samples": 160,
    "prompts_per_step": 4,
    "num_generations": 4,
    "concurrency": 4,
    "max_turn_length": 6,
    "stop": list("abcdefghijklmnopqrstuvwxyz "),
    "learning_rate": 1e-2,
    "save_every": 1,
}


def submitted(daemon: Daemon, name: str) -> tuple[str, Path]:
    """A job, and the file that gets the number of each task whose episode is over."""
    over, data = daemon.folder / f"{name}.over", daemon.folder / f"{name}.jsonl"
    over.unlink(missing_ok=True)
    rows = [{"file": str(over), "number": number} for number in range(OPTIONS["samples"])]
    data.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    with contextlib.chdir(GAMES):
        spec = spec_class("grpo").parse({**OPTIONS, "dataset": str(data)})
        return daemon.client.jobs.submit(spec), over


def played(over: Path) -> Counter[str]:
    return Counter(over.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly(
    part="storms", catches="an episode that a kill at another moment loses or repeats"
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_training_on_episodes_ends_with_its_weights_wherever_it_is_killed(sturdy: Daemon, seed):
    draw = random.Random(seed)
    straight, of_straight = submitted(sturdy, "straight")
    assert sturdy.wait(straight, timeout_s=120)["status"] == "finished"
    killed, of_killed = submitted(sturdy, "killed")
    for execution in range(1, KILLS + 1):

        def process(execution: int = execution) -> psutil.Process | None:
            found = [one for one in sturdy.events(killed) if one["execution"] == execution]
            has_saved = "checkpoint" in [one["type"] for one in found]  # else it is given up
            return psutil.Process(found[0]["pid"]) if has_saved else None

        victim = wait_until(process)
        time.sleep(draw.uniform(0, 1.0))
        if sturdy.client.jobs.get(killed)["status"] == "finished":
            break
        victim.kill()
    assert sturdy.wait(killed, timeout_s=120)["status"] == "finished"
    kills = len(sturdy.events(killed, "started")) - 1
    assert kills >= KILLS // 2
    assert weights(sturdy, killed) == weights(sturdy, straight)
    # An environment ends its episode a moment before that is in the journal: a kill between the two
    # costs the episodes of which that is true, at most one of each process.
    again = played(of_killed) - played(of_straight)
    assert sum(again.values()) <= kills
    assert not played(of_straight) - played(of_killed)
