"""A crowd of connections of one client does not keep the completions of another waiting."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from followers import Training
from gateways import Answerer, Gateway
from waiting import wait_until
from watch import Watch

from warmd.daemon.gateway.core.shared import Shared
from warmd.daemon.gateway.http.turns import Turns, leave

TOKEN = "a-token-of-tests"
COMPLETION = '{"model":"tiny","prompt":"1","max_tokens":5}'
VICTIM = ("POST", "/v1/completions", COMPLETION, TOKEN, "200")


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def post(path: str, body: str, length: int, *headers: str) -> bytes:
    about = (f"Content-Length: {length}", "Content-Type: application/json", "X-Warmd: 1")
    return get(path, *about, *headers).replace(b"GET", b"POST", 1) + body.encode()


def schema_chat(schema: dict[str, Any]) -> str:
    about = {"name": "a", "schema": schema}
    return json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": about},
        }
    )


EXPLODES = schema_chat({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghij"]})
KNOWN = f"Authorization: Bearer {TOKEN}"
# Connections, what each sends, and whether it sends it again after each response.
CROWDS: dict[str, tuple[int, bytes, bool]] = {
    "readers of jobs": (1000, get("/v1/warmd/jobs", KNOWN), True),
    "readers of the overview": (1000, get("/v1/warmd/overview", KNOWN), True),
    "readers of metrics": (1000, get("/metrics", KNOWN), True),
    "schemas that explode": (
        24,
        post("/v1/chat/completions", EXPLODES, len(EXPLODES), KNOWN),
        True,
    ),
    "streams": (2100, get("/v1/warmd/overview/stream", KNOWN), False),
    "streams of one job": (2100, get("/v1/warmd/jobs/JOB/events/stream", KNOWN), False),
    "slow bodies": (2100, post("/v1/completions", "{", 60_000, KNOWN), False),
    "slow logins without token": (2100, post("/v1/warmd/login", "{", 4000), False),
    "large logins without token": (500, post("/v1/warmd/login", "[" * 9000, 9000), True),
    "lists as logins without token": (500, post("/v1/warmd/login", "[" * 4000, 4000), True),
    "probes without token": (1000, get("/health"), True),
    "pages without token": (1000, get("/"), True),
}


class Crowd:
    """Connections of one client, in the event loop of the test."""

    def __init__(self, gateway: Gateway, number: int, sent: bytes, *, again: bool) -> None:
        self._port = int(gateway.url.rpartition(":")[2])
        self._number, self._sent, self._again = number, sent, again
        self.opened = self.responses = 0

    async def _one(self) -> None:
        with contextlib.suppress(OSError):
            while True:  # one that is closed connects again
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                self.opened += 1
                with contextlib.closing(writer):
                    writer.write(self._sent)
                    while await reader.read(65536):
                        self.responses += 1
                        if self._again:
                            writer.write(self._sent)
                if not self._again:
                    return

    async def during(self, act: Callable[[], Any]) -> None:
        """Call a function in a thread while all connections are open."""
        tasks = [asyncio.create_task(self._one()) for _ in range(self._number)]
        await asyncio.to_thread(act)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.fixture(scope="module")
def gateway(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("crowds") / "h", tiny_model, http_token=TOKEN)
    answerer = Answerer(gateway)
    answerer.start()
    yield gateway
    answerer.done.set()
    answerer.join(10)
    gateway.close()


@pytest.mark.nightly(
    part="clients", catches="a kind of request of which a thousand starve completions"
)
@pytest.mark.parametrize("name", CROWDS)
def test_a_crowd_does_not_keep_completions_waiting(gateway: Gateway, name: str) -> None:
    number, sent, again = CROWDS[name]
    job = Training(gateway)
    job.log(500, note="a" * 100)
    crowd = Crowd(gateway, number, sent.replace(b"JOB", job.id.encode()), again=again)
    watch = Watch(gateway, VICTIM)

    def complete() -> None:
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}

        def post() -> int:
            url = f"{gateway.url}/v1/completions"
            return httpx.post(url, content=COMPLETION, headers=headers, timeout=30).status_code

        wait_until(lambda: crowd.opened >= number, timeout_s=60)
        assert post() == 200  # behind all of them
        with watch:
            for _ in range(20):
                job.log(10)
                assert post() == 200

    asyncio.run(crowd.during(complete))
    job.end()
    watch.check()


@pytest.mark.nightly(part="clients", catches="memory that a crowd leaves behind in the gateway")
def test_after_crowds_the_gateway_has_at_most_twice_its_memory(make_gateway) -> None:
    gateway = make_gateway(http_token=TOKEN)
    process = psutil.Process(gateway.process.pid)
    before = process.memory_info().rss
    number, sent, again = CROWDS["streams"]
    for _ in range(3):
        crowd = Crowd(gateway, number, sent, again=again)

        def all_begun(crowd: Crowd = crowd) -> None:
            wait_until(lambda: crowd.responses > 1900, timeout_s=60)

        asyncio.run(crowd.during(all_begun))
    wait_until(lambda: process.memory_info().rss < 2 * before, timeout_s=60)


def test_few_are_served_at_a_time_in_order_and_those_that_left_are_not() -> None:
    turns, served, running = Turns(2), [], []
    may_end = asyncio.Event()

    async def app(scope: Any, _: Any, send: Any) -> None:
        served.append(scope["number"])
        running.append(len(served))
        await may_end.wait()
        await send({"type": "http.response.start"})

    async def unused(*_: Any) -> Any: ...

    async def crowd() -> None:
        scopes = [{"number": number} for number in range(6)]
        serving = [asyncio.create_task(turns.serve(app, one, unused, unused)) for one in scopes]
        await asyncio.sleep(0)
        assert served == [0, 1]
        leave(scopes[3])
        leave(scopes[0])  # it is being served
        serving[4].cancel()
        may_end.set()
        await asyncio.wait(serving)
        assert served == [0, 1, 2, 5]
        await asyncio.gather(*(turns.serve(app, {"number": 7}, unused, unused) for _ in "ab"))

    asyncio.run(crowd())


def test_those_who_ask_at_the_same_time_share_a_reading_that_begins_after_they_asked() -> None:
    begun: list[int] = []
    may_end = asyncio.Event()

    async def read() -> int:
        begun.append(len(begun))
        number = begun[-1]
        await may_end.wait()
        if number == 2:
            raise ValueError("no")
        return number

    shared = Shared(read)

    async def ask() -> int:
        return await shared.get()

    async def together(number: int) -> list[asyncio.Task[int]]:
        asked = [asyncio.create_task(ask()) for _ in range(number)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return asked

    async def clients() -> None:
        first, following = await together(3), await together(50)
        following[0].cancel()
        may_end.set()
        assert await asyncio.gather(*first) == [0, 0, 0]
        assert await asyncio.gather(*following[1:]) == [1] * 49
        failed: Awaitable[list[Any]] = asyncio.gather(*await together(2), return_exceptions=True)
        assert [str(error) for error in await failed] == ["no", "no"]
        assert await shared.get() == 3

    asyncio.run(clients())
    assert begun == [0, 1, 2, 3]
