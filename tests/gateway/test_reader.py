"""The gateway's event reader: garbage in one stream does not affect other requests."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import orjson
import pytest
from gateways import Execution, Gateway

from warmd.daemon.queue import keys


def request(gateway: Gateway, **options: Any) -> Any:
    return gateway.openai().completions.create(model="tiny", prompt="1", **options)


def event(**fields: Any) -> dict[bytes, bytes]:
    whole = {"seq": 2, "execution": 1, "time": 1.0, "type": "text", "step": None, **fields}
    return {b"event": orjson.dumps(whole)}


GARBAGE: list[dict[bytes, bytes]] = [
    {b"other": b"x"},
    {b"event": b"\xff{"},
    {b"event": b"[]"},
    {b"event": b"7"},
    {b"event": b"{}"},
    event(seq="2"),
    event(seq=99_999),
    {b"event": b'{"seq":2}'},
]


@pytest.mark.parametrize(
    "entry",
    [*GARBAGE[:2], *(pytest.param(entry, marks=pytest.mark.slow) for entry in GARBAGE[2:])],
)
def test_garbage_in_a_stream_is_skipped_and_the_request_completes(gateway, background, entry):
    answers = [background.submit(request, gateway) for _ in range(2)]
    spoilt, other = (gateway.take() for _ in range(2))
    put(gateway, spoilt, entry)
    for job in (spoilt, other):
        job.finish("kept")
    assert [answer.result(10).choices[0].text for answer in answers] == ["kept", "kept"]


def put(gateway: Gateway, job: Execution, entry: Any) -> None:
    connection: Any = gateway.client.connection
    connection.xadd(keys.events(job.job.id), entry, id="2-0")


def test_key_of_another_type_in_place_of_a_stream_does_not_stop_other_streams(gateway, background):
    spoilt = background.submit(request, gateway)
    job = gateway.take()
    gateway.client.connection.set(keys.events(job.job.id), "no stream")
    stream = iter(request(gateway, stream=True))
    other = gateway.take()
    other.write("at once")
    assert next(stream).choices[0].text == "at once"
    job.finish("from the file")
    assert spoilt.result(10).choices[0].text == "from the file"
    other.finish("at once")
    list(stream)


@pytest.mark.slow
def test_gateway_ends_with_a_task_of_its_own_and_logs_why():
    code = (
        "import asyncio\n"
        "from warmd.daemon.gateway.app import exit_unless_canceled\n"
        "async def read(): raise KeyError('event')\n"
        "async def main():\n"
        "    asyncio.create_task(read()).add_done_callback(exit_unless_canceled)\n"
        "    await asyncio.sleep(30)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "a task of the gateway has ended" in done.stderr
    assert "KeyError: 'event'" in done.stderr
