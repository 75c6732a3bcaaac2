"""The horses of a worker."""

from __future__ import annotations

from warmd.configs.config import WorkerConfig
from warmd.daemon.host.channel import listen
from warmd.daemon.host.messages import RunJob
from warmd.daemon.work.horse_pool import HorsePool


def request(job_id: str) -> RunJob:
    return RunJob(job_id, "w", "", 1, slots=4, threads=1, niceness=0, enqueued_at=None)


def test_a_dead_horse_gets_no_job(tmp_path):
    with listen(tmp_path / "zygote") as zygote:
        config = WorkerConfig(name="w", queue="infer", isolation="resident", slots=4)
        pool = HorsePool(tmp_path / "zygote", config)
        first = pool.attach(request("a"), alone=False)
        assert first is not None
        assert pool.attach(request("b"), alone=False) is first
        zygote.accept()[0].close()
        first.receive()
        assert first.channel.closed_by_peer
        second = pool.attach(
            request("c"), alone=False
        )  # in the same step of the loop, before `sweep`
        assert second is not None
        assert second is not first
        pool.sweep()
        assert pool.horses == [second]
        second.channel.close()
