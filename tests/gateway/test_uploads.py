"""Uploads: counted and stored while they arrive, and slow ones hold up nobody."""

from __future__ import annotations

import select
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from gateways import Gateway
from small_disks import small_disk
from waiting import wait_until

from warmd.daemon.gateway.api import files

# Their gateway takes longer to start than most of the tests take.
pytestmark = pytest.mark.slow

HEAD = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
END = b"\r\n--B--\r\n"
LIMIT = 5_000_000


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        gateway = Gateway(Path(folder, "home"), tiny_model, max_uploads_bytes=LIMIT)
        yield gateway
        gateway.close()


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begin(gateway: Gateway, sockets: ExitStack, *, length: int | None = None) -> socket.socket:
    """Open a connection and send the head of an upload: chunked without a length."""
    host, port = gateway.url.removeprefix("http://").split(":")
    connection = sockets.enter_context(socket.create_connection((host, int(port)), timeout=30))
    how = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    connection.sendall(
        f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: multipart/form-data; boundary=B\r\n{how}\r\n\r\n".encode()
    )
    return connection


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def upload(gateway: Gateway, content: bytes = b"{}") -> httpx.Response:
    answer = httpx.post(f"{gateway.url}/v1/files", files={"file": ("a.jsonl", content)}, timeout=30)
    if answer.status_code == 200:
        httpx.delete(f"{gateway.url}/v1/files/{answer.json()['id']}")
    return answer


def arrived_bytes(gateway: Gateway) -> int:
    """Return the size of the files that are arriving; one may be refused and removed meanwhile."""
    found = 0
    for path in gateway.arriving_files():
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def left(gateway: Gateway) -> list[str]:
    """Return the entries of the folder of files, except its lock."""
    return [path.name for path in gateway.home.path.glob("files/*") if path.name != ".lock"]


def test_slow_uploads_are_below_the_home_and_hold_up_no_other(gateway, sockets):
    slow = [begin(gateway, sockets, length=4_000_000) for _ in range(8)]
    for connection in slow:
        connection.sendall(HEAD + b"y" * 500_000)
    found = wait_until(lambda: len(found := gateway.arriving_files()) == len(slow) and found)
    for _ in range(3):
        assert upload(gateway).status_code == 200
        assert set(gateway.arriving_files()) == set(found)  # it has waited for none of them
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    sockets.close()
    wait_until(lambda: not left(gateway))


def test_an_upload_without_a_length_is_counted_while_it_arrives(gateway, sockets):
    connection = begin(gateway, sockets)
    connection.sendall(chunk(HEAD))
    largest = 0
    for _ in range(20):
        connection.sendall(chunk(b"x" * 1_000_000))
        largest = max(largest, arrived_bytes(gateway))
    connection.sendall(chunk(END) + b"0\r\n\r\n")
    answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 507 ")
    assert largest <= LIMIT
    assert left(gateway) == []


def test_two_uploads_together_do_not_exceed_the_limit(gateway, sockets):
    first = begin(gateway, sockets, length=3_000_000)
    first.sendall(HEAD + b"x" * 2_900_000)
    wait_until(lambda: arrived_bytes(gateway) >= 2_000_000)
    answer = upload(gateway, b"x" * 3_500_000)
    assert answer.status_code == 507
    assert "max_uploads" in answer.json()["error"]["message"]
    sockets.close()
    wait_until(lambda: not left(gateway))
    assert upload(gateway, b"x" * 3_500_000).status_code == 200


def test_beyond_the_most_uploads_the_slowest_makes_room(gateway, sockets):
    slow = [begin(gateway, sockets, length=4_000_000) for _ in range(files._MAX_UPLOADS)]
    for connection in slow:
        connection.sendall(HEAD + b"y" * 100)
    wait_until(lambda: len(gateway.arriving_files()) == len(slow))
    begun = time.perf_counter()
    wait_until(lambda: upload(gateway).status_code == 200, timeout_s=5)
    assert time.perf_counter() - begun < 2 * files._LEAST_S
    answered, _, _ = select.select(slow, [], [], 10)
    assert answered[0].recv(65536).startswith(b"HTTP/1.1 503 ")
    sockets.close()
    wait_until(lambda: not left(gateway))


def test_a_full_disk_refuses_the_upload_and_keeps_nothing(gateway):
    (gateway.home.path / "files").mkdir(exist_ok=True)
    with small_disk(gateway.home.path / "files", "1m"):
        answer = upload(gateway, b"x" * 3_000_000)
        assert answer.status_code == 507
        message = answer.json()["error"]["message"]
        assert message == "file: cannot be stored: No space left on device"
        assert left(gateway) == []
        assert upload(gateway).status_code == 200


def test_incomplete_uploads_of_a_killed_gateway_are_removed(make_gateway, sockets):
    gateway = make_gateway()
    begin(gateway, sockets, length=4_000_000).sendall(HEAD + b"y" * 2_000_000)
    wait_until(lambda: gateway.arriving_files())
    gateway.kill()
    assert gateway.arriving_files()
    gateway.start()
    assert left(gateway) == []


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("multipart/form-data", HEAD + END, "Content-Type: must be multipart/form-data with a"),
        ("text/plain", b"x", "Content-Type: must be multipart/form-data with a boundary"),
        ("multipart/form-data; boundary=B", b"nothing", "the body must be multipart/form-data: "),
        ("multipart/form-data; boundary=B", HEAD + b"x", "its end is missing"),
        ("multipart/form-data; boundary=B", HEAD + b"x\r\n" + HEAD + END, "one file, got more"),
        (
            "multipart/form-data; boundary=B",
            b"--B\r\nContent-Disposition: form-data\r\n\r\nx" + END,
            "must have a name",
        ),
        (
            "multipart/form-data; boundary=B",
            b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 70_000 + END,
            "must have at most 65536 bytes of fields",
        ),
    ],
)
def test_a_wrong_form_is_refused_and_leaves_nothing(
    gateway: Any, content_type: str, body: bytes, message: str
):
    headers = {"content-type": content_type}
    answer = httpx.post(f"{gateway.url}/v1/files", content=body, headers=headers)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert left(gateway) == []


def test_any_bytes_and_any_boundaries_of_pieces_are_stored_unchanged(gateway, sockets):
    content = b"\r\n--B\r\n--\r\n-\r" * 50 + bytes(range(256)) * 20
    boundary = "x" * 30
    for size in (1, 7, 4096):
        whole = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        ).encode() + content + f"\r\n--{boundary}--\r\n".encode()  # fmt: skip
        step = max(size, 300)  # smaller chunks are refused by the connection
        pieces = [whole[at : at + step] for at in range(0, len(whole), step)]
        answer = httpx.post(
            f"{gateway.url}/v1/files",
            content=iter(pieces),
            headers={"content-type": f"multipart/form-data; boundary={boundary}"},
        )
        assert answer.status_code == 200, answer.text
        file = f"{gateway.url}/v1/files/{answer.json()['id']}"
        assert httpx.get(f"{file}/content").content == content
        httpx.delete(file)
