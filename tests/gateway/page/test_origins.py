"""The dashboard with a token, directly, through a tunnel and a TLS proxy; and other pages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx2 as httpx
import pytest
from browser import Browser
from dashboard import Page
from gateway_requests import TOKEN
from gateways import Gateway
from hanging_proxy import HangingProxy
from ports import free_port
from waiting import wait_until
from web_pages import OtherServer, TlsProxy

from warmd.jobs import spec_class

pytestmark = pytest.mark.nightly(
    part="page",
    catches="a view that does not open through a tunnel or a proxy, or that another page can use",
)

LOG = "a line of the log\n"


class Site(NamedTuple):
    """A gateway with a token, and the addresses at which browsers reach it."""

    gateway: Gateway
    addresses: dict[str, str]


@pytest.fixture(scope="module")
def site(tiny_model: Path) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        proxy = TlsProxy(Path(folder), "warmd.test")
        proxy.target_port = free_port()  # at which the page finds a restarted gateway
        gateway = Gateway(
            Path(folder, "home"),
            tiny_model,
            http_token=TOKEN,
            http_origin=(proxy.origin,),
            http_port=proxy.target_port,
        )
        tunnel = HangingProxy(proxy.target_port)
        yield Site(
            gateway,
            {
                "direct": gateway.url,
                "tunnel": f"http://127.0.0.1:{tunnel.port}",
                "proxy": proxy.origin,
                "plain": f"http://warmd.test:{proxy.target_port}",  # as in a network of its own
            },
        )
        tunnel.close()
        proxy.close()
        gateway.close()


@pytest.fixture(scope="module")
def open_gateway(tiny_model: Path) -> Iterator[Gateway]:
    """A gateway without a token."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        gateway = Gateway(Path(folder, "home"), tiny_model)
        yield gateway
        gateway.close()


@pytest.fixture
def other() -> Iterator[OtherServer]:
    server = OtherServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _leave(browser: Browser) -> Iterator[None]:
    yield
    browser.open("about:blank")
    browser.cdp("Network.clearBrowserCookies")
    browser.problems()


def submit(gateway: Gateway) -> str:
    return gateway.client.jobs.submit(
        spec_class("grpo").parse({"model": "tiny", "num_generations": 2})
    )


def log_in(browser: Browser, url: str) -> None:
    Page(browser, url).open()
    browser.wait_for("Log in")
    browser.type("input[name=token]", TOKEN)
    browser.press("Log in")
    browser.wait_for("Overview")
    browser.problems()  # 401 before


@pytest.mark.parametrize("way", ["direct", "tunnel", "proxy", "plain"])
def test_a_session_has_views_live_streams_actions_files_downloads_and_new_tabs(
    site, browser, tmp_path, way
):
    gateway, url = site.gateway, site.addresses[way]
    log_in(browser, url)
    job_id = submit(gateway)
    browser.wait_for(job_id)  # without a reload
    gateway.client.rundir(job_id).log.write_text(LOG)
    browser.open(f"{url}/#/jobs/{job_id}/log")
    browser.wait_for(LOG.strip())
    browser.save_downloads(tmp_path)
    saved = tmp_path / f"{job_id}.txt"
    for _ in range(2):  # each with a ticket of its own
        browser.press("Download")
        wait_until(lambda: saved.exists() and saved.read_text() == LOG)
        saved.unlink()
    rows = tmp_path / "uploaded" / "rows.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"question": "1+1", "answer": "2"}\n')
    browser.open(f"{url}/#/submit")
    browser.upload("input[name=upload]", rows)
    browser.press("Download the file")
    saved = tmp_path / "rows.jsonl"
    wait_until(lambda: saved.exists() and saved.read_text() == rows.read_text())
    browser.open(f"{url}/#/jobs/{job_id}")
    browser.press(f"Cancel {job_id}")
    browser.press("Cancel the job")
    browser.wait("document.querySelector('.status.canceled') !== null")
    first = browser.tab()
    browser.switch(browser.new_tab())
    try:
        Page(browser, url).open("runs")
        browser.wait_for(job_id)
    finally:
        browser.close_tab()
        browser.switch(first)
    # A header that browsers ignore at unencrypted addresses of other machines, and say so.
    ignored = "Cross-Origin-Opener-Policy" if way == "plain" else "nothing"
    assert [one for one in browser.problems() if ignored not in one] == []


