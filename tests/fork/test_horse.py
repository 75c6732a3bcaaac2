"""What a horse says to its worker."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import orjson

# A horse that is told of as many jobs as its worker sends, and then speaks of the first.
HORSE = """
import socket, sys
from warmd.daemon.host.channel import Channel
from warmd.daemon.fork.horse import Line

line = Line(Channel(socket.socket(fileno=int(sys.argv[1]))), {"job_id": "0"})
for _ in range(int(sys.argv[2])):
    line.next_request()
for number in range(10):
    line.send({"job": "0", "event": number})
line.send({"job": "0", "outcome": "finished"})
line.next_request()
"""


@contextmanager
def horse(jobs: int) -> Iterator[socket.socket]:
    """Run one; yields the worker's end of its line, where what was sent at once is one packet."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        command = [sys.executable, "-c", HORSE, str(its.fileno()), str(jobs)]
        with subprocess.Popen(command, pass_fds=[its.fileno()]):
            its.close()
            for number in range(1, jobs):
                ours.send(orjson.dumps({"op": "run", "job_id": str(number)}) + b"\n")
            yield ours
            ours.close()  # which ends it


def said(line: socket.socket) -> list[list[object]]:
    """Each packet's events, up to the outcome."""
    packets: list[list[object]] = []
    while not packets or "finished" not in packets[-1]:
        messages = [orjson.loads(text) for text in line.recv(1 << 16).splitlines()]
        packets.append([m["event"] if "event" in m else m["outcome"] for m in messages])
    return packets


def test_a_horse_alone_with_its_job_says_everything_at_once():
    with horse(jobs=1) as line:
        assert said(line) == [[number] for number in range(10)] + [["finished"]]


def test_what_jobs_side_by_side_say_in_a_moment_goes_together_and_in_order():
    with horse(jobs=2) as line:
        packets = said(line)
    assert len(packets) < 10
    assert [word for packet in packets for word in packet] == [*range(10), "finished"]
