"""The views of the dashboard in a real browser: accessible, on screens of all sizes, live."""

from __future__ import annotations

import os

import pytest
from dashboard import OPTIONS, WIDTHS, assert_clean, finished, running
from waiting import wait_until

from warmd.configs.labels import model_need
from warmd.daemon.lifecycle.queueing import Queueing
from warmd.jobs import spec_class

pytestmark = pytest.mark.slow


NARROW = pytest.mark.nightly(
    part="page", catches="a view that is not accessible, or does not fit a narrow screen"
)
WIDER = pytest.mark.nightly(
    part="clients", catches="a view of jobs that does not fit a wide screen"
)


@pytest.mark.parametrize(
    "width",
    [pytest.param(w, marks=NARROW if w == WIDTHS[0] else WIDER) for w in WIDTHS],
)
def test_every_view_is_accessible_and_fits_the_screen(
    page, daemon, jobs_of_all_states, tmp_path, width
):
    one, other = jobs_of_all_states
    live = running(daemon)
    waiting = daemon.submit()
    views = {
        "overview": "",
        "requests": "requests",
        "job": f"jobs/{live}",
        "completions": f"jobs/{one}/completions",
        "checkpoints": f"jobs/{one}/checkpoints",
        "options": f"jobs/{one}/options",
        "events": f"jobs/{one}/events",
        "log": f"jobs/{one}/log",
        "submit": f"submit?job={one}",
        "compare": f"compare?job={one}&job={other}",
        "chat": "chat",
    }
    page.browser.resize(width)
    for name, view in views.items():
        browser = page.open(view)
        browser.wait("!document.body.innerText.includes('Loading')")
        browser.wait_for(waiting if name == "overview" else "warmd")
        browser.screenshot(tmp_path / f"{name}-{width}.png")
        assert_clean(browser)


def test_dialogs_and_dark_colors_are_accessible_at_400_percent_zoom(
    page, jobs_of_all_states, tmp_path
):
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.browser.cdp("Emulation.setEmulatedMedia", features=dark)
    page.browser.resize(320)  # 1280 pixels at 400 %
    try:
        browser = page.open(f"jobs/{jobs_of_all_states[0]}")
        browser.press("Remove " + jobs_of_all_states[0])
        browser.wait_for("This cannot be undone.")
        browser.screenshot(tmp_path / "dialog-dark-320.png")
        assert_clean(browser)
        browser.press("Back")
    finally:
        page.browser.cdp("Emulation.setEmulatedMedia", features=[])


def test_a_running_job_is_seen_live_without_a_reload(page, daemon):
    browser = page.open()
    browser.wait_for("No job runs or waits.")
    job_id = running(daemon)
    browser.wait_for(job_id)
    browser.open(f"{page.url}/#/jobs/{job_id}/events")
    browser.click("input[type=checkbox]")
    first = browser.wait("document.querySelectorAll('tbody tr').length")
    browser.wait("document.querySelectorAll('tbody tr').length > arguments[0]", first)


def test_curves_grow_while_the_job_runs(page, daemon):
    job_id = running(daemon)
    browser = page.open(f"jobs/{job_id}")
    steps = "document.querySelector('figure [role=img]')?.plot?.data[0].length"
    first = browser.wait(steps)
    browser.wait(f"{steps} > arguments[0]", first)
    browser.js("document.querySelector('figure details summary').click()")
    browser.wait("document.querySelector('figure tbody tr') !== null")


def test_the_overview_follows_the_queue_in_two_tabs(page, daemon):
    browser = page.open()
    first = browser.tab()
    second = browser.new_tab()
    try:
        for tab in (second, first):
            browser.switch(tab)
            page.open()
        job_id = running(daemon)
        for tab in (first, second):
            browser.switch(tab)
            browser.wait_for(job_id)
        browser.press(f"Cancel {job_id}")
        browser.press("Cancel the job")
        browser.wait_for("No job runs or waits.")
        browser.switch(first)
        browser.wait_for("No job runs or waits.")
    finally:
        browser.switch(second)
        browser.close_tab()
        browser.switch(first)


def test_the_page_reconnects_to_a_restarted_gateway_without_missing_events(page, daemon):
    job_id = running(daemon)
    browser = page.open(f"jobs/{job_id}")
    steps = "[...document.querySelector('figure [role=img]').plot.data[0]]"
    browser.wait("document.querySelector('figure [role=img]')?.plot?.data[0].length > 1")
    os.kill(daemon.pid("http"), 9)
    browser.wait_for("The connection is lost.")
    before = browser.js(f"return {steps}.length")
    wait_until(lambda: "The connection is lost." not in browser.text(), timeout_s=30)
    browser.wait(f"{steps}.length > arguments[0] + 5", before)
    shown = browser.js(f"return {steps}")
    assert shown == list(range(shown[0], shown[-1] + 1))


@pytest.mark.nightly(
    part="clients", catches="a section of a job that stays empty when the gateway was gone"
)
@pytest.mark.parametrize("section", ["events", "curves", "checkpoints", "log"])
def test_a_job_opened_while_the_gateway_is_gone_is_shown_afterwards(page, daemon, section):
    ended, job_id = finished(daemon), running(daemon)
    browser = page.open(f"jobs/{job_id}")
    browser.wait("document.querySelector('figure') !== null")
    os.kill(daemon.pid("http"), 9)
    browser.js("location.hash = arguments[0]", f"#/jobs/{ended}/{section}")
    browser.wait_for("The connection is lost.")
    assert "cannot be reached" not in browser.text()
    shown = {"curves": "figure", "log": ".empty"}.get(section, "table")  # it has logged nothing
    browser.wait(f"document.querySelector('main {shown}') !== null", timeout_s=30)
    browser.wait_for(ended)


@pytest.mark.nightly(part="page", catches="a view that does not show what a job waits for")
def test_a_job_that_no_machine_could_run_shows_what_it_waits_for(page, daemon):
    needs = {"gpu": "h200", **model_need("/models/away")}
    job_id = daemon.client.jobs.submit(spec_class("grpo").parse(OPTIONS), Queueing(needs=needs))
    wait_until(lambda: daemon.client.jobs.get(job_id)["missing_model"] == "/models/away")
    shown = "waits for a machine with /models/away, gpu=h200"
    for view in ("", f"jobs/{job_id}"):
        browser = page.open(view)
        browser.wait(f"document.body.innerText.includes({shown!r})")
    daemon.client.jobs.cancel(job_id)
    browser.wait(f"!document.body.innerText.includes({shown!r})")
