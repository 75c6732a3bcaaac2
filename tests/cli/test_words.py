"""Parsing of times, and the text of durations, tables, events and progress."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest
from hypothesis import given, strategies as st

from warmd.cli.commands import evaluate
from warmd.cli.view import render
from warmd.cli.view.describe import describe
from warmd.cli.view.progress import Progress
from warmd.cli.view.times import parse_time
from warmd.jobs.durations import parse_duration
from warmd.jobs.errors import SpecError

NOW = datetime(2026, 11, 21, 18, 0).astimezone()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("1h30m", 5400), ("2d", 172800), ("1.5h", 5400)],
)
def test_durations_are_read_with_their_units(text, seconds):
    assert parse_duration("in", text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "-5m", "0s", "5 parsecs", "nan", "1e999", "99999999d"]
)
def test_invalid_durations_are_refused_by_name(text):
    with pytest.raises(SpecError, match=r"^in: must be .*, got"):
        parse_duration("in", text)


@pytest.mark.parametrize("text", ["8", "0", "1.5", " 90 ", "-5", "1e3"])
def test_a_duration_without_a_unit_is_refused_with_an_example(text):
    with pytest.raises(SpecError, match=r"^timeout: must have a unit, such as 90s, 15m or 1h30m"):
        parse_duration("timeout", text)


def test_a_time_of_day_is_the_next_one():
    assert parse_time("at", "18:30", now=NOW) == NOW + timedelta(minutes=30)
    assert parse_time("at", "7:05", now=NOW) == datetime(2026, 11, 22, 7, 5).astimezone()
    assert parse_time("at", "18:00", now=NOW) == datetime(2026, 11, 22, 18, 0).astimezone()


def test_a_date_and_time_is_local_unless_it_names_an_offset():
    assert parse_time("at", "2026-11-23 08:00", now=NOW) == datetime(2026, 11, 23, 8).astimezone()
    with_offset = parse_time("at", "2026-11-23T08:00+05:00", now=NOW)
    assert with_offset.utcoffset() is not None
    assert with_offset == datetime.fromisoformat("2026-11-23T03:00+00:00")


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time with daylight saving: clocks change at 1:00 UTC on 2027-03-28 and 2026-10-25."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("berlin")
def test_a_local_time_that_does_not_exist_is_refused_and_of_two_the_first_is_taken():
    spring = datetime(2027, 3, 27, 22).astimezone()
    for text in ("2:30", "02:00", "2027-03-28 02:59"):
        with pytest.raises(SpecError, match=r"^at: must be a local time that exists, got .* set f"):
            parse_time("at", text, now=spring)
    assert parse_time("at", "3:00", now=spring) == datetime(2027, 3, 28, 1, tzinfo=UTC)
    assert parse_time("at", "1:59", now=spring) == datetime(2027, 3, 28, 0, 59, tzinfo=UTC)
    assert parse_time("at", "2027-03-28 02:30+01:00", now=spring).timestamp() == 1806197400
    autumn = datetime(2026, 10, 24, 22).astimezone()
    assert parse_time("at", "2:30", now=autumn) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    between = datetime(2026, 10, 25, 0, 45, tzinfo=UTC)
    assert parse_time("at", "2:30", now=between) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize("text", ["25:00", "2020-01-01 10:00", "9999-12-31", "noon", "", "1:2:3:4"])
def test_invalid_or_past_times_are_refused_by_name(text):
    with pytest.raises(SpecError, match=r"^at: must be a time to come"):
        parse_time("at", text, now=NOW)


@given(st.text())
def test_any_text_is_a_time_a_duration_or_a_one_line_error_with_the_field(text):
    readers: list[Callable[[], float]] = [
        lambda: parse_duration("in", text),
        lambda: parse_time("at", text, now=NOW).timestamp(),
    ]
    for read in readers:
        try:
            value = read()
        except SpecError as error:
            message = str(error)
            assert message.startswith(("in: ", "at: "))
            assert len(message.splitlines()) == 1
        else:
            assert value > 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.421, "0.42 s"),
        (3.21, "3.2 s"),
        (59.4, "59 s"),
        (59.6, "1m 00s"),
        (200, "3m 20s"),
        (3599.7, "1h 00m"),
        (7500, "2h 05m"),
        (273600, "3d 4h"),
    ],
)
def test_durations_are_shown_in_two_units_at_most(seconds, text):
    assert render.duration(seconds) == text


def test_sizes_are_shown_in_powers_of_ten():
    assert [render.size(n) for n in (None, 512, 1_980_000_000, 747e6)] == [
        "-",
        "512 B",
        "1.98 GB",
        "747 MB",
    ]


def test_a_moment_of_another_day_shows_its_day():
    assert render.clock(NOW.timestamp() + 60, now=NOW.timestamp()) == "18:01"
    assert render.clock(NOW.timestamp() + 86400, now=NOW.timestamp()) == "Sun 18:00"
    assert render.clock(NOW.timestamp() - 30 * 86400, now=NOW.timestamp()).startswith("2026-10-22")


def test_a_table_is_aligned_and_its_last_column_is_cut():
    rows = [["a", "12", "x" * 90], ["longer", "3", click.style("red", fg="red")]]
    lines = [click.unstyle(line) for line in render.table(["NAME", ">N", "TEXT"], rows, width=40)]
    assert lines == [
        "NAME     N  TEXT",
        "a       12  " + "x" * 27 + "…",
        "longer   3  red",
    ]


def test_a_last_column_below_the_rows_leaves_its_width_to_the_others():
    headers = ["MODEL", ">SIZE", "STATUS", "PATH"]
    rows = [["grpo-20261123-092820-cadh", "1.98 GB", "x" * 20, "/home/me/runs/folder"]]
    lines = [click.unstyle(line) for line in render.table(headers, rows, width=56)]
    assert lines[1] == "grpo-20261123-092820-cadh  1.98 GB  " + "x" * 20
    assert lines[2] == "  path: /home/me/runs/folder"


def test_the_model_that_a_job_started_from_is_named_in_words():
    assert render.model("grpo-20261123-092820-cadh:init") == "start of grpo-20261123-092820-cadh"
    assert render.model("qwen") == "qwen"


@given(st.text())
def test_untrusted_text_cannot_control_the_terminal(text):
    assert render.one_line(text).isprintable()


def step(number: int, at: float, *, execution: int = 1, **fields: Any) -> dict[str, Any]:
    event = {"seq": number, "execution": execution, "time": at, "type": "step", "step": number}
    return {**event, "steps_total": 80, **fields}


def test_a_step_is_one_line_with_the_main_metrics():
    event = step(12, NOW.timestamp(), loss=0.12345678, reward=0.5, kl=None, tokens=[1, 2])
    assert describe(event) == "18:00:00  step 12/80  loss 0.1235  reward 0.5"


def test_events_of_any_kind_are_one_printable_line():
    event = {"seq": 1, "execution": 2, "time": NOW.timestamp(), "step": 7, "type": "failed"}
    event |= {"error": "loss is nan\n\x1b[2J", "traceback": "long\nlines", "peak_bytes": 21.3e9}
    assert describe(event) == "18:00:00  failed at step 7  error loss is nan [2J  peak 21.3 GB"


def test_the_eta_is_the_median_of_recent_steps_so_that_one_slow_step_changes_little():
    progress = Progress()
    at = 0.0
    for number, seconds in enumerate([9, 2, 2, 60, 2], start=1):
        at += seconds
        progress.update(step(number, at))
    assert progress.seconds_per_step == 2
    assert progress.eta_s(now=at) == 75 * 2
    assert progress.eta_s(now=at + 1) == 75 * 2 - 1


def test_the_eta_does_not_grow_while_a_step_takes_longer_than_usual():
    progress = Progress()
    for number in (1, 2, 3):
        progress.update(step(number, 2.0 * number))
    assert progress.eta_s(now=7.0) == 77 * 2 - 1
    assert progress.eta_s(now=8.0) == progress.eta_s(now=5000.0) == 76 * 2


@pytest.mark.parametrize("jump", [86_400, -86_400])
def test_a_clock_jump_of_a_day_does_not_change_the_eta(jump):
    progress = Progress()
    for number in range(1, 5):
        progress.update(step(number, 100_000 + 2.0 * number))
    progress.update(step(5, 100_010.0 + jump))
    progress.update(step(6, 100_012.0 + jump))
    assert progress.seconds_per_step == 2
    assert progress.eta_s(now=100_012.0 + jump) == 74 * 2
    # A jump between two steps costs no more than the step that is being computed.
    assert progress.eta_s(now=100_012.0 + 2 * jump) in (73 * 2, 74 * 2)


def test_there_is_no_eta_before_the_second_step_or_right_after_a_resume():
    progress = Progress()
    progress.update(step(1, 100.0))
    assert progress.eta_s(now=100.0) is None
    progress.update(step(2, 103.0))
    progress.update({"seq": 3, "execution": 2, "time": 5000.0, "type": "started", "step": None})
    assert progress.eta_s(now=5000.0) is None
    progress.update(step(3, 5009.0, execution=2))
    assert progress.seconds_per_step == 3  # the pause and the start are no step


def other(type: str, at: float, *, number: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"seq": 1, "execution": 1, "time": at, "type": type, "step": number, **fields}


@given(st.integers(1, 20), st.integers(1, 20))
def test_the_eta_counts_the_evaluations_and_checkpoints_to_come(eval_every, save_every):
    at, clocks = 0.0, []
    progress = Progress()
    for number in range(1, 81):
        at += 1.0
        progress.update(step(number, at))
        clocks.append((at, progress.eta_s(now=at)))
        if number % eval_every == 0:
            at += 30.0
            progress.update(other("eval", at, number=number, phase="during", seconds=30.0))
        if number % save_every == 0:
            at += 3.0
            progress.update(other("checkpoint", at, number=number, blocked_s=3.0))
    assert progress.seconds_per_step == 1.0
    for when, eta_s in clocks[40:]:
        # The share of an interval that has begun is not known to a step.
        assert eta_s == pytest.approx(at - when, abs=2 * (30.0 + 3.0), rel=0.15)


def test_a_pause_does_not_count_as_step_time_and_has_no_eta():
    progress = Progress()
    for number in (1, 2, 3):
        progress.update(step(number, 2.0 * number))
    progress.update(other("paused", 6.0, number=3))
    assert progress.line(500.0, 120).split("  ")[1:] == ["3/80", "paused", "2.0 s/step"]
    assert progress.eta_s(now=500.0) is None
    progress.update(other("unpaused", 9000.0, number=3))
    assert progress.eta_s(now=9000.0) == 77 * 2
    progress.update(step(4, 9002.0))
    assert (progress.seconds_per_step, progress.eta_s(now=9002.0)) == (2, 76 * 2)


def test_after_a_resume_the_eta_includes_the_repeated_steps():
    progress = Progress()
    for number in range(1, 9):
        progress.update(step(number, 2.0 * number))
    begin = other("begin", 100.0, steps_total=80, resumed_from=5)
    progress.update({**begin, "execution": 2})
    assert progress.eta_s(now=100.0) == 75 * 2
    assert progress.eta_s(now=106.0) == 72 * 2
    assert "ETA 2m 24s" in progress.line(106.0, 120)
    progress.update(step(9, 108.0, execution=2))
    assert progress.eta_s(now=108.0) == 71 * 2


def test_micro_steps_are_shown_if_a_step_has_several():
    progress = Progress()
    progress.update(other("begin", 0.0, steps_total=80, micro_steps_total=320))
    progress.update(step(10, 1.0, micro_steps=40))
    assert progress.line(1.0, 120).endswith("10/80  40/320 micro-steps")
    progress.update(other("begin", 0.0, steps_total=80, micro_steps_total=80))
    progress.update(step(11, 2.0, micro_steps=11))
    assert "micro" not in progress.line(2.0, 120)


@pytest.mark.parametrize(
    ("type", "fields", "words"),
    [
        (
            "stall",
            {"activity": "step", "seconds": 52.0, "median_s": 1.25},
            "stalled: after step 7 the step has taken 52 s and has not ended; the median is 1.2 s",
        ),
        (
            "divergence",
            {"metric": "loss", "value": 9.25, "median": 2.0},
            "diverges at step 7: loss is 9.25, its median 2",
        ),
        ("paused", {}, "paused after step 7, in memory, until `warmd resume`"),
        (
            "paused",
            {"released": True},
            "paused after step 7, saved, and its memory released, until `warmd resume`",
        ),
        ("unpaused", {}, "continues after step 7"),
        ("revised", {"learning_rate": [1e-4, 5e-5]}, "revised: learning_rate 0.0001 -> 5e-05"),
        (
            "revised",
            {"options": {"save_every": ["25", "10m"], "keep_best": [None, "loss"]}},
            "revised: save_every 25 -> 10m; keep_best default -> loss",
        ),
        ("extended", {"steps": [40, 80]}, "extended: steps 40 -> 80"),
        (
            "save_failed",
            {"error": "[Errno 28] No space left\non device", "seconds": 3.21},
            "no checkpoint of step 7: [Errno 28] No space left on device (after 3.2 s)",
        ),
    ],
)
def test_important_events_are_shown_as_sentences(type, fields, words):
    event = other(type, NOW.timestamp(), number=7, **fields)
    assert describe(event) == f"18:00:00  {words}"
    assert describe(other(type, NOW.timestamp())).isprintable()  # of another version


def test_the_live_line_has_bar_step_time_and_end_time():
    progress = Progress()
    for number in (39, 40):
        progress.update(step(number, NOW.timestamp() + number, loss=0.5, reward=0.25))
    line = progress.line(NOW.timestamp() + 40, width=120)
    bar = "█" * 10 + "░" * 10
    assert line == f"{bar}  40/80  ETA 40 s  done at 18:01  loss 0.5  reward 0.25  1.0 s/step"


@given(st.integers(2, 200))
def test_the_live_line_always_fits(width):
    progress = Progress()
    for number in (1, 2):
        progress.update(step(number, NOW.timestamp() + number, loss=-0.123456, reward=1e-9))
    assert len(progress.line(NOW.timestamp(), width)) < width


def test_before_the_first_step_the_live_line_shows_the_phase():
    progress = Progress()
    assert progress.line(0.0, 80) == "waiting"
    begin = {"seq": 2, "execution": 1, "time": 0.0, "type": "begin", "step": None}
    progress.update({**begin, "steps_total": 80})
    assert progress.line(1.0, 80).endswith("0/80  starting")


def test_a_comparison_names_the_other_model_and_its_evaluation_where_both_are_the_same():
    found = {"difference": 0.1, "low": 0.0, "high": 0.2, "gained": 3, "lost": 1, "p": 0.5}
    result = {"model": "a", "against": "eval-1", "comparison": {"reward": {**found, "words": "x"}}}
    heads = [
        evaluate.comparison_lines(result, other)[0].partition(":")[0] for other in (None, "b", "a")
    ]
    assert heads == ["a against eval-1", "a against b", "a against a (eval-1)"]
    assert evaluate.comparison_lines({"model": "a", "comparison": None}) == []
