"""Chats about images by OpenAI's client, through gateway, queue, worker and vision encoder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_vision
from daemons import Daemon
from gateways import openai_client
from tiny_vision import png, url
from waiting import wait_until

from warmd.configs.config import WorkerConfig
from warmd.jobs import spec_class

# It starts its own daemon; the parts have faster tests.
pytestmark = pytest.mark.nightly(
    part="clients", catches="an image that is lost between the gateway and the engine"
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    model = tmp_path_factory.mktemp("models") / "vision"
    model.mkdir()
    tiny_vision.save(model)
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        files = Path(folder, "shown").resolve()
        files.mkdir()
        (files / "a.png").write_bytes(png(120, 60))
        worker = WorkerConfig(
            name="infer-0", queue="infer", isolation="resident", slots=4, threads=1
        )
        daemon = Daemon(
            Path(folder, "home"), model, http_port=0, http_files=files, workers=(worker,)
        )
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.close()


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai_client(wait_until(lambda: daemon.status()["http"]["url"])) as client:
        yield client


def messages(*urls: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


def request(client: openai.OpenAI, *urls: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=messages(*urls), max_tokens=8, temperature=0, **options
    )


def test_image_reaches_the_model_through_every_interface(daemon, client):
    image = png(120, 60)
    answer = request(client, url(image))
    text = answer.choices[0].message.content
    assert answer.usage.prompt_tokens > len("what is it?") + 120 * 60 // 28**2
    chunks = request(client, url(image), stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    named = request(client, f"file://{daemon.config.http_files}/a.png")
    assert named.choices[0].message.content == text
    spec = spec_class("infer").parse(
        {
            "model": "tiny", "prompt": "what is it?", "max_tokens": 8, "temperature": 0,
            "image": [f"{daemon.config.http_files}/a.png"],
        }
    )  # fmt: skip
    job = daemon.wait(daemon.client.jobs.submit(spec))
    assert job["result"]["choices"][0]["text"] == text
    other = request(client, url(png(120, 60, seed=1)))
    assert other.usage.prompt_tokens == answer.usage.prompt_tokens


def test_growing_episode_uses_the_prefix_cache(client):
    first, second = (
        url(png(400, 200, 2)),
        url(png(400, 200, 3)),
    )
    request(client, first)
    grown = request(client, first, second)
    assert grown.usage.prompt_tokens_details.cached_tokens > 0


def test_actions_are_scaled_to_the_original_image(client):
    answer = request(client, url(png(300, 90)), extra_body={"actions": "ui-tars"})
    read = answer.choices[0].actions
    assert read["screen"] == [300, 90]
    assert read["errors"]


def test_file_outside_the_configured_folder_is_refused(daemon, client):
    with pytest.raises(openai.BadRequestError, match="below"):
        request(client, f"file://{daemon.home.path}/../shown/a.png")
