"""A model hub on this machine: a folder that is served as org/m."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any


class Hub:
    """The published files, and the requests for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.requests: list[str] = []  # paths
        self.is_open = Event()  # until then only the first half of any weights is sent
        self.is_open.set()


class _Handler(BaseHTTPRequestHandler):
    """Serves a folder; its revision is a hash of what is in it."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def do_GET(self) -> None:
        files = {path.name: path.read_bytes() for path in sorted(self.hub.folder.iterdir())}
        sha = hashlib.sha1(repr(files).encode()).hexdigest()
        path = self.path.partition("?")[0]
        self.hub.requests.append(path)
        has_to_wait = False
        if path == "/api/models/org/m/revision/main":
            body = json.dumps({"id": "org/m", "sha": sha, "siblings": []}).encode()
        elif path in (f"/api/models/org/m/tree/{sha}", "/api/models/org/m/tree/main"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in files.items()
            ]
            body = json.dumps(entries).encode()
        elif name := path.removeprefix(f"/org/m/resolve/{sha}/"):
            has_to_wait = name.endswith(".safetensors")
            body = files.get(name, b"")
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{_etag(body)}"')
        self.send_header("X-Repo-Commit", sha)
        self.end_headers()
        if self.command == "GET":
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            if has_to_wait:
                self.hub.is_open.wait(60)
            self.wfile.write(body[half:])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Do not log clients that disconnect."""


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    """Serve a folder as org/m, for processes with the variables that `environment` returns."""
    made = Hub(folder)
    with _Server(("127.0.0.1", 0), partial(_Handler, made)) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        yield made
        made.is_open.set()
        server.shutdown()


def environment(hub: Hub, cache: Path) -> dict[str, str]:
    """Settings of the hub's library with an empty cache."""
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(cache)}
