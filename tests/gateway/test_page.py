"""The dashboard in a real browser, with a real daemon: views, actions and accessibility."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from browser import Browser, has_chromium
from daemons import Daemon
from gateways import Gateway
from needs import needs
from waiting import wait_until

from warmd.configs.config import WorkerConfig
from warmd.configs.labels import model_need
from warmd.daemon.queue.stream import Publisher, StreamWriter
from warmd.daemon.runs.events import EventLog
from warmd.jobs import spec_class

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-tests"
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
WIDTHS = (360, 768, 1440)
OPTIONS = {  # of a GRPO job that ends within seconds
    **{"model": "tiny", "samples": 4, "num_generations": 2, "max_completion_length": 4},
    "template": "{question}=",
}
STAGES = {
    "stages": [{"name": "first", "learning_rate": 1e-6}, {"name": "second", "gate": False}],
    "gate": {"samples": 8, "most_samples": 8, "max_tokens": 4},
}
STEPS = 100_000  # more than any test waits for


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    needs(has_chromium(), "chromium and chromedriver")
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def daemon(daemons: Callable[..., Daemon]) -> Iterator[Daemon]:
    with socket.socket() as free:  # a fixed port, at which the page finds a restarted gateway
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = daemons(
        http_port=port,
        workers=(
            WorkerConfig(name="train-0", queue="train", threads=1),
            WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
        ),
    )
    started.start()
    yield started
    started.close()


class Page:
    """The dashboard of a daemon or a gateway in the browser."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self.url = url

    def open(self, view: str = "") -> Browser:
        self.browser.open("about:blank")
        self.browser.open(f"{self.url}/#/{view}")
        self.browser.wait("document.querySelector('h1') !== null")
        return self.browser


@pytest.fixture
def page(browser: Browser, daemon: Daemon) -> Iterator[Page]:
    wait_until(lambda: daemon.status()["http"]["url"], timeout_s=30)
    browser.resize(1280)
    yield Page(browser, daemon.status()["http"]["url"])
    browser.open("about:blank")
    daemon.leave_idle()
    browser.problems()


