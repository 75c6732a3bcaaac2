"""What a training says of itself: that it diverges, and that it stalls."""

import threading
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st
from waiting import wait_until

from warmd.daemon import events
from warmd.jobs import KINDS, spec_class
from warmd.jobs.health import Divergence, Stall, StallWatch
from warmd.jobs.training import TrainingSpec

LOSS = {"loss": 0.1}
GRPO = {"loss": 1.0, "kl": 1.0, "entropy": 1.0}


def alarms(watch: Divergence, losses: Iterable[float]) -> dict[int, dict[str, Any]]:
    """The events by step, counted from 1."""
    found = {step: watch.update({"loss": loss}) for step, loss in enumerate(losses, start=1)}
    return {step: fields for step, fields in found.items() if fields is not None}


def test_a_loss_above_three_times_its_median_is_said_once_until_it_is_well_again():
    losses = [2.0] * 12 + [5.9, 6.1, 40.0, 7.0, 2.1, 6.5]
    assert alarms(Divergence(LOSS), losses) == {
        14: {"metric": "loss", "value": 6.1, "median": 2.0},
        18: {"metric": "loss", "value": 6.5, "median": 2.0},
    }


def test_a_loss_that_stays_high_does_not_become_the_median():
    assert list(alarms(Divergence(LOSS), [2.0] * 20 + [9.0] * 500 + [2.0, 9.0])) == [21, 522]


def test_no_loss_is_judged_before_there_are_ten_to_compare_it_with():
    assert alarms(Divergence(LOSS), [1.0] * 9 + [50.0]) == {}
    assert list(alarms(Divergence(LOSS), [1.0] * 10 + [50.0])) == [11]


def test_a_loss_that_falls_is_compared_with_its_recent_past():
    falling = [9 * 0.99**n for n in range(400)]
    assert list(alarms(Divergence(LOSS), [*falling, 1.0])) == [401]


@given(st.lists(st.floats(-3, 3), max_size=300))
def test_a_loss_around_zero_as_grpo_has_is_no_alarm(losses):
    assert alarms(Divergence(GRPO), losses) == {}


@given(st.lists(st.floats(-0.3, 0.3), max_size=300))
def test_a_loss_that_has_all_but_vanished_is_no_alarm(losses):
    assert alarms(Divergence(LOSS), losses) == {}


def test_a_policy_that_leaves_its_reference_or_picks_at_random_is_said_whatever_the_loss():
    for name in ("kl", "entropy"):
        watch = Divergence(GRPO)
        for step in range(40):
            assert watch.update({"loss": (-1) ** step * 0.2, name: 0.001 * step}) is None
        assert watch.update({"loss": 0.1, name: 3.5}) == {
            "metric": name,
            "value": 3.5,
            "median": pytest.approx(0.0195),
        }


def test_what_a_step_does_not_measure_is_passed_over():
    watch = Divergence(GRPO)
    for _ in range(20):
        assert watch.update({"loss": None, "kl": float("nan"), "reward": 5}) is None


@given(st.lists(st.floats(-1, 20), max_size=150), st.integers(0, 150))
def test_a_resumed_run_says_what_an_uninterrupted_one_says(losses, step):
    straight, resumed = Divergence(LOSS), Divergence(LOSS)
    for loss in losses[:step]:
        straight.update({"loss": loss})
    resumed.load_state(orjson.loads(orjson.dumps(straight.state())))
    rest = [straight.update({"loss": loss}) for loss in losses[step:]]
    assert [resumed.update({"loss": loss}) for loss in losses[step:]] == rest
    assert resumed.state() == straight.state()


def test_every_training_kind_says_what_is_watched_and_from_which_size_on():
    kinds = [spec_class(kind) for kind in KINDS]
    for kind in kinds:
        if issubclass(kind, TrainingSpec):
            assert "loss" in kind.watched
            assert min(kind.watched.values()) > 0


class Clock:
    """A time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Training:
    """Steps on a clock of their own, under a watch that looks when told to."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.stalls: list[Stall] = []
        self.watch = StallWatch(self.stalls.append, clock=self.clock)

    def step(self, *seconds: float) -> None:
        """A step that is looked at after each of these spans."""
        self.watch.begin("step")
        self.go_on(*seconds)
        self.watch.end()

    def go_on(self, *seconds: float) -> None:
        for span in seconds:
            self.clock.now += span
            self.watch.look()


