"""Bad conditions: lost replies, a full disk, and many jobs."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from daemons import Daemon
from disturbing import STEPS, MakeDaemon, frozen, hold, let_go, pids, steps, wait_for
from small_disks import fill, make_room, small_disk
from waiting import wait_until

from warmd.daemon.client import control
from warmd.daemon.supervise.redis_server import find_binary
from warmd.jobs.errors import SpecError


class Wire:
    """A proxy to Redis that can drop a reply, after the command was executed."""

    def __init__(self, path: Path, server: Path) -> None:
        self.lose: Sequence[bytes] = ()  # parts of the requests whose replies are dropped
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def has_lost_it(self) -> bool:
        """Whether the reply that was to get lost has been."""
        return not self.lose

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(str(self._server))
            lost = False
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data or (source is server and lost):
                        return
                    if source is client and self.lose and all(w in data for w in self.lose):
                        lost, self.lose = True, ()
                    (server if source is client else client).sendall(data)


@pytest.mark.nightly(
    part="storms", catches="a reply of Redis whose loss leaves a job neither queued nor ended"
)
def test_a_lost_reply_of_redis_loses_no_job(make_daemon: MakeDaemon):
    daemon = make_daemon()
    daemon.home.create()
    real, wire_path = daemon.folder / "real.sock", daemon.folder / "wire.sock"
    options = ["--port", "0", "--unixsocket", str(real), "--save", "", "--dir", str(daemon.folder)]
    server = subprocess.Popen([find_binary(None), *options], stdout=subprocess.DEVNULL)
    try:
        wait_until(real.exists)
        wire = Wire(wire_path, real)
        daemon.config.__dict__["redis_url"] = f"unix://{wire_path}"
        daemon.start()
        for lost in (
            (b"BLMOVE",),  # popped, but the worker does not know
            (b"EXEC", b"warmd_execution"),  # begun
            (b"HMGET", b"ZSCORE"),  # looked at, while it runs
            (b"XADD",),
            (b"EXEC", b"finished"),
        ):
            # Held at its third step, so that it is still there when it is looked at.
            (daemon.folder / "calls").unlink(missing_ok=True)
            (daemon.folder / "gate").touch()
            with frozen(daemon, "worker"):
                job_id = daemon.submit("behaviours:gated")
                wire.lose = lost
            if b"finished" not in lost:
                wait_until(wire.has_lost_it)
            let_go(daemon)
            job = daemon.wait(job_id, timeout_s=20)
            assert wire.has_lost_it(), "the reply that was to get lost was never asked for"
            assert (job["status"], steps(daemon, job_id)) == ("finished", STEPS)
        connection = daemon.client.connection
        assert connection.keys("warmd:taken:*") == []
        assert connection.zcard("rq:wip:train") == 0
        daemon.stop(now=True)
        wire.close()
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for three megabytes."""
    with small_disk(tmp_path, "3m") as disk:
        yield disk


@pytest.mark.slow
def test_a_full_disk_refuses_a_job_and_the_running_one_waits(battered: Daemon, disk: Path):
    runs, aside = battered.home.runs, battered.home.path / "aside"
    runs.rename(aside)
    runs.symlink_to(disk)
    try:
        job_id = hold(battered)
        fill(disk, leave_bytes=30_000)
        let_go(battered)  # the events have room, and the model has none
        wait_until(lambda: battered.client.jobs.get(job_id)["waits_for"])
        make_room(disk)
        assert battered.wait(job_id)["status"] == "finished"
        assert steps(battered, job_id) == STEPS
        fill(disk)
        with pytest.raises(SpecError, match=r"cannot write a run directory.*No space left"):
            battered.submit()
        assert [path.name for path in runs.iterdir() if path.is_dir()] == [job_id]
    finally:
        runs.unlink()
        aside.rename(runs)


@pytest.mark.nightly(
    part="storms",
    catches="descriptors, threads or memory that a job leaves behind, too few to be seen after one",
)
def test_two_hundred_jobs_leave_no_descriptor_thread_or_memory_behind(make_daemon: MakeDaemon):
    daemon = make_daemon()
    daemon.start()

    def run(number: int) -> None:
        for job_id in [daemon.submit(samples=1, save_every=100) for _ in range(number)]:
            assert daemon.wait(job_id, timeout_s=120)["status"] == "finished"

    processes = [psutil.Process(pid) for pid in pids(daemon)]

    def taken() -> list[tuple[int, int, int]]:
        return [(p.num_fds(), p.num_threads(), p.memory_info().rss) for p in processes]

    # The supervisor keeps as many connections as it ever used at once: its own, that of whoever
    # asks, that of what removes old jobs. It is to have them all now, not when these coincide.
    supervisor = processes[0]

    def descriptors_unasked() -> int:
        # Its own three threads: main, control, retention. Whoever asks has one more, as long as it
        # takes: the gateway now and then, and at first perhaps who started it.
        wait_until(lambda: supervisor.num_threads() == 3)
        return supervisor.num_fds()

    with ThreadPoolExecutor(8) as many:

        def gets_no_more_when_asked_by_many() -> bool:
            before = descriptors_unasked()
            for _ in range(5):
                list(many.map(lambda _: control.status(daemon.config), range(64)))
            return descriptors_unasked() == before

        wait_until(gets_no_more_when_asked_by_many)
    run(20)
    # A job is finished before its horse has gone and all have closed their ends of the line to it.
    wait_until(lambda: not processes[1].children())
    wait_for(0.5)
    before = taken()
    run(180)
    wait_until(lambda: [t[:2] for t in taken()] == [t[:2] for t in before])
    assert all(now[2] - then[2] < 5e6 for now, then in zip(taken(), before, strict=True))
    statuses = [process.status() for process in daemon.processes()]
    assert psutil.STATUS_ZOMBIE not in statuses
