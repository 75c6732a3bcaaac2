"""A LoRA job that is killed again and again ends with the adapter of one that was not."""

from __future__ import annotations

from functools import partial
from typing import Any

import psutil
import pytest
from daemons import Daemon
from waiting import wait_until

from warmd.jobs.models.adapters import WEIGHTS

KILLS = 5


@pytest.mark.nightly(part="storms", catches="an adapter that differs after several kills")
def test_lora_job_that_is_killed_five_times_equals_an_uninterrupted_one(sturdy: Daemon):
    options: dict[str, Any] = {"lora": 4, "samples": 40, "save_every": 1, "learning_rate": 0.01}
    straight = sturdy.submit(**options)
    assert sturdy.wait(straight)["status"] == "finished"
    killed = sturdy.submit(**options)

    def has_saved(execution: int) -> psutil.Process | None:
        found = [event for event in sturdy.events(killed) if event["execution"] == execution]
        if "checkpoint" in [event["type"] for event in found]:
            return psutil.Process(found[0]["pid"])
        return None

    for execution in range(1, KILLS + 1):
        wait_until(partial(has_saved, execution)).kill()
    assert sturdy.wait(killed)["status"] == "finished"
    assert len(sturdy.events(killed, "started")) == KILLS + 1
    one, other = (sturdy.home.runs / job / "model" / WEIGHTS for job in (straight, killed))
    assert one.read_bytes() == other.read_bytes()