def running(daemon: Daemon) -> str:
    """Submit a job that runs until it is stopped, and wait for its second step."""
    job_id = daemon.submit(samples=40, epochs=STEPS // 40)
    wait_until(lambda: len(daemon.events(job_id, "step")) > 1, timeout_s=60)
    return job_id


def finished(daemon: Daemon) -> str:
    job_id = daemon.submit()
    assert daemon.wait(job_id)["status"] == "finished"
    return job_id


def assert_clean(browser: Browser) -> None:
    """Assert that axe-core finds nothing, the console has no error, and nothing overflows."""
    assert browser.axe() == []
    assert browser.problems() == []
    wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.js(f"return {wide}"), "the page scrolls sideways"


# --- looking --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs_of_all_states(daemon: Daemon) -> list[str]:
    return [finished(daemon), finished(daemon)]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_view_is_accessible_and_fits_the_screen(
    page, daemon, jobs_of_all_states, tmp_path, width
):
    one, other = jobs_of_all_states
    live = running(daemon)
    waiting = daemon.submit()
    views = {
        "overview": "",
        "jobs": "jobs",
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


@pytest.fixture(scope="module")
def groups(daemon: Daemon) -> tuple[str, str]:
    """A finished sweep and a finished curriculum."""
    sweep_id = daemon.client.submit_sweep(
        "grpo",
        {**OPTIONS, "eval_samples": 4},
        {"sweep": {"learning_rate": ["1e-5", "1e-4"]}, "seeds": 2},
    )
    curriculum_id = daemon.client.submit_curriculum("grpo", OPTIONS, STAGES)
    client = daemon.client
    wait_until(lambda: client.sweep(sweep_id)["status"] == "finished", timeout_s=120)
    wait_until(lambda: client.curriculum(curriculum_id)["status"] == "finished", timeout_s=120)
    return sweep_id, curriculum_id


@pytest.mark.parametrize("width", WIDTHS)
def test_sweeps_and_curricula_are_accessible_and_fit_the_screen(page, groups, tmp_path, width):
    sweep_id, curriculum_id = groups
    views = {
        "sweeps": ("sweeps", sweep_id),
        "sweep": (f"sweeps/{sweep_id}", "best"),
        "curricula": ("curricula", curriculum_id),
        "curriculum": (f"curricula/{curriculum_id}", "undecided"),
    }
    page.browser.resize(width)
    for name, (view, text) in views.items():
        browser = page.open(view)
        browser.wait_for(text)
        browser.screenshot(tmp_path / f"{name}-{width}.png")
        assert_clean(browser)


def test_a_sweep_is_followed_steered_and_removed(page, daemon):
    given = {"sweep": {"learning_rate": ["1e-5", "1e-4"]}}
    values = {**OPTIONS, "samples": 40, "epochs": STEPS // 40}
    sweep_id = daemon.client.submit_sweep("grpo", values, given)
    browser = page.open()
    browser.wait_for("Sweeps and curricula")
    browser.open(f"{page.url}/#/sweeps/{sweep_id}")
    step = "Number(document.querySelector('.card .progress .count')?.innerText.split('/')[0])"
    first = browser.wait(step, timeout_s=60)
    browser.wait(f"{step} > arguments[0]", first)
    browser.press(f"Cancel {sweep_id}")
    browser.wait_for("Running jobs save a checkpoint and stop")
    browser.press("Cancel all")
    browser.press(f"Remove {sweep_id}")
    browser.wait_for("This cannot be undone.")
    browser.press("Remove all")
    browser.wait("location.hash === '#/sweeps'")
    wait_until(lambda: sweep_id not in browser.text())
    assert not (daemon.home.sweeps / sweep_id).exists()


def test_a_sweep_is_submitted_from_the_form(page, daemon):
    browser = page.open("submit")
    browser.choose("select[name=kind]", "grpo")
    for name, text in {
        "num_generations": "2",
        "max_completion_length": "4",
        "samples": "4",
        "template": "{question}=",
    }.items():
        browser.type(f"input[name={name}]", text)
    browser.wait_for("4 steps. The same")
    browser.press_summary("Sweep")
    browser.press("Vary an option")
    browser.choose("select[name=sweep_option]", "learning_rate")
    browser.type("input[name=sweep_values]", "1e-5, fast")
    browser.wait_for("learning_rate: must be a number")
    browser.type("input[name=sweep_values]", "1e-5, 1e-4")
    browser.type("input[name=sweep_halving]", "3")
    browser.wait_for("halving: must be at most the number of points (2), got 3")
    browser.type("input[name=sweep_halving]", "2")
    browser.type("input[name=sweep_seeds]", "2")
    browser.type("input[name=sweep_name]", "rates")
    browser.wait_for("4 jobs, 12 steps in all, compared at steps 2, 4, by reward.")
    command = browser.js("return document.querySelector('form pre').innerText")
    assert command.endswith(
        " --sweep learning_rate=0.00001,0.0001 --seeds 2 --halving 2 --name rates"
    )
    assert "--learning-rate" not in command
    for width in WIDTHS:
        browser.resize(width)
        assert_clean(browser)
    browser.press("Submit")
    browser.wait("location.hash.startsWith('#/sweeps/sweep-')")
    sweep_id = browser.js("return location.hash").split("/")[2]
    browser.wait("document.querySelector('.card .status.finished') !== null", timeout_s=120)
    found = daemon.client.sweep(sweep_id)
    assert (found["name"], found["jobs"], found["halving"]) == ("rates", 4, 2)
    assert [point["values"] for point in found["points"]] == [
        {"learning_rate": 1e-5},
        {"learning_rate": 1e-4},
    ]
    assert browser.problems() == []


def test_a_curriculum_is_followed_from_stage_to_stage(page, daemon):
    curriculum_id = daemon.client.submit_curriculum("grpo", OPTIONS, STAGES)
    browser = page.open(f"curricula/{curriculum_id}")
    browser.wait_for("evaluating on 8 questions", timeout_s=90)
    browser.wait("document.querySelector('.card .status.finished') !== null", timeout_s=90)
    rows = browser.js("return [...document.querySelectorAll('tbody tr')].map((r) => r.innerText)")
    assert len(rows) == 2
    assert "continue" in rows[0]
    assert "undecided" in rows[0]
    last = daemon.client.curriculum(curriculum_id)["attempts"][-1]["job"]
    browser.open(f"{page.url}/#/jobs/{last}")
    browser.wait_for(curriculum_id)
    assert browser.problems() == []


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


def test_a_restarted_gateway_is_found_again_and_no_event_is_missed(page, daemon):
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


@pytest.mark.parametrize("section", ["curves", "checkpoints", "events", "log"])
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


# --- acting ---------------------------------------------------------------------------------------


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
    assert daemon.client.job(job_id)["execution"] == 2
    browser.press(f"Cancel {job_id}")
    browser.press("Cancel the job")
    browser.wait("document.querySelector('.status.stopped') !== null", timeout_s=60)
    browser.press(f"Remove {job_id}")
    browser.wait_for("This cannot be undone.")
    browser.press("Remove the job")
    wait_until(lambda: not (daemon.home.runs / job_id).exists())
    browser.wait("location.hash === '#/jobs'")


def test_a_finished_job_is_trained_further_with_more_steps(page, daemon):
    job_id = finished(daemon)
    browser = page.open(f"jobs/{job_id}")
    browser.press(f"Resume {job_id}")
    browser.type("dialog input[name=steps]", "4")
    browser.press("Resume the job")
    browser.wait_for("steps: must be at least 6")
    browser.type("dialog input[name=steps]", "8")
    browser.press("Resume the job")
    wait_until(lambda: daemon.client.job(job_id)["step"] == 8, timeout_s=60)
    browser.wait_for("8/8")


def test_waiting_jobs_are_reordered(page, daemon):
    running(daemon)
    first, second = daemon.submit(), daemon.submit()
    browser = page.open()
    browser.press(f"Later {first}")
    wait_until(lambda: daemon.client.job(first)["position"] == 2)
    assert daemon.client.job(second)["position"] == 1
    ids = "[...document.querySelectorAll('.cards a.job')].map((a) => a.innerText)"
    wait_until(lambda: browser.js(f"return {ids}")[1:3] == [second, first])


def test_a_job_that_no_machine_could_run_says_what_it_waits_for(page, daemon):
    needs = {"gpu": "h200", **model_need("/models/away")}
    job_id = daemon.client.submit(spec_class("grpo").parse(OPTIONS), needs=needs)
    wait_until(lambda: daemon.client.job(job_id)["missing_model"] == "/models/away")
    said = "waits for a machine with /models/away, gpu=h200"
    for view in ("", "jobs", f"jobs/{job_id}"):
        browser = page.open(view)
        browser.wait(f"document.body.innerText.includes({said!r})")
    daemon.client.cancel(job_id)
    browser.wait(f"!document.body.innerText.includes({said!r})")


def test_grpo_is_submitted_from_the_form_and_compared_with_its_model(page, daemon):
    browser = page.open("submit")
    browser.choose("select[name=kind]", "grpo")
    browser.type("input[name=num_generations]", "1")
    browser.wait_for("num_generations: must be an integer of at least 2")
    for name, text in {
        "num_generations": "2",
        "max_completion_length": "4",
        "samples": "6",
        "template": "{question}=",
    }.items():
        browser.type(f"input[name={name}]", text)
    browser.wait_for("--samples 6")
    browser.wait_for("6 steps.")
    command = browser.js("return document.querySelector('form pre').innerText").split(" --")
    assert command[0] == "warmd submit grpo"
    changed = {"num-generations", "max-completion-length", "samples", "template"}
    assert {option.split()[0] for option in command[1:]} == {"model", *changed}
    browser.press("Submit")
    browser.wait("location.hash.startsWith('#/jobs/grpo-')")
    job_id = browser.js("return location.hash").split("/")[2]
    browser.wait("document.querySelector('.status.finished') !== null", timeout_s=90)
    browser.open(f"{page.url}/#/compare?model=tiny&model={job_id}")
    browser.type("textarea[name=prompt]", "1+1=")
    browser.press("Complete with both")
    notes = "[...document.querySelectorAll('.answer .quiet')].map((p) => p.innerText)"
    browser.wait(f"{notes}.every((note) => note)", timeout_s=60)
    assert all("tokens" in note for note in browser.js(f"return {notes}"))
    assert browser.problems() == []


def test_evaluations_are_shown_with_their_intervals_and_comparisons(page, daemon):
    options = {"model": "tiny", "dataset": "arithmetic", "samples": 8, "max_tokens": 4}
    first = daemon.client.submit(spec_class("eval").parse(options))
    assert daemon.wait(first)["status"] == "finished"
    second = daemon.client.submit(spec_class("eval").parse({**options, "against": first}))
    assert daemon.wait(second)["status"] == "finished"
    browser = page.open("compare")
    browser.wait_for("arithmetic, task reward, 8 questions")
    rows = browser.js(
        "return [...document.querySelectorAll('section[aria-labelledby=evaluations] tbody tr')]"
        ".map((row) => row.innerText)"
    )
    own = [row for row in rows if first in row]  # the second one was compared with it
    assert len(own) == 2
    assert second in own[0]
    assert all(row.startswith("tiny") and " to " in row for row in own)
    assert_clean(browser)


def test_a_text_is_completed_with_its_tokens_counted(page):
    browser = page.open("chat")
    browser.type("input[name=max_tokens]", "12")
    browser.type("textarea[name=prompt]", "1+1=")
    browser.press("Send")
    wait_until(lambda: re.search("[0-9]+ tokens", browser.text()), timeout_s=60)
    assert browser.js("return document.querySelectorAll('.messages li').length") == 2


def test_a_completion_is_shown_while_it_is_generated_and_stopped(browser, make_gateway):
    gateway = make_gateway()
    Page(browser, gateway.url).open("chat")
    browser.wait("document.querySelector('select[name=model]').value === 'tiny'")
    browser.type("textarea[name=prompt]", "1+1=")
    browser.press("Send")
    job = gateway.take()
    job.write(HOSTILE)
    browser.wait_for(HOSTILE)
    browser.press("Stop")
    browser.wait_for("stopped")
    wait_until(lambda: job.stop_asked == "cancel")
    assert browser.js("return window.hacked") is None
    browser.open("about:blank")


def test_uploaded_records_are_shown_before_they_are_used(page, tmp_path):
    rows = tmp_path / "sums.jsonl"
    rows.write_text('{"question": "1+1", "answer": "2"}\n{"question": "2+2", "answer": "4"}\n')
    browser = page.open("submit")
    browser.upload("input[name=upload]", rows)
    browser.wait_for("2+2")
    browser.wait_for("sums.jsonl")
    browser.wait("document.querySelector('select[name=data]').value.startsWith('file-')")


def test_a_model_is_unloaded_and_loaded(page, daemon):
    browser = page.open()
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
    assert daemon.client.job(job_id)["status"] == "started"


# --- hostile texts --------------------------------------------------------------------------------


def test_texts_of_models_and_files_are_never_code(page, daemon):
    job_id = finished(daemon)
    rundir = daemon.client.rundir(job_id)
    publish = Publisher(StreamWriter(daemon.client.connection), job_id, rundir.events).publish
    sample = {"prompt": HOSTILE, "completion": HOSTILE, "rewards": {HOSTILE: 1.0}, HOSTILE: HOSTILE}
    with EventLog(rundir.events, execution=1, publish=publish) as log:
        log.emit("step", step=7, samples=[sample], loss=1.0, **{HOSTILE: 2.0})
        log.emit("warning", message=HOSTILE)
    with rundir.log.open("a") as text:
        text.write(HOSTILE)
    spec = rundir.read_spec()["spec"]
    rundir.annotate(spec={**spec, "template": HOSTILE})
    for section in ("curves", "completions", "events", "options", "log"):
        browser = page.open(f"jobs/{job_id}/{section}")
        browser.wait_for("onerror" if section != "options" else "img")
        assert browser.js("return window.hacked") is None, section
        assert browser.js("return document.querySelectorAll('main img, main script').length") == 0


# --- security -------------------------------------------------------------------------------------


@pytest.fixture
def make_gateway(tiny_model: Path) -> Iterator[Callable[..., Gateway]]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder, contextlib.ExitStack() as stack:

        def make(**settings: Any) -> Gateway:
            gateway = Gateway(Path(folder, "home"), tiny_model, **settings)
            stack.callback(gateway.close)
            return gateway

        yield make


def test_one_logs_in_with_the_token_and_scripts_cannot_read_the_cookie(browser, make_gateway):
    gateway = make_gateway(http_token=TOKEN)
    page = Page(browser, gateway.url)
    page.open()
    browser.wait_for("Log in")
    browser.problems()
    assert browser.axe() == []
    browser.type("input[name=token]", "a-wrong-token")
    browser.press("Log in")
    browser.wait_for("token: is not the daemon's http_token")
    browser.type("input[name=token]", TOKEN)
    browser.press("Log in")
    browser.wait_for("Overview")
    (cookie,) = browser.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert TOKEN not in cookie["value"]
    assert browser.js("return document.cookie") == ""
    assert TOKEN not in browser.js("return location.href")
    gateway.kill()
    browser.open("about:blank")


def test_a_page_that_only_reads_has_no_actions_and_its_requests_are_refused(browser, make_gateway):
    gateway = make_gateway(http_page="read")
    job_id = gateway.client.submit(
        spec_class("grpo").parse({"model": "tiny", "num_generations": 2})
    )
    page = Page(browser, gateway.url)
    page.open()
    browser.wait_for(job_id)
    assert browser.js("return document.querySelectorAll('main button').length") == 0
    assert "Submit" not in browser.js("return document.querySelector('nav').innerText")
    status = browser.js(
        "const options = {method: 'POST', body: '{}', headers: {'X-Warmd': '1',"
        " 'Content-Type': 'application/json'}};"
        f"return fetch('/v1/warmd/jobs/{job_id}/cancel', options).then((r) => r.status)"
    )
    assert status == 403
    assert gateway.status(job_id) == "queued"
    browser.open("about:blank")


def test_a_page_of_another_origin_can_change_nothing(page, daemon, browser):
    job_id = running(daemon)
    foreign = page.url.replace("127.0.0.1", "localhost")
    browser.open(f"{foreign}/health")  # another origin to the browser
    target = f"{page.url}/v1/warmd/jobs/{job_id}/cancel"
    for headers in ("{}", "{'X-Warmd': '1', 'Content-Type': 'application/json'}"):
        script = (
            f"return fetch('{target}', {{method: 'POST', body: '{{}}', headers: {headers}}})"
            ".then((r) => r.status, () => 'refused')"
        )
        assert browser.js(script) in ("refused", 403)
    assert daemon.client.job(job_id)["status"] == "started"


def test_the_page_is_off_where_it_is_switched_off(make_gateway):
    gateway = make_gateway(http_page="off", http_token=TOKEN)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert httpx.get(f"{gateway.url}/").status_code == 401
    assert httpx.get(f"{gateway.url}/", headers=bearer).status_code == 404
    assert httpx.get(f"{gateway.url}/page/app.js", headers=bearer).status_code == 404
