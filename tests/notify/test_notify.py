"""Notifications about ended and troubled jobs, to real commands and a real HTTP server."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import orjson
import pytest
from breadth import mostly_slow
from shell import warmd
from waiting import wait_until

from warmd.daemon.host.home import Home
from warmd.daemon.notify.delivery import deliver, sample
from warmd.daemon.notify.scanner import Scanner

DEFAULT = ("finished", "failed", "divergence", "stall")


@pytest.fixture
def receiver():
    """A web server that keeps bodies, and replies with the next of its statuses, else 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.bodies.append(orjson.loads(body))
            self.send_response(server.statuses.pop(0) if server.statuses else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    class Server(HTTPServer):
        def __init__(self) -> None:
            super().__init__(("127.0.0.1", 0), Handler)
            self.bodies: list[Any] = []
            self.statuses: list[int] = []
            self.url = f"http://127.0.0.1:{self.server_port}/hook?token=secret"

    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_json_with_a_text(receiver):
    assert deliver(receiver.url, sample()) is None
    [body] = receiver.bodies
    assert body["text"].endswith("test notification")


def test_a_failed_delivery_is_tried_three_times_and_never_names_the_target(receiver):
    receiver.statuses = [500, 503, 200]
    waits: list[float] = []
    assert deliver(receiver.url, sample(), wait=waits.append) is None
    assert waits == [2.0, 10.0]
    receiver.statuses = [500, 500, 500]
    problem = deliver(receiver.url, sample(), wait=waits.append)
    assert problem == "the webhook replied with HTTP status 500"
    unreachable = deliver("http://127.0.0.1:9/secret", sample(), wait=waits.append)
    assert unreachable is not None
    assert "secret" not in unreachable


def test_a_command_gets_the_text_as_a_variable_and_json_on_stdin(tmp_path):
    command = f'cat > {tmp_path}/json; printf "%s" "$WARMD_TEXT" > {tmp_path}/text'
    assert deliver(command, sample()) is None
    document = orjson.loads((tmp_path / "json").read_bytes())
    assert document["event"] == "test"
    assert (tmp_path / "text").read_text() == document["text"]


def test_a_command_that_fails_or_hangs_is_reported_and_ended(tmp_path):
    assert deliver("exit 3", sample(), wait=at_once) == "the command ended with exit code 3"
    began = time.monotonic()
    problem = deliver("sleep 60 | sleep 60", sample(), timeout_s=0.1, wait=at_once)
    assert problem == "the command took longer than 0.1 s"
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_apprise_delivers_the_text_and_problems_never_name_the_address(receiver):
    address = receiver.url.replace("http://", "apprise:json://")
    assert deliver(address, sample()) is None
    [body] = receiver.bodies
    assert body["message"].endswith("test notification")
    receiver.statuses = [500] * 6
    assert deliver(address, sample(), wait=at_once) == "apprise could not deliver it"
    unknown = deliver("apprise:nothing://secret", sample(), wait=at_once)
    assert unknown == "apprise knows no service with such an address"
    slow = deliver(address, sample(), timeout_s=0.01, wait=at_once)
    assert slow == "apprise took longer than 0.01 s"


def at_once(seconds: float) -> None:
    """Do not wait between attempts."""


def test_each_end_is_found_once_also_by_a_restarted_scanner(desk):
    scanner = Scanner(desk.home, DEFAULT)
    job_id = desk.submit("--name", "first")
    run = desk.begin()
    run.step(1)
    assert list(scanner.due()) == []
    run.log.emit("divergence", step=1, metric="loss", value=9.0)
    assert [found.event for found in scanner.due()] == ["divergence"]
    assert list(scanner.due()) == []
    run.fail("loss is nan")
    [found] = Scanner(desk.home, DEFAULT).due()
    assert (found.job, found.name, found.event, found.error) == (
        job_id,
        "first",
        "failed",
        "loss is nan",
    )
    assert found.text.endswith("first failed at step 1: loss is nan")
    assert list(Scanner(desk.home, DEFAULT).due()) == []
    assert [found.event for found in scanner.due()] == ["failed"]  # the other one was not reported


def test_an_event_that_was_not_delivered_is_found_again(desk):
    Scanner(desk.home, DEFAULT)
    desk.submit()
    desk.begin().finish({"reward_after": 0.5})
    first = next(Scanner(desk.home, DEFAULT).due())  # killed during the delivery
    [again] = Scanner(desk.home, DEFAULT).due()
    assert again == first
    assert again.text.endswith("finished, reward_after 0.5")


def test_ends_before_the_first_start_give_no_notification(desk):
    desk.submit()
    desk.begin().finish({})
    assert list(Scanner(desk.home, DEFAULT).due()) == []


def test_scratch_jobs_give_no_notification(desk):
    scanner = Scanner(desk.home, DEFAULT)
    desk.client.jobs.submit_again(desk.submit(), stop_at=2)
    desk.begin().finish({})
    assert list(scanner.due()) == []


def test_a_damaged_record_begins_anew(desk):
    for damage in ("", "[]", '{"begun": "x", "handled": {}}', '{"begun": 1, "handled": [1]}'):
        Home(desk.home.path).notified.write_text(damage)
        assert list(Scanner(desk.home, DEFAULT).due()) == []


def test_notify_test_delivers_a_notification_or_reports_why_not(desk, tmp_path, monkeypatch):
    done = desk.warmd("doctor", "--notify")
    assert done.is_refusal(2)
    assert done.err.startswith("Error: notify: not set")
    monkeypatch.setenv("WARMD_NOTIFY", f'printf "%s" "$WARMD_TEXT" > {tmp_path}/text')
    assert desk.warmd("doctor", "--notify").out == "delivered by this command, as no daemon runs\n"
    assert (tmp_path / "text").read_text().endswith("test notification")


@pytest.mark.parametrize("text", mostly_slow(["a\nb", "   ", "x" * 10_001], but=["a\nb"]))
def test_a_wrong_target_is_refused_without_showing_it(desk, monkeypatch, text):
    monkeypatch.setenv("WARMD_NOTIFY", text)
    done = desk.warmd("doctor", "--notify")
    assert done.is_refusal(2)
    assert text not in done.err


@pytest.mark.nightly(
    part="daemons", catches="a notification that a killed notifier loses or sends twice"
)
def test_a_daemon_notifies_of_a_job_once_though_its_notifier_dies(
    make_daemon, tmp_path, monkeypatch
):
    daemon = make_daemon(notify=f'echo "$WARMD_EVENT $WARMD_JOB" >> {tmp_path}/notify-target')
    daemon.start()
    # The daemon delivers it, by its own settings.
    monkeypatch.setenv("WARMD_NOTIFY", "exit 7")
    done = warmd("doctor", "--notify", home=daemon.home.path)
    assert done.out == "delivered by the daemon\n"
    assert (tmp_path / "notify-target").read_text() == "test test\n"
    (tmp_path / "notify-target").unlink()
    job_id = daemon.submit()
    daemon.wait(job_id)
    # Killed before it has recorded the delivery, it repeats it.
    wait_until(lambda: job_id in daemon.home.notified.read_text(), timeout_s=20)
    [notifier] = [p for p in daemon.processes() if "warmd.daemon.notify" in p.cmdline()]
    notifier.kill()
    other = daemon.submit()
    daemon.wait(other)
    wait_until(lambda: other in (tmp_path / "notify-target").read_text(), timeout_s=20)
    lines = (tmp_path / "notify-target").read_text().splitlines()
    assert lines == [f"finished {job_id}", f"finished {other}"]
    for path in daemon.home.runs.rglob("*.json"):
        assert "notify-target" not in path.read_text()
