"""After a power failure disk, Redis and commands agree, and no checkpoint is ahead of its events.

The home of a real daemon is on a file system that loses what was not flushed to it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import dpo_jobs
import mlm_jobs
import orjson
import psutil
import pytest
import sft_jobs
from daemons import Daemon, gone
from disturbing import MakeDaemon, processes_of, steps, weights
from power import Disk, disk_without_power
from shell import warmd
from waiting import wait_until

from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.jobs import spec_class
from warmd.jobs.context import step_of
from warmd.jobs.spec import Spec

STEPS = 300
CUTS = 5  # of each of four jobs


def grpo(folder: Path, steps: int = STEPS) -> Spec:
    return spec_class("grpo").parse(
        {"model": "tiny", "samples": steps, "num_generations": 2, "max_completion_length": 4}
        | {"save_every": 7}
    )


def sft(folder: Path) -> Spec:
    rows = len(sft_jobs.ROWS["prompt and completion"]) // 2
    return sft_jobs.spec(folder, model="tiny", epochs=STEPS // rows, save_every=7, keep=3)


def dpo(folder: Path) -> Spec:
    epochs = STEPS // (len(dpo_jobs.ROWS["texts"]) // 2)
    return dpo_jobs.spec(folder, model="tiny", epochs=epochs, save_every=7, keep=3)


def mlm(folder: Path) -> Spec:
    home = mlm_jobs.make_home(folder)
    return mlm_jobs.text_spec(home, steps=STEPS, save_every=7, eval_every=100, keep=3)


KINDS: dict[str, Callable[[Path], Spec]] = {"grpo": grpo, "sft": sft, "dpo": dpo, "mlm": mlm}


class Machine:
    """A daemon whose home is on a disk that can lose its power."""

    def __init__(self, daemon: Daemon, disk: Disk) -> None:
        self.daemon = daemon
        self._disk = disk

    def lose_power(self, *others: int) -> None:
        """Cut the power and bring the disk back; the daemon does not run then.

        `others`: further processes that use the disk.
        """
        doomed = [*self.daemon.processes(), *map(psutil.Process, others)]
        self._disk.lose_power()
        self.daemon.client.close()
        wait_until(partial(self._are_killed, doomed))
        self._disk.come_back()

    def _are_killed(self, doomed: list[psutil.Process]) -> bool:
        """Kill what uses the disk, the guardian first, and what was forked meanwhile."""
        every = [*doomed, *processes_of(self.daemon.home)]
        for process in every:
            with contextlib.suppress(psutil.NoSuchProcess):  # the daemon ends itself meanwhile
                process.kill()
        return all(map(gone, every))

    def check_checkpoints(self, job_id: str) -> None:
        """Check that the events up to the newest whole checkpoint are on the disk."""
        newest = Checkpoints(self.daemon.home.runs / job_id / "checkpoints").latest()
        if newest is not None:
            assert steps(self.daemon, job_id) >= list(range(1, step_of(newest) + 1))

    def check_ended(self, job_id: str, num_steps: int) -> None:
        """Check that disk, Redis and commands have the same about a job that has finished."""
        daemon, home = self.daemon, self.daemon.home.path
        events = daemon.events(job_id)
        assert steps(daemon, job_id) == list(range(1, num_steps + 1))
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        in_redis = daemon.streamed(job_id)
        assert in_redis == events[-len(in_redis) :]
        assert warmd("tail", job_id, "--json", home=home).objects == events
        shown = orjson.loads(warmd("show", job_id, "--json", home=home).out)
        assert (shown["status"], shown["step"]) == ("finished", num_steps)


@pytest.fixture
def machine(make_daemon: MakeDaemon, tmp_path: Path) -> Iterator[Machine]:
    daemon = make_daemon()
    daemon.home.path.mkdir(mode=0o700, parents=True)
    with disk_without_power(daemon.home.path, tmp_path / "disk.img") as disk:
        daemon.start()
        yield Machine(daemon, disk)
        daemon.close()


def _has_reached(daemon: Daemon, job_id: str, step: int) -> bool:
    return len(steps(daemon, job_id)) >= step


def cut_at_steps(machine: Machine, spec: Spec, cuts: list[int]) -> None:
    """Cut the power when a job has reached these steps; compare with an undisturbed one."""
    daemon = machine.daemon
    undisturbed = daemon.client.jobs.submit(spec)
    assert daemon.wait(undisturbed, timeout_s=120)["status"] == "finished"
    num_steps = len(steps(daemon, undisturbed))
    job_id = daemon.client.jobs.submit(spec)
    for step in cuts:
        wait_until(partial(_has_reached, daemon, job_id, step), timeout_s=60)
        machine.lose_power()
        machine.check_checkpoints(job_id)
        daemon.start()
    assert daemon.wait(job_id, timeout_s=120)["status"] == "finished"
    machine.check_ended(job_id, num_steps)
    assert weights(daemon, job_id) == weights(daemon, undisturbed)


@pytest.mark.slow
def test_a_power_failure_takes_no_event_that_a_checkpoint_stands_on(
    machine: Machine, tmp_path: Path
):
    cut_at_steps(machine, grpo(tmp_path, 120), [random.Random(os.urandom(8)).randrange(20, 100)])


@pytest.mark.nightly(
    part="power", catches="writes in an order that only some moments of a power failure show"
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "seed"), [*itertools.product(KINDS, range(4))])
def test_twenty_power_failures_of_each_kind_lose_nothing(
    machine: Machine, tmp_path: Path, kind: str, seed: int
):
    cuts = sorted(random.Random(seed).sample(range(1, STEPS), CUTS))
    cut_at_steps(machine, KINDS[kind](tmp_path), cuts)


def _has_so_many(found: set[str], number: int) -> bool:
    return len(found) >= number


def _note_lines(process: subprocess.Popen[str], found: set[str]) -> None:
    assert process.stdout is not None
    found.update(line.strip() for line in process.stdout)


SUBMIT = """
import sys
from warmd.cli.main import main
for _ in range(1000):
    main(["--home", sys.argv[1], "submit", "grpo", "--model", "tiny", "--samples", "2",
          "--num-generations", "2", "--max-completion-length", "4"])
    sys.stdout.flush()
"""


@pytest.mark.nightly(
    part="power", catches="writes in an order that only some moments of a power failure show"
)
@pytest.mark.timeout(1200)
def test_jobs_that_were_accepted_before_a_power_failure_are_run(machine: Machine):
    daemon, accepted = machine.daemon, set[str]()
    moments = random.Random(0)
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", SUBMIT, str(daemon.home.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as submitter:
            reader = threading.Thread(target=_note_lines, args=(submitter, accepted))
            reader.start()
            number = len(accepted) + moments.randrange(1, 6)
            wait_until(partial(_has_so_many, accepted, number))
            machine.lose_power(submitter.pid)
            reader.join()
        daemon.start()
    for job_id in accepted:
        assert daemon.wait(job_id, timeout_s=120)["status"] == "finished"
        machine.check_ended(job_id, 2)
