"""`warmd jobs --since`, with a real Redis."""

import time

import pytest
from breadth import mostly_slow

from warmd.daemon.reports.digest import lost_time


def test_the_digest_has_results_with_intervals_reasons_and_running_jobs(desk):
    good, bad, running = desk.submit("--name", "good"), desk.submit(), desk.submit()
    desk.submit("--in", "1h")
    run = desk.begin()
    run.log.emit("eval", step=0, phase="before", reward=0.385, n=200)
    run.step(1)
    interval = {"reward": [0.602, 0.731]}
    run.log.emit("eval", step=4, phase="after", reward=0.67, n=200, intervals=interval)
    run.finish({"steps": 4})
    desk.begin().fail("step 3: the loss is nan\n[click](http://x)")
    run = desk.begin()
    run.step(1)
    run.step(2)
    [found] = desk.rows("jobs", "--since", "1h")
    assert [(line["id"], line["status"]) for line in found["ended"]] == [
        (good, "finished"),
        (bad, "failed"),
    ]
    about = found["ended"][0]["evaluation"]
    assert (about["metric"], about["before"], about["value"]) == ("reward", 0.385, 0.67)
    assert (about["low"], about["high"]) == (0.602, 0.731)
    assert running in [line["id"] for line in found["pending"]]
    assert found["disk_free_bytes"] > 0
    text = desk.warmd("jobs", "--since", "12h").out
    assert f"  {good}  good  step 4/4  reward 0.385 -> 0.67  95 % interval 0.602 to 0.731" in text
    assert "1 finished, 1 failed, 2 running or waiting" in text
    assert text.index("Failed") < text.index("Finished")
    markdown = desk.warmd("jobs", "--since", "12h", "--markdown").out
    assert markdown.startswith("# warmd: ")
    assert r"\[click\](http://x)" in markdown


def test_the_interval_of_an_evaluation_is_its_own(desk):
    desk.submit()
    run = desk.begin()
    run.log.emit("eval", reward=0.5, n=8, intervals={"reward": [0.45, 0.55]})
    run.finish({})
    assert (
        "reward 0.5  95 % interval 0.450 to 0.550 (n 8)" in desk.warmd("jobs", "--since", "12h").out
    )


def test_a_job_that_has_written_no_log_is_no_wrong_usage(desk):
    job_id = desk.submit()
    done = desk.warmd("logs", job_id)
    assert (done.code, done.out) == (0, "")
    assert f"{job_id} has written no log" in done.err


def test_a_training_without_an_evaluation_has_the_metric_of_its_last_step(desk):
    desk.submit()
    run = desk.begin()
    run.step(1)
    run.log.emit("step", step=2, steps_total=4, loss=0.25)
    run.finish({})
    assert "step 2/4  loss 0.25" in desk.warmd("jobs", "--since", "12h").out


def test_completions_without_a_score_are_counted(desk):
    desk.submit()
    run = desk.begin()
    run.log.emit("eval", step=4, phase="after", reward=0.5, n=37, unscored=3, completions=40)
    run.finish({})
    assert "reward 0.5  unscored: 3 of 40" in desk.warmd("jobs", "--since", "12h").out
    (line,) = desk.warmd("jobs", "--since", "12h", "--json").objects[0]["ended"]
    evaluation = line["evaluation"]
    assert (evaluation["n"], evaluation["unscored"], evaluation["completions"]) == (37, 3, 40)
    assert "unscored: 3 of 40" in desk.warmd("tail").out


def test_a_mean_whose_interval_is_unknown_is_shown_without_one(desk):
    desk.submit()
    run = desk.begin()
    run.log.emit("eval", step=4, phase="after", reward=0.5, n=20)  # as earlier versions did
    run.finish({})
    out = desk.warmd("jobs", "--since", "12h").out
    assert "reward 0.5" in out
    assert "interval" not in out


def test_jobs_that_ended_before_the_span_are_not_in_the_digest(desk):
    desk.submit()
    desk.begin().finish({"steps": 4})
    time.sleep(0.01)
    [found] = desk.rows("jobs", "--since", "0.005s")
    assert found["ended"] == []


def test_the_digest_reads_the_run_directories_while_no_daemon_runs(desk):
    job_id = desk.submit()
    desk.begin().fail("no memory")
    desk.server.stop()
    [found] = desk.rows("jobs", "--since", "12h")
    assert [line["id"] for line in found["ended"]] == [job_id]


@pytest.mark.parametrize(
    "text", mostly_slow(["tomorrow", "25:00", "2999-01-01", "5", ""], but=["2999-01-01"])
)
def test_a_start_that_is_not_in_the_past_is_refused(desk, text):
    done = desk.warmd("jobs", "--since", text)
    assert done.is_refusal(2)
    assert done.err.startswith("Error: since: must be a past time like 18:00")


def events(*pairs):
    return [{"type": type, "time": float(at)} for type, at in pairs]


def test_an_interruption_costs_the_time_until_the_next_new_step():
    found = events(
        ("started", 0), ("step", 1), ("requeued", 11), ("started", 12), ("begin", 14), ("step", 21)
    )
    assert lost_time(found, 0) == (1, 20.0)
    assert lost_time(found, 13) == (0, 0.0)


def test_a_requested_resume_is_not_an_interruption():
    found = events(("started", 0), ("step", 1), ("stopped", 2), ("started", 90), ("step", 91))
    assert lost_time(found, 0) == (0, 0.0)
