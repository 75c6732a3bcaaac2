"""Images in requests: stored once, kept while a job needs them, limits checked before decoding."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from gateways import Execution, Gateway
from PIL import Image

from warmd.daemon.gateway.api import images
from warmd.daemon.host.image_store import ImageStore, size_of
from warmd.daemon.supervise.retention import Retention
from warmd.jobs.engine.images import Budget, read
from warmd.jobs.errors import SpecError
from warmd.jobs.files.atomic import LOCK

# Their gateway takes longer to start than most of the tests take.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        gateway = Gateway(Path(folder, "home"), tiny_model)
        yield gateway
        gateway.close()


def noise(seed: int, side: int = 200) -> bytes:
    file = io.BytesIO()
    Image.frombytes("L", (side, side), os.urandom(side * side)).save(file, "PNG", seed=seed)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def answered(gateway: Gateway, *contents: bytes) -> Execution:
    """Request a chat about images, complete its job as a worker, and return the job."""
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url(c)}} for c in contents]
    messages: Any = [{"role": "user", "content": parts}]
    with ThreadPoolExecutor(1) as pool:
        request = gateway.openai().chat.completions.create
        answer = pool.submit(request, model="tiny", messages=messages)
        job = gateway.take()
        job.finish("seen")
        assert answer.result(10).choices[0].message.content == "seen"
    return job


def stored(gateway: Gateway) -> list[bytes]:
    folder = gateway.home.runs / ".images"
    return [path.read_bytes() for path in folder.iterdir() if path.name != LOCK]


def forget_answers(gateway: Gateway, most: int) -> None:
    from warmd.daemon.supervise import retention

    remover = Retention(gateway.client.places, keep_s=1e6, most=most, most_bytes=10**12)
    before, retention.GRACE_S = retention.GRACE_S, 0.0
    try:
        remover.remove_due()
    finally:
        retention.GRACE_S = before


def test_image_is_stored_once_and_removed_with_the_last_answer_that_uses_it(gateway):
    once, again = noise(1), noise(2)
    jobs = [answered(gateway, once), answered(gateway, once, again, once)]
    for job in jobs:
        (message,) = orjson.loads(job.spec["messages"])
        for part in message["content"]:
            path = Path(part["image_url"]["url"].removeprefix("file://"))
            assert path.read_bytes() in (once, again)
        assert (job.rundir.path / "spec.json").stat().st_size < 3000
    assert sorted(stored(gateway)) == sorted([once, again])
    assert size_of(jobs[1].rundir.path) > len(again) + len(once) // 2
    forget_answers(gateway, 1)
    assert not jobs[0].rundir.path.exists()
    assert sorted(stored(gateway)) == sorted([once, again])
    forget_answers(gateway, 0)
    assert stored(gateway) == []


def test_orphaned_image_of_a_dead_gateway_is_removed_and_one_in_use_is_not(tmp_path):
    store = ImageStore(tmp_path)
    job, orphan = noise(3), noise(4)
    (tmp_path / "infer-1").mkdir()
    store.hold(tmp_path / "infer-1", {store.place_of(job): job})
    store.place_of(orphan).write_bytes(orphan)  # killed before the link
    (store.folder / ".half.tmp").write_bytes(b"x")  # killed in the middle of writing
    store.sweep()
    assert [path.read_bytes() for path in store.folder.iterdir()] == [job]
    (tmp_path / "infer-1").rename(tmp_path / ".removed-infer-1")  # killed in the middle of removing
    store.sweep()
    assert store.place_of(job).exists()


def bomb(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * 1_000_000, 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


SLOW: dict[str, Callable[[], bytes]] = {
    "JPEG of a million segments": lambda: b"\xff\xd8" + b"\xff\xe1\0\2" * 5_000_000,
    "PNG of a million chunks": lambda: noise(5)[:33] + chunk(b"abCd", b"") * 1_000_000,
    "GIF of a million frames": lambda: (
        b"GIF89a\1\0\1\0\0\0\0" + b",\0\0\0\0\1\0\1\0\0\2\2D\1\0" * 1_000_000
    ),
}  # fmt: skip


def take(content: bytes, tmp_path: Path) -> Any:
    image = SimpleNamespace(url=url(content))
    return images.collect([image], "messages", None, ImageStore(tmp_path))


def test_image_bomb_is_refused_before_it_is_decoded_in_one_line(tmp_path):
    raw = bomb(50_000, 50_000)
    assert len(raw) < 10_000
    with pytest.raises(SpecError) as caught:
        take(raw, tmp_path)
    assert str(caught.value) == (
        "messages: image 1 must have at most 50,000,000 pixels, got 50000 x 50000"
    )


@pytest.mark.parametrize("kind", SLOW)
def test_image_crafted_to_be_parsed_slowly_is_refused_quickly(tmp_path, kind):
    content = SLOW[kind]()
    begun = time.thread_time()
    with contextlib.suppress(SpecError):
        take(content, tmp_path)
    assert time.thread_time() - begun < 2


def test_images_stay_in_the_request_where_another_machine_may_answer_it(tmp_path):
    (tmp_path / "a.png").write_bytes(content := noise(6))
    image = SimpleNamespace(url=f"file://{tmp_path}/a.png")
    assert images.collect([image], "messages", tmp_path, None) == {}
    assert read(image.url, Budget())[1] == read(url(content), Budget())[1]
    with pytest.raises(SpecError, match="one of "):
        images.collect([SimpleNamespace(url=url(b"no image"))], "messages", None, None)


def test_file_replaced_by_a_link_after_the_check_is_not_read_by_the_job(tmp_path):
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "a.png").write_bytes(noise(6))
    (tmp_path / "secret.png").write_bytes(secret := noise(7))
    image = SimpleNamespace(url=f"file://{shown}/a.png")
    store = ImageStore(tmp_path)
    taken = images.collect([image], "messages", shown, store)
    (shown / "a.png").unlink()
    (shown / "a.png").symlink_to(tmp_path / "secret.png")
    assert secret not in taken.values()
    assert image.url == f"file://{next(iter(taken))}"
