"""The horses of a worker."""

from __future__ import annotations

from typing import Any

from warmd.configs.config import WorkerConfig
from warmd.daemon.host.channel import listen
from warmd.daemon.work.horse_pool import HorsePool

REQUEST: dict[str, Any] = {"model": None}


def test_a_horse_that_was_heard_to_have_died_is_given_no_job(tmp_path):
    with listen(tmp_path / "zygote") as zygote:
        config = WorkerConfig(name="w", queue="infer", isolation="resident", slots=4)
        stable = HorsePool(tmp_path / "zygote", config)
        first = stable.mount("a", REQUEST, alone=False)
        assert first is not None
        assert stable.mount("b", REQUEST, alone=False) is first
        zygote.accept()[0].close()
        first.receive()
        assert first.channel.closed_by_peer
        second = stable.mount("c", REQUEST, alone=False)  # in the same turn, before `sweep`
        assert second is not None
        assert second is not first
        stable.sweep()
        assert stable.horses == [second]
        second.channel.close()
