"""The actions of the dashboard, in a real browser with a real daemon."""

from __future__ import annotations

import pytest
from dashboard import finished, running
from waiting import wait_until

pytestmark = pytest.mark.nightly(
    part="page",
    catches="a button of the page that acts on the wrong job, or does not show what it did",
)


def test_pause_continue_kill_resume_and_remove_a_job(page, daemon):
    job_id = running(daemon)
    browser = page.open(f"jobs/{job_id}")
    browser.press(f"Pause {job_id}")
    browser.wait_for("Nothing is lost; the worker stays occupied.")
    browser.press("Pause the job")
    browser.wait("document.querySelector('.status.paused') !== null")
    browser.press(f"Continue {job_id}")
    browser.press("Continue the job")
    browser.wait("document.querySelector('.status.running') !== null")
    browser.press(f"Kill {job_id}")
    browser.wait_for("All steps since its latest checkpoint are lost.")
    browser.press("Kill the job")
    browser.wait("document.querySelector('.status.stopped') !== null")
    browser.press(f"Resume {job_id}")
    browser.press("Resume the job")
    browser.wait("document.querySelector('.status.running') !== null", timeout_s=60)
    assert daemon.client.jobs.get(job_id)["execution"] == 2
    browser.press(f"Cancel {job_id}")
    browser.press("Cancel the job")
    browser.wait("document.querySelector('.status.stopped') !== null", timeout_s=60)
    browser.press(f"Remove {job_id}")
    browser.wait_for("This cannot be undone.")
    browser.press("Remove the job")
    wait_until(lambda: not (daemon.home.runs / job_id).exists())
    browser.wait("location.hash === '#/runs'")


def test_a_finished_job_is_trained_further_with_more_steps(page, daemon):
    job_id = finished(daemon)
    browser = page.open(f"jobs/{job_id}")
    browser.press(f"Resume {job_id}")
    browser.type("dialog input[name=steps]", "4")
    browser.press("Resume the job")
    browser.wait_for("steps: must be at least 6")
    browser.type("dialog input[name=steps]", "8")
    browser.press("Resume the job")
    wait_until(lambda: daemon.client.jobs.get(job_id)["step"] == 8, timeout_s=60)
    browser.wait_for("8/8")


def test_waiting_jobs_are_reordered(page, daemon):
    running(daemon)
    first, second = daemon.submit(), daemon.submit()
    browser = page.open()
    browser.press(f"Move down {first}")
    wait_until(lambda: daemon.client.jobs.get(first)["position"] == 2)
    assert daemon.client.jobs.get(second)["position"] == 1
    ids = "[...document.querySelectorAll('.cards a.job')].map((a) => a.innerText)"
    wait_until(lambda: browser.js(f"return {ids}")[1:3] == [second, first])


def test_two_models_complete_one_prompt(page, jobs_of_all_states):
    browser = page.open(f"compare?model=tiny&model={jobs_of_all_states[0]}")
    browser.type("textarea[name=prompt]", "1+1=")
    browser.press("Complete with both")
    notes = "[...document.querySelectorAll('.answer .quiet')].map((p) => p.innerText)"
    browser.wait(f"{notes}.every((note) => note)", timeout_s=60)
    assert all("tokens" in note for note in browser.js(f"return {notes}"))
    assert browser.problems() == []


def test_a_model_is_unloaded_and_loaded(page, daemon):
    browser = page.open()
    browser.wait_for("no chat template")
    browser.press("Unload tiny")
    browser.press("Unload the model")
    names = "[...document.querySelectorAll('li strong')].map((name) => name.innerText)"
    browser.wait(f"!{names}.includes('tiny')", timeout_s=30)
    assert "tiny" not in [model["name"] for model in daemon.status()["models"]]
    browser.press("Load a model …")
    browser.choose("form select", "tiny")
    browser.press("Load")
    browser.press("Load the model")
    browser.wait(f"{names}.includes('tiny')", timeout_s=30)
    assert "tiny" in [model["name"] for model in daemon.status()["models"]]


def test_everything_is_reached_by_the_keyboard(page, daemon):
    job_id = running(daemon)
    browser = page.open()
    browser.wait_for(job_id)
    tab, enter, escape = "\ue004", "\ue007", "\ue00c"

    def focused() -> str:
        found: str = browser.js(
            "const e = document.activeElement; return e.ariaLabel ?? e.innerText"
        )
        return found

    for _ in range(30):
        browser.keys(tab)
        if focused() == f"Cancel {job_id}":
            break
    assert focused() == f"Cancel {job_id}"
    browser.keys(enter)
    browser.wait("document.querySelector('dialog[open]') !== null")
    browser.keys(escape)
    browser.wait("document.querySelector('dialog[open]') === null")
    assert daemon.client.jobs.get(job_id)["status"] == "started"
