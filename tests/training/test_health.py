"""Health checks: divergence and stalls of a training are reported."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st
from waiting import wait_until

from warmd.daemon.runs import events
from warmd.daemon.work.watchdog import Watchdog
from warmd.jobs import KINDS, spec_class
from warmd.jobs.context import Activity
from warmd.jobs.training.health import Divergence, Progress
from warmd.jobs.training.options import TrainingSpec

LOSS = {"loss": 0.1}
GRPO = {"loss": 1.0, "kl": 1.0, "entropy": 1.0}


def alarms(watch: Divergence, losses: Iterable[float]) -> dict[int, dict[str, Any]]:
    """The events by step, counted from 1."""
    found = {step: watch.update({"loss": loss}) for step, loss in enumerate(losses, start=1)}
    return {step: fields for step, fields in found.items() if fields is not None}


def test_a_loss_above_three_times_its_median_is_reported_once_until_it_recovers():
    losses = [2.0] * 12 + [5.9, 6.1, 40.0, 7.0, 2.1, 6.5]
    assert alarms(Divergence(LOSS), losses) == {
        14: {"metric": "loss", "value": 6.1, "median": 2.0},
        18: {"metric": "loss", "value": 6.5, "median": 2.0},
    }


def test_a_loss_that_stays_high_does_not_become_the_median():
    assert list(alarms(Divergence(LOSS), [2.0] * 20 + [9.0] * 500 + [2.0, 9.0])) == [21, 522]


def test_the_first_ten_losses_are_not_judged():
    assert alarms(Divergence(LOSS), [1.0] * 9 + [50.0]) == {}
    assert list(alarms(Divergence(LOSS), [1.0] * 10 + [50.0])) == [11]


def test_a_loss_that_falls_is_compared_with_its_recent_past():
    falling = [9 * 0.99**n for n in range(400)]
    assert list(alarms(Divergence(LOSS), [*falling, 1.0])) == [401]


@given(st.lists(st.floats(-3, 3), max_size=300))
def test_a_loss_around_zero_as_in_grpo_is_not_reported(losses):
    assert alarms(Divergence(GRPO), losses) == {}


@given(st.lists(st.floats(-0.3, 0.3), max_size=300))
def test_a_loss_that_is_nearly_zero_is_not_reported(losses):
    assert alarms(Divergence(LOSS), losses) == {}


def test_high_kl_or_entropy_is_reported_whatever_the_loss():
    for name in ("kl", "entropy"):
        watch = Divergence(GRPO)
        for step in range(40):
            assert watch.update({"loss": (-1) ** step * 0.2, name: 0.001 * step}) is None
        assert watch.update({"loss": 0.1, name: 3.5}) == {
            "metric": name,
            "value": 3.5,
            "median": pytest.approx(0.0195),
        }


def test_metrics_missing_from_a_step_are_skipped():
    watch = Divergence(GRPO)
    for _ in range(20):
        assert watch.update({"loss": None, "kl": float("nan"), "reward": 5}) is None


@given(st.lists(st.floats(-1, 20), max_size=150), st.integers(0, 150))
def test_a_resumed_run_reports_the_same_as_an_uninterrupted_one(losses, step):
    straight, resumed = Divergence(LOSS), Divergence(LOSS)
    for loss in losses[:step]:
        straight.update({"loss": loss})
    resumed.load_state(orjson.loads(orjson.dumps(straight.state())))
    rest = [straight.update({"loss": loss}) for loss in losses[step:]]
    assert [resumed.update({"loss": loss}) for loss in losses[step:]] == rest
    assert resumed.state() == straight.state()


def test_every_training_kind_declares_its_watched_metrics_and_thresholds():
    kinds = [spec_class(kind) for kind in KINDS]
    for kind in kinds:
        if issubclass(kind, TrainingSpec):
            assert "loss" in kind.watched
            assert min(kind.watched.values()) > 0


class Clock:
    """A clock that advances on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Training:
    """Steps with their own clock, and the reports about them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.now: Activity | None = None  # the latest reported activity
        self.heard: list[Activity | None] = []
        self.progress = Progress(self.hear, clock=self.clock)

    def hear(self, activity: Activity | None) -> None:
        self.now = activity
        self.heard.append(activity)

    def step(self, seconds: float) -> None:
        self.progress.begin("step")
        self.clock.now += seconds
        self.progress.end()

    def limit_s(self, name: str = "step") -> float:
        """How long the next one may take."""
        self.progress.begin(name)
        assert self.now is not None
        limit_s = self.now.limit_s
        self.progress.end()
        return limit_s


def test_a_step_may_take_ten_times_the_median():
    training = Training()
    for _ in range(6):
        training.step(1.0)
    training.progress.begin("step")
    assert training.now == Activity(
        name="step", began=training.clock.now, limit_s=10.0, median_s=1.0
    )
    training.progress.end()
    assert training.now is None


def test_short_steps_stall_after_seconds_not_milliseconds():
    training = Training()
    for _ in range(6):
        training.step(0.01)
    assert training.limit_s() == 5.0


def test_the_first_steps_have_a_fixed_time_limit():
    training = Training()
    for seconds in (100.0, 1.0, 1.0, 1.0, 1.0):
        training.progress.begin("step")
        assert training.now is not None
        assert (training.now.limit_s, training.now.median_s) == (600.0, None)
        training.clock.now += seconds
    assert training.limit_s() == 200.0


def test_steps_that_generate_only_now_and_then_are_not_reported_as_stalls():
    training = Training()
    for _ in range(30):
        for seconds in (25.0, 1.0, 1.0, 1.0):
            training.step(seconds)
    assert training.limit_s() == 50.0


def test_a_run_that_stays_slow_becomes_the_new_median():
    training = Training()
    for seconds in [1.0] * 40 + [20.0] * 200:
        training.step(seconds)
    assert training.limit_s() == 200.0


def test_a_stall_does_not_raise_the_median():
    training = Training()
    for seconds in [1.0] * 6 + [60.0]:
        training.step(seconds)
    assert training.limit_s() == 10.0


def test_checkpoints_evaluations_and_pauses_do_not_count_as_step_time():
    training = Training()
    for _ in range(6):
        training.step(1.0)
        with training.progress.during("evaluation"):
            training.clock.now += 30.0
    training.progress.begin("step")
    began = training.clock.now
    training.clock.now += 0.5
    with training.progress.during("checkpoint"):
        training.clock.now += 500.0
    with training.progress.during(None):
        assert training.heard[-1:] == [None]
        training.clock.now += 5000.0
    (continued,) = training.heard[-1:]
    assert continued is not None
    assert continued.began == began + 5500.0
    training.progress.end()
    assert training.limit_s() == 10.0
    assert training.limit_s("evaluation") == 300.0


# What the worker makes of it.

HORSE = """
import sys, time
from pathlib import Path
from warmd.daemon.host.stacks import write_stacks_on_signal