def test_a_step_of_more_than_ten_times_the_median_is_said_once_while_it_lasts():
    training = Training()
    for _ in range(6):
        training.step(1.0)
    training.watch.begin("step")
    training.go_on(9.9)
    assert training.stalls == []
    training.go_on(0.2)
    [stall] = training.stalls
    assert stall.fields() == {
        "activity": "step",
        "seconds": pytest.approx(10.1),
        "median_s": 1.0,
    }
    training.go_on(5.0, 60.0)
    training.watch.end()
    assert len(training.stalls) == 1
    training.step(1.0)
    training.step(11.0)
    assert len(training.stalls) == 2


def test_short_steps_stall_after_seconds_not_milliseconds():
    training = Training()
    for _ in range(6):
        training.step(0.01)
    training.step(4.9)
    assert training.stalls == []
    training.step(0.01)
    training.step(10.0)
    assert [stall.seconds for stall in training.stalls] == [10.0]


def test_the_first_steps_are_not_judged():
    training = Training()
    for seconds in (100.0, 1.0, 1.0, 1.0, 80.0):
        training.step(seconds)
    assert training.stalls == []


def test_steps_that_generate_now_and_then_are_no_stall():
    training = Training()
    for _ in range(30):
        for seconds in (25.0, 1.0, 1.0, 1.0):
            training.step(seconds)
    assert training.stalls == []


def test_a_run_that_has_become_slow_for_good_is_the_new_usual():
    training = Training()
    for seconds in [1.0] * 40 + [20.0] * 200:
        training.step(seconds)
    assert 1 <= len(training.stalls) <= 20


def test_checkpoints_evaluations_and_pauses_are_not_the_steps_time():
    training = Training()
    for _ in range(6):
        training.step(1.0)
        with training.watch.during("evaluation"):
            training.go_on(30.0)
    training.watch.begin("step")
    training.go_on(0.5)
    with training.watch.during("checkpoint"):
        training.go_on(500.0)
    with training.watch.during(None):
        training.go_on(5000.0)
    training.go_on(0.5)
    training.watch.end()
    training.go_on(5000.0)
    assert training.stalls == []
    training.step(11.0)
    with training.watch.during("evaluation"):
        training.go_on(301.0)
    assert [(stall.activity, stall.median_s) for stall in training.stalls] == [
        ("step", 1.0),
        ("evaluation", 30.0),
    ]


def test_a_stall_that_kept_the_interpreter_to_itself_is_said_at_its_end():
    training = Training()
    for _ in range(6):
        training.step(1.0)
    training.watch.begin("step")
    training.clock.now += 60  # and nobody could look
    training.watch.begin("step")
    assert [stall.seconds for stall in training.stalls] == [60.0]


def test_a_stall_is_in_the_event_log_while_the_step_still_lasts(tmp_path):
    path = tmp_path / "events.jsonl"
    with (
        events.EventLog(path, execution=1) as log,
        StallWatch(lambda stall: log.emit("stall", **stall.fields()), shortest_s=0.05) as watch,
    ):
        for number in range(1, 7):
            watch.begin("step")
            log.emit("step", step=number)
        watch.begin("step")  # ends the sixth
        wait_until(lambda: [event for event in events.read(path) if event["type"] == "stall"])
        watch.end()
    stall = list(events.read(path))[-1]
    assert (stall["type"], stall["step"], stall["activity"]) == ("stall", 6, "step")
    assert stall["seconds"] > 0.05


def test_a_stall_on_a_full_disk_leaves_the_watch_alive():
    seen: list[Stall] = []

    def full_disk(stall: Stall) -> None:
        seen.append(stall)
        raise OSError("disk full")

    with StallWatch(full_disk, shortest_s=0.02) as watch:
        for _ in range(6):
            watch.begin("step")
        wait_until(lambda: len(seen) == 1)
        watch.begin("step")
        wait_until(lambda: len(seen) == 2)


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


def test_a_divergence_computed_again_after_a_resume_is_seen_once(tmp_path: Path):
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
