"""Security of the dashboard: hostile texts, login, other origins, a page without actions."""

from __future__ import annotations

import httpx2 as httpx
import pytest
from dashboard import HOSTILE, Page, finished, running
from gateway_requests import TOKEN

from warmd.daemon.client import tokens
from warmd.daemon.lifecycle.follow import Publisher
from warmd.daemon.queue.stream import StreamWriter
from warmd.daemon.runs.events import EventLog
from warmd.jobs import spec_class
from warmd.jobs.grpo.completions import FILE, Completions

pytestmark = pytest.mark.nightly(
    part="page",
    catches="text of a model that the page takes for markup, and sessions that outlive their token",
)


def test_texts_of_models_and_files_are_never_code(page, daemon):
    job_id = finished(daemon)
    rundir = daemon.client.rundir(job_id)
    publish = Publisher(StreamWriter(daemon.client.connection), job_id, rundir.events).publish
    sample = {"prompt": HOSTILE, "completion": HOSTILE, "rewards": {HOSTILE: 1.0}, HOSTILE: HOSTILE}
    completions = Completions(rundir.path / FILE, every=1, step=0)
    completions.add(7, [{**sample, "row": 0, "group": 0, "reward": 1.0, "stop": HOSTILE}])
    completions.close()
    with EventLog(rundir.events, execution=1, publish=publish) as log:
        log.emit("step", step=7, loss=1.0, **{HOSTILE: 2.0})
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


def test_a_user_logs_in_with_the_token_and_scripts_cannot_read_the_cookie(browser, make_gateway):
    gateway = make_gateway(http_token=TOKEN)
    page = Page(browser, gateway.url)
    page.open()
    browser.wait_for("Log in")
    browser.problems()
    assert browser.axe() == []
    browser.type("input[name=token]", "a-wrong-token")
    browser.press("Log in")
    browser.wait_for("token: is not one that this daemon knows")
    browser.type("input[name=token]", TOKEN)
    browser.press("Log in")
    browser.wait_for("Overview")
    assert browser.js("return document.cookie") == ""
    assert TOKEN not in str((browser.cookies(), browser.js("return {...localStorage}")))
    assert TOKEN not in browser.js("return location.href")
    gateway.kill()
    browser.open("about:blank")


def test_a_page_that_only_reads_has_no_actions_and_its_requests_are_refused(browser, make_gateway):
    gateway = make_gateway(http_page="read")
    job_id = gateway.client.jobs.submit(
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
    assert daemon.client.jobs.get(job_id)["status"] == "started"


def test_the_page_can_be_switched_off(make_gateway):
    gateway = make_gateway(http_page="off", http_token=TOKEN)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert httpx.get(f"{gateway.url}/").status_code == 401
    assert httpx.get(f"{gateway.url}/", headers=bearer).status_code == 404
    assert httpx.get(f"{gateway.url}/page/app.js", headers=bearer).status_code == 404


def test_a_named_user_sees_what_he_may_do_and_is_shut_out_within_seconds(
    browser, make_gateway, tmp_path
):
    file = tmp_path / "tokens"
    secret = tokens.add(file, "eve", "read")
    gateway = make_gateway(http_tokens=file)
    spec = spec_class("grpo").parse({"model": "tiny", "num_generations": 2})
    job_id = gateway.client.jobs.submit(spec)
    page = Page(browser, gateway.url)
    page.open()
    browser.wait_for("Log in")
    browser.problems()
    browser.type("input[name=token]", secret)
    browser.press("Log in")
    browser.wait_for(job_id)
    navigation = browser.js("return document.querySelector('nav').innerText")
    assert "Runs" in navigation
    assert "Submit" not in navigation
    assert "Chat" not in navigation
    assert browser.js("return document.querySelectorAll('main button').length") == 0
    tokens.remove(file, "eve")
    browser.wait_for("Log in")
    gateway.kill()
    browser.problems()
    browser.open("about:blank")
