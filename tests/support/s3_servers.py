"""An S3 service on a loopback port, and what is in it: moto's server, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from hanging_proxy import HangingProxy
from needs import needs
from ports import free_port
from waiting import wait_until

BUCKET = "runs"
KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret-value"}


class S3Server:
    """A server with one bucket. Clients connect through a proxy, which can be cut."""

    def __init__(self) -> None:
        needs(find_spec("moto"), "moto's server")
        needs(find_spec("obstore"), "obstore")
        self._port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **KEYS},
        )
        wait_until(self._answers, timeout_s=30)
        self.proxy = HangingProxy(self._port)
        self._request("PUT", f"/{BUCKET}")

    def url(self, prefix: str = "test") -> str:
        """The setting `runs` for this server."""
        endpoint = f"http://127.0.0.1:{self.proxy.port}"
        return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}&region=us-east-1"

    @contextmanager
    def refusing_keys(self) -> Iterator[None]:
        """Refuse the keys of all clients, as those of an unknown user."""
        self._check_keys_after(b"0")
        try:
            yield
        finally:
            self._check_keys_after(b"inf")

    def _check_keys_after(self, requests: bytes) -> None:
        url = f"http://127.0.0.1:{self._port}/moto-api/reset-auth"
        head = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(url, requests, head), timeout=5).close()

    def close(self) -> None:
        self.proxy.close()
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with suppress(OSError):
            self._request("GET", "/")
            return True
        return False

    def _request(self, method: str, path: str) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", method=method)
        # moto takes requests without a signature, but wants to see a region.
        request.add_header(
            "Authorization", "AWS4-HMAC-SHA256 Credential=k/x/us-east-1/s3/aws4_request"
        )
        with urllib.request.urlopen(request, timeout=5) as reply:
            return reply.read()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server, with its keys in this process' environment."""
    before = {name: os.environ.get(name) for name in KEYS}
    server = S3Server()
    os.environ.update(KEYS)
    try:
        yield server
    finally:
        server.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
