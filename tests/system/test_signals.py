"""Each signal to each process of a daemon: what ends, what is replaced, and that no job is lost."""

from __future__ import annotations

import signal

import psutil
import pytest
from daemons import Daemon, gone
from disturbing import STEPS, hold, let_go, steps
from waiting import wait_until

from warmd.jobs.errors import WarmdError

NAMES = ("guardian", "supervisor", "server", "zygote", "worker")
# docs/operations.md has this table. For signals that are not listed the process is replaced; the
# job that runs is continued at its latest checkpoint where the last field says so.
STOPPING = ("TERM", "INT", "QUIT")
IGNORED = {
    "guardian": ("HUP", "USR1", "USR2", "ALRM"),
    "supervisor": ("HUP", "USR1", "USR2", "ALRM"),
    "server": ("HUP", "USR2"),
    "zygote": ("HUP", "INT"),
    "worker": ("HUP", "INT"),
    "horse": ("HUP", "INT", "USR2"),
}
CONTINUES = {"worker": ("TERM", "QUIT", "USR2"), "horse": ("TERM", "QUIT", "USR1")}
CASES = [
    (process, name)
    for process in ("guardian", "supervisor", "server", "zygote", "worker", "horse")
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")
]
DAILY = (("guardian", "HUP"), ("worker", "USR2"))  # the others are nightly
_NIGHTLY = pytest.mark.nightly(
    part="storms", catches="a signal that loses a job or leaves a daemon without a process"
)


def process_of(daemon: Daemon, name: str) -> psutil.Process:
    if name != "guardian":
        return psutil.Process(daemon.pid(name))
    guardian = psutil.Process(daemon.pid("supervisor")).parent()
    # Otherwise it belongs to somebody else, who must not get a signal.
    assert guardian is not None
    assert guardian.cmdline()[-2:] == ["-m", "warmd.daemon"]
    return guardian


def all_processes(daemon: Daemon) -> dict[str, int]:
    """The processes by name; none while one of them is missing."""
    try:
        return {name: process_of(daemon, name).pid for name in NAMES}
    except (WarmdError, psutil.NoSuchProcess, TypeError):
        return {}


@pytest.mark.parametrize(
    ("process", "name"),
    [pytest.param(*case, marks=pytest.mark.slow if case in DAILY else _NIGHTLY) for case in CASES],
)
def test_a_signal_loses_no_job_and_leaves_the_daemon_whole(sturdy: Daemon, process: str, name: str):
    before = all_processes(sturdy)
    job_id = hold(sturdy)
    target = process_of(sturdy, process)
    target.send_signal(getattr(signal, f"SIG{name}"))
    stops = process in ("guardian", "supervisor") and name in STOPPING
    ignored = name in IGNORED[process]
    drains = (process, name) == ("worker", "USR1")
    ends_later = drains or (name == "TERM" and process in ("worker", "horse", "zygote"))
    if not (stops or ignored or ends_later):
        wait_until(lambda: gone(target))  # at once, and not when its job ends
    let_go(sturdy)
    if stops:
        wait_until(lambda: not sturdy.home.is_locked(), timeout_s=60)
        sturdy.start()
    job = sturdy.wait(job_id, timeout_s=120)
    assert job["status"] == "finished"
    assert sorted(set(steps(sturdy, job_id))) == STEPS
    continued = stops or name in CONTINUES.get(process, ())
    assert job["execution"] == (2 if continued else 1)
    if ends_later:
        wait_until(lambda: gone(target))
    after = wait_until(lambda: all_processes(sturdy), timeout_s=60)
    changed = {one for one in NAMES if before[one] != after[one]}
    if stops:
        assert changed == set(NAMES)
    elif ignored or process == "horse":
        assert changed == set()
    elif process == "guardian":
        raise AssertionError("a guardian stops or ignores")
    else:
        assert process in changed
