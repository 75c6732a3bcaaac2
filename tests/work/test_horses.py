"""The horses of a worker."""

from __future__ import annotations

import pytest
from workplaces import workplace

from warmd.configs.config import WorkerConfig
from warmd.daemon.host.channel import listen
from warmd.daemon.host.messages import RunJob
from warmd.daemon.work.horses import Horses


def request(job_id: str) -> RunJob:
    return RunJob(job_id, "w", "", 1, slots=4, threads=1, niceness=0, enqueued_at=None)


@pytest.mark.slow
def test_a_dead_horse_gets_no_job():
    with workplace() as place, listen(place.home.zygote_socket) as zygote:
        config = WorkerConfig(name="w", queue="infer", isolation="resident", slots=4)
        held = place.held(place.store, config)
        horses = Horses(held)
        first = horses.request(request("a"), alone=False)
        assert first is not None
        assert horses.request(request("b"), alone=False) is first
        zygote.accept()[0].close()
        first.receive()
        assert first.channel.closed_by_peer
        second = horses.request(request("c"), alone=False)  # in the same step, before `sweep`
        assert second is not None
        assert second is not first
        horses.sweep()
        assert held.horses == [second]
        second.channel.close()
