#!/usr/bin/env python3
"""The load of many machines on their Redis: claim latency and commands per second.

    python tests/benchmarks/nodes.py [--jobs 10000] [--workers 100] [--seconds 5]

Workers are simulated: threads of one process with a worker's own lease, mailbox and claims, whose
jobs end at once. So "busy" measures this process as much as Redis; "one worker" does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from workplaces import Workplace

from warmd.configs.labels import SCHEMA as SCHEMA_LABEL
from warmd.daemon.queue import keys
from warmd.daemon.queue.due import DueJobs
from warmd.daemon.queue.election import Election
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.queue.keys import LEASE_S
from warmd.daemon.queue.mailbox import Mailbox
from warmd.daemon.queue.waiting import Offer
from warmd.daemon.queue.workers import Lease
from warmd.daemon.runs.rundir import SCHEMA
from warmd.daemon.supervise.orphans import Orphans

QUEUE = "infer"
OFFER = Offer({SCHEMA_LABEL: str(SCHEMA), "gpu": "h200"}, os.path.isdir, lambda needs: False)
LOOK_S = 1.0  # as in the worker


@dataclass
class Simulated:
    """One worker without horses."""

    url: str
    name: str
    latencies: list[float] = field(default_factory=list)  # seconds from the reply to the start

    def __post_init__(self) -> None:
        self.connection = keys.connect_once(self.url, timeout_s=LEASE_S / 7)
        self.store = JobStore(self.connection)
        self.mailbox = Mailbox(self.connection, QUEUE, self.name)
        self.lease = Lease(self.url, self.name, QUEUE, length_s=LEASE_S)
        self.lease.start()

    def run(self, stopping: threading.Event) -> None:
        looked = 0.0
        while not stopping.is_set():
            self.mailbox.has_control_request()
            if not self.mailbox.is_waiting and time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self.store.waiting_needs(QUEUE, OFFER)
            self.mailbox.wait_for_job()
            is_over, popped = self.mailbox.job()
            if popped is not None:
                self.claim(popped)
            elif not is_over:
                stopping.wait(0.005)
        self.lease.end()
        self.mailbox.close()

    def claim(self, popped: bytes) -> None:
        begun = time.perf_counter()
        if not OFFER.unmet(self.store.needs_of_popped(popped)):
            taken = self.store.begin(popped, QUEUE, self.name)
            self.latencies.append(time.perf_counter() - begun)
            if taken is not None:
                self.store.finish(taken[0], taken[1].claim)


class Leader(threading.Thread):
    """The work of the elected daemon in each second."""

    def __init__(self, place: Workplace, stopping: threading.Event) -> None:
        super().__init__(daemon=True)
        store = JobStore(keys.connect(place.redis.url))
        self.election = Election(store.connection, "leader")
        self.orphans = Orphans(store, place.home)
        self.due = DueJobs(store)
        self.stopping = stopping

    def run(self) -> None:
        while not self.stopping.wait(1.0):
            if self.election.is_leader():
                self.orphans.requeue_of_other_daemons()
                self.due.enqueue()


def log(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def commands(place: Workplace) -> int:
    info: Any = place.connection.info("stats")
    return int(info["total_commands_processed"])


def enqueue(place: Workplace, number: int, needs: dict[str, str] | None = None) -> None:
    start = place.connection.incrby("benchmark", number) - number
    for index in range(start, start + number):
        place.store.enqueue(f"infer-20260101-{index:06}-aaaa", QUEUE, needs=needs)


def percentiles(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"median {cuts[49] * 1e3:.2f} ms, 99 % {cuts[98] * 1e3:.2f} ms"


def one_worker(place: Workplace, number: int) -> None:
    """Claim latency without other workers, while all jobs wait."""
    worker = Simulated(place.redis.url, "one:abcd1234:1")
    queue = place.store.queue(QUEUE).key
    for _ in range(number):
        popped: Any = worker.connection.lmove(queue, keys.taken(worker.name), "LEFT", "RIGHT")
        worker.claim(popped)
    worker.lease.end()
    log(f"one worker, claim of a job: {percentiles(worker.latencies)}")


def many(place: Workplace, number: int, seconds: float) -> None:
    """All workers: first while jobs wait, then idle."""
    stopping = threading.Event()
    workers = [Simulated(place.redis.url, f"infer-0:{index:08x}:1") for index in range(number)]
    threads = [threading.Thread(target=worker.run, args=(stopping,)) for worker in workers]
    queue = place.store.queue(QUEUE).key
    waiting = place.connection.llen(queue)
    before, begun = commands(place), time.monotonic()
    for thread in (*threads, Leader(place, stopping)):
        thread.start()
    while time.monotonic() - begun < seconds and place.connection.llen(queue):
        time.sleep(0.05)
    claimed = waiting - place.connection.llen(queue)
    took = time.monotonic() - begun
    rate = (commands(place) - before) / took
    latencies = [latency for worker in workers for latency in worker.latencies]
    log(f"busy: {number} workers, {claimed / took:.0f} jobs/s, {rate:.0f} commands/s")
    log(f"busy, claim of a job: {percentiles(latencies)}")
    place.connection.delete(queue)
    time.sleep(2.0)  # claims in flight end; 99 % took less than 0.24 s
    before = commands(place)
    time.sleep(seconds)
    rate = (commands(place) - before) / seconds
    log(f"idle: {number} workers and a leader, {rate:.0f} commands/s, {rate / number:.1f} each")
    stopping.set()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        place = Workplace(Path(folder))
        try:
            begun = time.monotonic()
            enqueue(place, arguments.jobs)
            log(f"queued {arguments.jobs} jobs in {time.monotonic() - begun:.1f} s")
            one_worker(place, min(1000, arguments.jobs // 2))
            many(place, arguments.workers, arguments.seconds)
        finally:
            place.close()


if __name__ == "__main__":
    main()