def hangs():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)

write_stacks_on_signal()
hangs()
"""


@contextmanager
def hanging_process(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        open(log, "ab") as file,
        subprocess.Popen(
            [sys.executable, "-c", HORSE], stdout=subprocess.PIPE, stderr=file
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


def activity(began: float, limit_s: float) -> Activity:
    return Activity(name="step", began=began, limit_s=limit_s, median_s=0.01)


def test_a_stall_is_reported_once_with_the_stack_of_the_hanging_process(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("what a library printed\n")
    with hanging_process(log) as process:
        watchdog = Watchdog(log)
        assert watchdog.check(process.pid) is None  # it has reported no activity yet
        watchdog.set_activity(activity(time.monotonic(), 60.0))
        assert watchdog.check(process.pid) is None
        watchdog.set_activity(activity(time.monotonic() - 7.0, 5.0))
        stall = wait_until(lambda: watchdog.check(process.pid))
        assert stall.seconds == pytest.approx(7.0, abs=3.0)
        assert re.fullmatch(r"<string>:\d+ hangs < <string>:12 <module>", stall.stack)
        assert watchdog.check(process.pid) is None
        watchdog.set_activity(activity(time.monotonic() - 7.0, 5.0))
        assert wait_until(lambda: watchdog.check(process.pid))
        watchdog.set_activity(None)
        assert watchdog.check(process.pid) is None


@pytest.mark.slow
def test_a_stall_reports_that_its_process_is_suspended(tmp_path):
    with hanging_process(tmp_path / "log.txt") as process:
        process.send_signal(signal.SIGSTOP)
        watchdog = Watchdog(tmp_path / "log.txt")
        watchdog.set_activity(activity(time.monotonic() - 7.0, 5.0))
        stall = wait_until(lambda: watchdog.check(process.pid))
        assert (stall.stack, stall.state) == (None, "T (stopped)")


def test_worker_and_horse_can_append_events_concurrently(tmp_path):
    path = tmp_path / "events.jsonl"
    with events.EventLog(path, execution=1) as horse:
        horse.emit("step", step=1)
        for number in (2, 3):
            with events.EventLog(path, execution=1, patience_s=1.0) as worker:
                worker.emit("stall", step=number - 1)
            horse.emit("step", step=number)
            horse.emit("step", step=number)  # as after a resume
    found = [(event["seq"], event["type"], event["step"]) for event in events.read(path)]
    assert found == [
        (1, "step", 1),
        (2, "stall", 1),
        (3, "step", 2),
        (4, "stall", 2),
        (5, "step", 3),
    ]


def test_an_event_is_dropped_when_another_writer_holds_the_lock(tmp_path):
    path = tmp_path / "events.jsonl"
    with (
        events.EventLog(path, execution=1) as horse,
        horse._alone(),
        pytest.raises(BlockingIOError),
    ):
        events.EventLog(path, execution=1, patience_s=0.05)


def test_events_of_several_threads_are_whole_lines_in_one_order(tmp_path):
    path = tmp_path / "events.jsonl"
    published: list[int] = []

    def emit_many(log: events.EventLog) -> None:
        for _ in range(300):
            log.emit("text", text="x" * 500)

    with events.EventLog(
        path, execution=1, publish=lambda event: published.append(event["seq"])
    ) as log:
        threads = [threading.Thread(target=emit_many, args=(log,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    numbers = [event["seq"] for event in events.read(path)]
    assert numbers == published == list(range(1, 1201))


def test_a_divergence_that_is_recomputed_after_a_resume_is_reported_once(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    for execution in (1, 2):
        with events.EventLog(path, execution=execution) as log:
            for step in (1, 2, 3):
                log.emit("step", step=step)
                if step == 2:
                    log.emit("divergence", step=step, metric="loss")
    types = [event["type"] for event in events.read(path)]
    assert types == ["step", "step", "divergence", "step"]
    assert all(a < b for a, b in pairwise(event["seq"] for event in events.read(path)))
