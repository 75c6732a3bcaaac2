"""Shares of clients with tokens of their own: queue places, uploads, memory, connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from gateway_requests import address
from gateways import Gateway
from waiting import wait_until

from warmd.configs.tokens import NamedToken, digest_of
from warmd.daemon.gateway.api import files
from warmd.daemon.gateway.api.files import Uploads
from warmd.daemon.gateway.core.queue_shares import QueueShares
from warmd.daemon.gateway.core.threads import Threads
from warmd.daemon.gateway.http import bodies, client as clients
from warmd.daemon.gateway.http.bodies import SMALL, BodyMemory, Reservation
from warmd.daemon.gateway.http.client import HttpClient
from warmd.daemon.gateway.http.errors import ApiError

LIMIT = 4  # of waiting jobs


@pytest.fixture(scope="module")
def gateway(tiny_model, tmp_path_factory):
    """A gateway with tokens of Ada and Bob."""
    folder = tmp_path_factory.mktemp("shares")
    file = folder / "tokens"
    rights = frozenset({"read", "infer", "train"})
    named = [NamedToken(name, rights, digest_of(f"secret-of-{name}")) for name in ("ada", "bob")]
    file.touch(mode=0o600)
    file.write_text("".join(f"{token.line}\n" for token in named))
    made = Gateway(folder / "home", tiny_model, http_tokens=file, http_queue_limit=LIMIT)
    yield made
    made.close()


def complete(gateway: Gateway, name: str, prompt: str, **headers: str) -> httpx.Response:
    headers = {"authorization": f"Bearer secret-of-{name}", **headers}
    body = {"model": "tiny", "prompt": prompt}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=30)


def send(gateway: Gateway, name: str, body: bytes, length: int, *more: str) -> socket.socket:
    """Send the head of a completion and a part of its body."""
    line = socket.create_connection(address(gateway), timeout=30)
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer secret-of-{name}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *more,
    ]
    line.sendall("\r\n".join([*head, "", ""]).encode() + body)
    return line


# --- the queue -----------------------------------------------------------------------------------


def prompts(gateway: Gateway) -> list[str]:
    """The prompts of the waiting jobs, in order."""
    documents = [gateway.client.rundir(job).read_spec() for job in gateway.waiting()]
    return [str(document["spec"]["prompt"]) for document in documents]


def waits(gateway: Gateway, number: int) -> bool:
    return len(gateway.waiting()) == number


def test_a_full_queue_has_places_for_clients_with_fewer_and_they_take_turns(gateway, background):
    asked: list[Future[Any]] = []

    def ask(name: str, prompt: str) -> None:
        asked.append(background.submit(complete, gateway, name, prompt))
        wait_until(partial(waits, gateway, len(asked)))

    for number in range(LIMIT):
        ask("bob", f"bob {number}")
    refused = complete(gateway, "bob", "too many")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    ask("ada", "ada 0")
    ask("ada", "ada 1")
    expected = ["bob 0", "ada 0", "bob 1", "ada 1", "bob 2", "bob 3"]
    wait_until(lambda: prompts(gateway) == expected)
    assert complete(gateway, "ada", "beyond her share").status_code == 429
    for _ in expected:
        gateway.take().finish("x")
    assert [future.result(10).status_code for future in asked] == [200] * len(expected)


def test_places_and_turns_of_any_number_of_clients():
    shares = QueueShares()
    order: list[str] = []

    def add(share: str | None, number: int) -> None:
        job = f"{share}{number}"
        if share is not None:
            shares.note(job, share)
        position = shares.turn(order, share) if share is not None else None
        order.insert(len(order) if position is None else position - 1, job)

    for number in range(3):
        add("a", number)
    for number in range(2):
        add(None, number)  # from the command line
    for share in ("b", "c"):
        for number in range(3):
            add(share, number)
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "None0", "None1", "b2", "c2"]
    assert not shares.has_room(order, "a", 12)  # 4 clients: 3 places each
    assert shares.has_room(order, "d", 12)
    assert shares.has_room(order, "a", 16)


def test_one_key_of_two_clients_is_two_keys(gateway, background):
    key = {"idempotency-key": "the same"}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(complete, gateway, name, name, **key) for name in ("ada", "bob")]
        wait_until(partial(waits, gateway, 2))
        for _ in asked:
            gateway.take().finish("x")
        assert [future.result(10).status_code for future in asked] == [200, 200]


def test_threads_are_used_in_turns_and_canceled_work_frees_its_own():
    done: list[str] = []
    may_end = threading.Event()

    def note(name: str) -> None:
        may_end.wait(10)
        done.append(name)

    async def run() -> None:
        threads = Threads(1, "test")

        async def work(share: str, number: int) -> None:
            clients.enter(HttpClient(share, share))
            await threads.run(note, f"{share}{number}")

        tasks = [asyncio.create_task(work("a", number)) for number in range(4)]
        tasks += [asyncio.create_task(work("b", number)) for number in range(2)]
        await asyncio.sleep(0)
        for canceled in (tasks[0], tasks[2]):  # one that runs, and one that waits
            canceled.cancel()
        may_end.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        await threads.run(note, "free again")
        threads.shutdown()

    asyncio.run(run())
    assert done == ["a0", "a1", "a3", "b0", "b1", "free again"]


# --- body memory ---------------------------------------------------------------------------------


def test_a_client_gets_its_share_from_the_slowest_bodies_of_the_one_with_most(monkeypatch):
    monkeypatch.setattr(bodies, "PATIENCE_S", 0.01)
    monkeypatch.setattr(bodies, "BODY_MEMORY_WAIT_S", 0.2)
    ended: list[Reservation] = []

    async def take(memory: BodyMemory, share: str, size: int) -> Reservation:
        reservation = Reservation(memory, share)

        def end(_: ApiError) -> None:
            ended.append(reservation)
            reservation.shrink(0)

        reservation.on_revoked = end
        await reservation.grow(SMALL + size)
        return reservation

    async def run() -> None:
        memory = BodyMemory(100)
        whole = await take(memory, "a", 30)
        whole.is_arriving = False
        slow, fast = await take(memory, "a", 30), await take(memory, "a", 40)
        with pytest.raises(ApiError, match="too many large requests"):
            await take(memory, "a", 1)  # a client does not take from itself,
        assert ended == []
        with pytest.raises(ApiError, match="too many large requests"):
            await take(memory, "b", 51)  # nor one more than its share
        assert ended == []
        first = await take(memory, "b", 20)
        assert ended == [slow]
        second = await take(memory, "b", 10)  # what is free
        assert ended == [slow]
        third = await take(memory, "c", 33)
        assert ended == [slow, fast]
        for one in (first, second, third):
            one.is_arriving = False
        with pytest.raises(ApiError):  # a whole body is not given up
            await take(memory, "d", 25)
        assert ended == [slow, fast]

    asyncio.run(run())


@pytest.mark.slow
def test_a_slow_body_of_one_client_does_not_keep_large_requests_of_another_out(gateway):
    large = bodies.BODY_MEMORY - SMALL
    begin = b'{"model":"tiny","user":"data:image' + b"x" * (large - 2**20)
    with send(gateway, "bob", begin, large) as slow:
        body = {"model": "none of this name", "prompt": "1" * (3 * 2**20)}
        headers = {"authorization": "Bearer secret-of-ada"}
        begun = time.monotonic()
        for _ in range(3):
            answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 404
        assert time.monotonic() - begun < bodies.BODY_MEMORY_WAIT_S
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            heard = slow.recv(65536)
        assert not heard or b"another client needs its share" in heard


# --- uploads -------------------------------------------------------------------------------------


def test_fast_uploads_of_one_client_leave_places_for_another(monkeypatch):
    monkeypatch.setattr(files, "_MAX_UPLOADS", 4)
    ended: list[str] = []

    async def run() -> None:
        uploads = Uploads()

        async def upload(share: str, number: int) -> None:
            try:
                async with uploads.one(share):
                    await asyncio.Event().wait()
            except ApiError as error:
                ended.append(f"{share}{number}: {error.status}")

        tasks = []
        for share, number in [*(("bob", n) for n in range(5)), *(("ada", n) for n in range(3))]:
            tasks.append(asyncio.create_task(upload(share, number)))
            await asyncio.sleep(0.01)  # so that the first is the slowest
        assert ended == ["bob4: 503", "bob0: 503", "bob1: 503", "ada2: 503"]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(run())


@pytest.mark.slow
def test_many_fast_uploads_of_one_client_refuse_none_of_another(gateway):
    head = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    begin = "\r\n".join(
        [
            "POST /v1/files HTTP/1.1",
            "Host: localhost",
            "Authorization: Bearer secret-of-bob",
            "Content-Type: multipart/form-data; boundary=B",
            "Content-Length: 100000000\r\n\r\n",
        ]
    ).encode()
    may_end = threading.Event()

    async def one() -> None:
        while not may_end.is_set():
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(*address(gateway))
                with contextlib.closing(writer):
                    writer.write(begin + head)
                    for _ in range(4):
                        writer.write(b"x" * 66_000)  # far from slow
                        await writer.drain()
                        await asyncio.sleep(0.3)

    async def crowd() -> None:
        await asyncio.gather(*(one() for _ in range(files._MAX_UPLOADS)))

    headers = {"authorization": "Bearer secret-of-ada"}
    attack = threading.Thread(target=asyncio.run, args=(crowd(),))
    attack.start()
    try:
        wait_until(lambda: len(gateway.arriving_files()) >= files._MAX_UPLOADS - 5)
        with httpx.Client(base_url=gateway.url, headers=headers, timeout=30) as ada:
            for _ in range(10):
                stored = ada.post("/v1/files", files={"file": ("a.jsonl", b"{}")})
                assert stored.status_code == 200, stored.text
                ada.delete(f"/v1/files/{stored.json()['id']}")
    finally:
        may_end.set()
        attack.join(30)


# --- connections ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_waiting_answers_of_one_client_take_no_place_of_another(gateway):
    places = 200
    stream = orjson.dumps({"model": "tiny", "prompt": "1", "stream": True})
    body = orjson.dumps({"model": "tiny", "prompt": "1"})
    try:
        with gateway.few_places(places), contextlib.ExitStack() as lines:
            hers = lines.enter_context(send(gateway, "ada", stream, len(stream)))
            assert hers.recv(15) == b"HTTP/1.1 200 OK"
            job = gateway.take()
            # All wait for one job, so the limit of the queue does not count.
            for _ in range(places + 50):
                lines.enter_context(send(gateway, "bob", body, len(body), "Idempotency-Key: one"))
            for _ in range(20):
                answer = httpx.get(
                    f"{gateway.url}/v1/models",
                    headers={"authorization": "Bearer secret-of-ada"},
                    timeout=5,
                )
                assert answer.status_code == 200
            job.write("still here")
            job.finish("still here")
            heard = b""
            while b"[DONE]" not in heard:
                got = hers.recv(65536)
                assert got, heard
                heard += got
    finally:
        gateway.drop_waiting()
