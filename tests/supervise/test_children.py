"""Output of the supervisor's children, and detection of a child that hangs."""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import threading
import time
from pathlib import Path

import pytest
from waiting import wait_until

from warmd.daemon.host.channel import Channel, check_size
from warmd.daemon.host.heartbeat import Heartbeat
from warmd.daemon.host.home import Home
from warmd.daemon.host.messages import Alive, JobEvent, Message
from warmd.daemon.supervise import children
from warmd.daemon.supervise.children import HUNG_S, Child
from warmd.jobs.errors import WarmdError
from warmd.jobs.user_code import tracebacks

# A child of the supervisor, as `python -m child`.
WRITER = """
import os, sys
for _ in range(int(os.environ["PIECES"])):
    os.write(2, b"x" * 60_000 + os.environ["END"].encode())
os.write(2, b"the end")
"""
BEATING = """
import sys, time
from warmd.daemon.host.heartbeat import Heartbeat
heartbeat = Heartbeat()
while True:
    heartbeat.send_if_due()
    time.sleep(0.05)
"""


def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, **environment: str
) -> tuple[Child, selectors.BaseSelector]:
    (tmp_path / "child.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    child, selector = Child("child"), selectors.DefaultSelector()
    child.start(selector, "child", Home(tmp_path), Alive(), on_message=lambda _: None)
    return child, selector


def listen(selector: selectors.BaseSelector, timeout_s: float = 1.0) -> None:
    for key, _ in selector.select(timeout_s):
        key.data()


@pytest.mark.parametrize("end", ["", "\r"])
def test_endless_stderr_without_line_breaks_does_not_grow_or_slow_the_supervisor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: str,
):
    caplog.set_level(logging.INFO, children.__name__)
    child, selector = started(tmp_path, monkeypatch, WRITER, PIECES="500", END=end)
    begun = time.process_time()
    while selector.get_map():
        listen(selector)
    assert child.process is not None
    child.process.wait()
    assert time.process_time() - begun < 1.0
    lines = [record.getMessage() for record in caplog.records]
    assert max(map(len, lines)) < 200_000
    assert lines[-1].endswith("the end")
    if not end:
        assert sum(map(len, lines)) == 500 * 60_000 + len("the end")


@pytest.mark.slow
def test_child_whose_heartbeats_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    child, selector = started(tmp_path, monkeypatch, BEATING)
    child.end_if_hung(10 * HUNG_S)  # no heartbeat yet: it may still be importing
    listen(selector, 20)
    for _ in range(3):  # a heartbeat comes every second
        child.end_if_hung(HUNG_S - 1)
        listen(selector, 20)
    assert not child.has_died()
    child.end_if_hung(HUNG_S - 1)
    child.end_if_hung(2)
    wait_until(child.has_died)
    while selector.get_map():
        listen(selector)
    assert "child: hangs: no heartbeat for 10 s, killing it" in caplog.text


def test_heartbeats_do_not_block_when_nobody_reads_them():
    read, write = os.pipe()
    own = os.dup(1)
    try:
        os.dup2(write, 1)
        heartbeat = Heartbeat()
        while select.select([], [1], [], 0)[1]:
            os.write(1, b"x" * 4096)
        heartbeat.send_if_due()
    finally:
        os.dup2(own, 1)
        os.set_blocking(1, True)
        for descriptor in (read, write, own):
            os.close(descriptor)


def test_a_long_error_message_keeps_its_start_and_end_and_notes_the_cut():
    assert tracebacks.cut("short", 8_000) == "short"
    text = tracebacks.cut("a" * 1_000_000 + "z" * 1_000_000, 8_000)
    assert len(text) < 8_100
    assert text.startswith("aaa")
    assert text.endswith("zzz")
    assert " [… 1,992,000 characters left out …] " in text


def test_result_too_long_for_a_message_is_refused_in_one_line():
    check_size({"text": "x" * 16_000_000})
    with pytest.raises(WarmdError, match=r"^result: must be at most \d+ bytes as JSON") as caught:
        check_size({"text": "x" * (1 << 24)})
    assert "\n" not in str(caught.value)


def test_longest_message_passes_a_channel_quickly():
    ours, theirs = socket.socketpair()
    message, last = JobEvent("a", {"text": "x" * 16_000_000}), JobEvent("a", {})
    sender = threading.Thread(target=Channel(theirs).send, args=(message, last))
    sender.start()
    begun = time.process_time()
    receiver = Channel(ours)
    received: list[Message] = []
    while len(received) < 2:
        received += receiver.receive()
    sender.join()
    assert received == [message, last]
    assert time.process_time() - begun < 1.0
    for sock in (ours, theirs):
        sock.close()
