"""`import warmd`: sessions and jobs as objects of Python."""

import subprocess
import sys
import threading
from typing import Any

import pytest

import warmd
from warmd.daemon.api.session import Session
from warmd.jobs import KINDS, spec_class


@pytest.fixture
def session(desk):
    with warmd.connect(desk.home.path) as opened:
        yield opened


@pytest.fixture
def options(desk):
    return {"model": desk.grpo[3], "samples": 4}


@pytest.mark.slow
def test_importing_warmd_and_submitting_a_job_loads_no_torch(desk, options):
    code = f"""
import sys, warmd
job = warmd.connect({str(desk.home.path)!r}).submit("grpo", **{options!r})
assert job.status == "queued", job.status
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_submitted_job_has_an_id_a_kind_a_status_and_a_name(session, options):
    job = session.submit("grpo", **options, name="first", tags=["a", "b"])
    assert (job.kind, job.status) == ("grpo", "queued")
    assert job.info()["tags"] == ["a", "b"]
    assert session.job("first") == session.job(job.id) == job
    assert job.cancel() == "canceled"
    with pytest.raises(warmd.JobFailed, match="canceled"):
        job.result()


def test_a_wrong_option_is_refused_and_nothing_is_queued(session, options):
    with pytest.raises(warmd.SpecError, match="learning_rate: must be a number above 0"):
        session.submit("grpo", **options, learning_rate=-1)
    with pytest.raises(warmd.SpecError, match="tag: must be"):
        session.submit("grpo", **options, tags=["a b"])
    assert session.jobs() == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"timeout_s": "1h"}, "timeout_s: must be a number of seconds above 0, got '1h'"),
        pytest.param(
            {"timeout_s": float("nan")},
            "timeout_s: must be a number of seconds above 0, got nan",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"retries": 1.5},
            "retries: must be an integer of at least 0, got 1.5",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"retries": -1},
            "retries: must be an integer of at least 0, got -1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"front": "yes"}, "front: must be True or False, got 'yes'", marks=pytest.mark.slow
        ),
        ({"at": "tomorrow"}, "at: must be a datetime, got 'tomorrow'"),
    ],
)
def test_how_a_job_is_queued_is_checked(session, options, given, words):
    with pytest.raises(warmd.SpecError, match=words):
        session.submit("grpo", **options, **given)
    assert session.jobs() == []


def test_jobs_are_listed_newest_first_and_filtered(session, options):
    one = session.submit("grpo", **options, name="lr-1", tags=["sweep"])
    two = session.submit("grpo", **options, after=one)
    assert session.jobs() == [two, one]
    assert session.jobs(limit=1) == [two]
    assert session.jobs(status="queued", kind="grpo") == [one]
    assert session.jobs(name="lr-*", tags=["sweep"]) == [one]
    two.cancel()
    one.pause()
    assert session.jobs(status="paused") == [one]


def test_events_metrics_and_result_of_a_job(desk, session, options):
    job = session.submit("grpo", **options)
    run = desk.begin()
    run.step(1)
    run.log.emit("eval", step=1, reward=0.75, phase="during")
    run.step(2)
    metrics = job.metrics()
    assert metrics["step"] == [1, 2]
    assert metrics["loss"] == [1.0, 0.5]
    assert metrics["eval_reward"] == [0.75, None]
    assert {len(column) for column in metrics.values()} == {2}
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.1 s"):
        job.wait(timeout_s=0.1)
    threading.Timer(0.2, run.finish, [{"steps": 2}]).start()
    assert [event["type"] for event in job.events()][-1] == "finished"
    assert job.wait() == "finished"
    assert job.result() == {"steps": 2}


def test_a_failed_job_raises_its_reason(desk, session, options):
    job = session.submit("grpo", **options)
    desk.begin().fail("loss is nan")
    with pytest.raises(warmd.JobFailed, match="failed: loss is nan"):
        job.result()


def test_waiting_shows_step_and_status_when_asked_to(desk, session, options, capsys):
    job = session.submit("grpo", **options)
    run = desk.begin()
    run.step(2)
    run.finish({"steps": 2})
    job.wait(progress=True)
    assert "finished  step 2/4  loss 0.5  reward 0.5" in capsys.readouterr().err


def test_a_notebook_shows_a_job_and_a_table_with_all_text_escaped(desk, session, options):
    job = session.submit("grpo", **options, name="first")
    run = desk.begin()
    run.step(2)
    assert '<progress value="0.5000" max="1">' in job._repr_html_()
    run.fail("<script>alert(1)</script>")
    assert "&lt;script&gt;" in job._repr_html_()
    table = session.jobs()._repr_html_()
    assert job.id in table
    assert "first" in table


def test_a_notebook_shows_the_points_of_a_sweep(session, options):
    sweep = session.sweep("grpo", over={"learning_rate": [1e-5, 1e-4]}, **options)
    shown = sweep._repr_html_()
    assert f"<caption>{sweep.id}</caption>" in shown
    assert "<th>learning_rate</th>" in shown
    assert "<td>0.0001</td>" in shown


def test_answers_are_listed_by_their_kind(session, options):
    training = session.submit("grpo", **options)
    answer = session.submit("infer", model=options["model"], prompt="1")
    assert session.jobs() == [training]
    assert session.jobs(kind="infer") == [answer]


def test_no_option_of_a_kind_is_hidden_by_a_parameter_of_submit():
    parameters = set(Session.submit.__kwdefaults__ or ())
    for kind in KINDS:
        assert parameters & spec_class(kind).options().keys() == set(), kind


def test_complete_gives_the_text_as_a_whole_or_in_pieces(shared_daemon):
    with warmd.connect(shared_daemon.home.path) as session:
        options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
        whole = session.complete("1 and 2", **options)
        pieces = list(session.complete("1 and 2", stream=True, **options))
        assert "".join(pieces) == whole
        with pytest.raises(warmd.SpecError, match="n: must be 1 here"):
            session.complete("1", n=2)


@pytest.mark.slow
def test_models_are_loaded_listed_and_unloaded(shared_daemon, tiny_model):
    with warmd.connect(shared_daemon.home.path) as session:
        loaded = session.load(f"another={tiny_model}", once=True)
        assert loaded["name"] == "another"
        assert {"another", "tiny"} <= {model["name"] for model in session.models()}
        session.unload("another")
        assert "another" not in {model["name"] for model in session.models()}
        with pytest.raises(warmd.NotFound, match="must be a model folder"):
            session.load("nowhere=./no/such/folder")


def test_leaving_a_stream_cancels_its_job(shared_daemon):
    with warmd.connect(shared_daemon.home.path) as session:
        pieces = session.complete("1 and", stream=True, model="tiny", max_tokens=50)
        next(pieces)
        [job] = session.jobs(kind="infer", limit=1)
        pieces.close()
        assert job.wait(timeout_s=30) in ("stopped", "finished")
