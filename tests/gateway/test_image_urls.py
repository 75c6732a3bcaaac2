"""URLs of images in chats: data and files, and the ones that are refused."""

from __future__ import annotations

import base64
import os
import tempfile
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_requests import image_url, openai_messages, refusal
from gateways import Gateway


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/cat.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:image/png;base64,!!!",
        "data:image/png;base64,aGVsbG8=",
        "data:text/plain;base64,aGVsbG8=",
    ],
)
def test_url_that_is_not_an_image_is_refused(gateway, url):
    with pytest.raises(openai.BadRequestError) as caught:
        chat_with_image(gateway, url)
    assert refusal(caught.value)[1]["param"] == "messages"


@pytest.mark.slow
def test_image_with_too_many_pixels_is_refused(gateway):
    url = image_url(20_000, 20_000)
    assert len(url) < 200_000
    with pytest.raises(openai.BadRequestError, match="at most 50,000,000 pixels"):
        chat_with_image(gateway, url)


def chat_with_image(gateway: Gateway, url: str) -> Any:
    part: Any = {"type": "image_url", "image_url": {"url": url}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]
    return gateway.openai().chat.completions.create(model="tiny", messages=messages)


@pytest.mark.slow
def test_file_urls_work_only_below_the_configured_folder(make_gateway, background):
    with tempfile.TemporaryDirectory(prefix="warmd-") as name:
        folder = Path(name).resolve() / "shown"
        (folder / "deep").mkdir(parents=True)
        for place in (folder / "deep" / "a.png", folder.parent / "b.png"):
            place.write_bytes(base64.b64decode(image_url(4, 3).partition(",")[2]))
        (folder / "c.png").symlink_to(folder.parent / "b.png")
        (folder / "d.png").write_text("no image")
        (folder / "e.png").hardlink_to(folder.parent / "b.png")
        (folder / "way").symlink_to(folder / "deep")
        os.mkfifo(folder / "f.png")
        gateway = make_gateway(http_files=folder)
        links = ("../b.png", "deep/../deep/a.png", "c.png", "e.png", "way/a.png")
        for path in (*links, "d.png", "f.png", "deep", "none.png", "", "..", "/etc/passwd"):
            with pytest.raises(openai.BadRequestError):
                chat_with_image(gateway, f"file://{folder}/{path}")
        url = f"file://{folder}/deep/a.png"
        answer = background.submit(chat_with_image, gateway, url)
        job = gateway.take()
        (message,) = openai_messages(job.spec["messages"])
        # A copy: replacing the file before the job reads it has no effect.
        copy = Path(message["content"][1]["image_url"]["url"].removeprefix("file://"))
        assert copy.read_bytes() == (folder / "deep" / "a.png").read_bytes()
        job.finish("so")
        answer.result(10)
