"""Batching of a horse's messages to its worker."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from warmd.daemon.host.messages import JobEvent, JobOutcome, RunJob, decode, encode

# A horse that receives all jobs of its worker, and then sends events of the first one.
HORSE = """
import socket, sys
from warmd.daemon.fork.worker_connection import WorkerConnection
from warmd.daemon.host.channel import Channel
from warmd.daemon.host.messages import JobEvent, JobOutcome, decode

channel = Channel(socket.socket(fileno=int(sys.argv[1])))
connection = WorkerConnection(channel, decode(sys.argv[3]), unload_model=print)
for _ in range(int(sys.argv[2])):
    connection.next_request()
for number in range(10):
    connection.send(JobEvent("0", {"number": number}))
connection.send(JobOutcome("0", "finished"))
connection.next_request()
"""


def request(number: int) -> bytes:
    return encode(
        RunJob(
            job_id=str(number),
            worker="w",
            run_dir="/",
            execution=1,
            slots=2,
            threads=None,
            niceness=0,
            enqueued_at=None,
        )
    )


@contextmanager
def horse(jobs: int) -> Iterator[socket.socket]:
    """Run a horse; yields the worker's end of the connection, where one send is one packet."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        command = [sys.executable, "-c", HORSE, str(its.fileno()), str(jobs), request(0).decode()]
        with subprocess.Popen(command, pass_fds=[its.fileno()]):
            its.close()
            for number in range(1, jobs):
                ours.send(request(number))
            yield ours
            ours.close()  # ends the horse


def packets_from(connection: socket.socket) -> list[list[object]]:
    """The events in each packet, up to the outcome."""
    packets: list[list[object]] = []
    while not packets or "finished" not in packets[-1]:
        messages = [decode(line) for line in connection.recv(1 << 16).splitlines()]
        packets.append(
            [
                message.event["number"] if isinstance(message, JobEvent) else message.outcome
                for message in messages
                if isinstance(message, JobEvent | JobOutcome)
            ]
        )
    return packets


def test_horse_with_one_job_sends_every_event_at_once():
    with horse(jobs=1) as connection:
        assert packets_from(connection) == [[number] for number in range(10)] + [["finished"]]


def test_horse_with_several_jobs_sends_events_in_batches_and_in_order():
    with horse(jobs=2) as connection:
        packets = packets_from(connection)
    assert len(packets) < 10
    assert [part for packet in packets for part in packet] == [*range(10), "finished"]
