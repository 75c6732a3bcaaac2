"""Models from a hub: one of our own, on this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest

from warmd.configs.config import ModelConfig
from warmd.daemon import fetch

MODEL = ModelConfig(name="m", path="org/m")


class Hub(BaseHTTPRequestHandler):
    """Serves a folder as org/m; its revision is a hash of what is in it."""

    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, *args: Any) -> None:
        self.folder = folder
        super().__init__(*args)

    def do_GET(self) -> None:
        files = {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}
        sha = hashlib.sha1(repr(files).encode()).hexdigest()
        path = self.path.partition("?")[0]
        if path == "/api/models/org/m/revision/main":
            body = json.dumps({"id": "org/m", "sha": sha, "siblings": []}).encode()
        elif path == f"/api/models/org/m/tree/{sha}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in files.items()
            ]
            body = json.dumps(entries).encode()
        else:
            body = files[path.removeprefix(f"/org/m/resolve/{sha}/")]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{_etag(body)}"')
        self.send_header("X-Repo-Commit", sha)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a hub that can be reached. The hub's cache is empty."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text('{"is": "old"}')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder)) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # of processes that are started
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(fetch, "_fetched", set())
        yield folder
        server.shutdown()


def test_who_loads_a_model_gets_the_newest_and_jobs_after_that_get_it_too(published):
    old = fetch.local_folder(MODEL)
    (published / "config.json").write_text('{"is": "new"}')
    assert fetch.local_folder(MODEL) == old  # a job does not wait for the hub
    new = fetch.local_folder(MODEL, is_newest=True)
    assert (new / "config.json").read_text() == '{"is": "new"}'
    assert fetch.local_folder(MODEL) == new


@pytest.mark.parametrize("cleared", ["models--org--m", "models--org--m/blobs"])
def test_what_was_cleared_out_of_the_cache_is_fetched_again(published, tmp_path, cleared):
    fetch.local_folder(MODEL)
    shutil.rmtree(tmp_path / "cache" / cleared)
    assert (fetch.local_folder(MODEL) / "config.json").read_text() == '{"is": "old"}'