def test_a_session_with_one_half_must_log_in(site, browser):
    log_in(browser, site.gateway.url)
    secret = browser.js("return localStorage.getItem('warmd-session')")
    (cookie,) = browser.cookies()
    assert secret not in cookie["value"]
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["secure"]) == (True, "Strict", False)
    browser.js("localStorage.clear()")
    Page(browser, site.gateway.url).open()
    browser.wait_for("Log in")
    browser.js("localStorage.setItem('warmd-session', arguments[0])", secret)
    Page(browser, site.gateway.url).open()
    browser.wait_for("Overview")
    browser.cdp("Network.clearBrowserCookies")
    Page(browser, site.gateway.url).open()
    browser.wait_for("Log in")


def test_a_session_that_ends_while_the_page_is_open_leads_to_the_login(site, browser):
    log_in(browser, site.gateway.url)
    browser.js("localStorage.clear()")
    site.gateway.kill()
    browser.wait_for("The connection is lost.")
    site.gateway.start()
    browser.wait_for("Log in")


def test_the_cookie_that_another_port_is_sent_opens_nothing(site, browser, other):
    log_in(browser, site.gateway.url)
    browser.open(f"http://127.0.0.1:{other.port}/")
    (cookie,) = set(other.cookies)  # browsers do send it
    url = site.gateway.url
    page = {"cookie": cookie, "sec-fetch-site": "same-origin", "origin": url, "x-warmd": "1"}
    for path in ("/v1/warmd/jobs", "/v1/warmd/overview/stream", "/v1/models", "/metrics"):
        assert httpx.get(url + path, headers=page).status_code == 401
    body = {"model": "tiny", "prompt": "1", "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=page).status_code == 401
    ticket = {"path": "/v1/models"}
    assert httpx.post(f"{url}/v1/warmd/tickets", json=ticket, headers=page).status_code == 401
    browser.open(f"{url}/v1/models")  # typed into the address bar, with the cookie
    browser.wait_for("Authorization: must be a bearer token")


# All that a page of another origin can send without the permission of the gateway, and what it must
# ask for.
FETCHES = """
const [base, job] = arguments;
const form = new FormData();
form.append("purpose", "fine-tune");
form.append("file", new Blob(['{"question": "x", "answer": "y"}']), "other.jsonl");
const json = {"content-type": "application/json", "x-warmd": "1", "x-warmd-session": "0"};
const completion = new Blob(['{"model": "tiny", "prompt": "1", "max_tokens": 1}']);
const all = [
  ["GET", "/v1/models"],
  ["GET", "/v1/warmd/overview/stream"],
  ["POST", "/v1/completions", completion],
  ["POST", "/v1/files", form],
  ["POST", `/v1/fine_tuning/jobs/${job}/cancel`],
  ["POST", `/v1/warmd/jobs/${job}/cancel`, new Blob(["{}"])],
  ["POST", `/v1/warmd/jobs/${job}/cancel`, "{}", json],
];
const results = all.flatMap(([method, path, body, headers]) =>
  ["no-cors", "cors"].map((mode) =>
    fetch(base + path, {method, body, headers, mode, credentials: "include"}).then(
      (response) => response.type === "opaque" ? "opaque" : response.status,
      () => "refused",
    ),
  ),
);
return Promise.all(results);
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "evil.test"])
def test_a_page_of_another_port_or_host_reads_and_changes_nothing(
    site, open_gateway, browser, other, host
):
    log_in(browser, site.gateway.url)
    for gateway in (site.gateway, open_gateway):
        job_id = submit(gateway)
        browser.open(f"http://{host}:{other.port}/")
        assert set(browser.js(FETCHES, gateway.url, job_id)) <= {"opaque", "refused"}
        assert gateway.status(job_id) == "queued"
        assert gateway.waiting() == []
        assert not list(gateway.home.path.glob("files/*/other.jsonl"))
        gateway.client.jobs.cancel(job_id)


def test_a_link_of_another_page_opens_the_dashboard_with_its_session(site, browser, other):
    log_in(browser, site.gateway.url)
    browser.open(f"http://evil.test:{other.port}/")
    browser.js("location.href = arguments[0]", f"{site.gateway.url}/#/runs")
    browser.wait("document.querySelector('h1')?.innerText === 'Runs'")
    browser.open(f"http://evil.test:{other.port}/")
    browser.js("location.href = arguments[0]", f"{site.gateway.url}/v1/models")
    browser.wait_for("Sec-Fetch-Site: must be same-origin")


def test_after_dns_rebinding_a_page_is_of_another_host(open_gateway, browser):
    port = open_gateway.url.rpartition(":")[2]
    browser.open(f"http://rebound.test:{port}/")
    browser.wait_for("Host: must name this machine")
