"""Measures latency and memory of a gateway under attack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from gateways import Gateway

IN_TIME_S = 0.5  # response time
MAX_MEMORY = 300e6  # of the gateway, in bytes


# In a separate process, not affected by the attackers in this one. Prints the slowest response.
PROBE = """
import http.client, sys, time
url, method, path, body, token, status = sys.argv[1:]
host, port = url.removeprefix("http://").split(":")
headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
slowest = 0
print("asking", flush=True)
while not __import__("select").select([sys.stdin], [], [], 0.02)[0]:
    begun = time.monotonic()
    line = http.client.HTTPConnection(host, int(port), timeout=60)
    line.request(method, path, body or None, headers)
    answer = line.getresponse()
    assert answer.status == int(status), answer.read()
    line.close()
    slowest = max(slowest, time.monotonic() - begun)
print(slowest)
"""


HEALTH = ("GET", "/health", "", "", "503")  # no daemon runs


class Watch:
    """Sends requests, and measures the gateway's memory, while the context is active."""

    slowest_s: float

    def __init__(self, gateway: Gateway, request: tuple[str, ...] = HEALTH) -> None:
        """`request`: method, path, body, token, and the status of its response."""
        self._gateway = gateway
        self._request = request
        self._process = psutil.Process(gateway.process.pid)

    def __enter__(self) -> Watch:
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")  # resets the peak
        self._probe = subprocess.Popen(
            [sys.executable, "-c", PROBE, self._gateway.url, *self._request],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._probe.stdout is not None
        assert self._probe.stdout.readline() == "asking\n"
        return self

    def __exit__(self, *_: object) -> None:
        said: str = self._probe.communicate("enough\n", timeout=90)[0]
        self.slowest_s = float(said)

    @property
    def peak(self) -> int:
        """Peak memory of the gateway in bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def check(self) -> None:
        seen = f"{self._request[1]} within {self.slowest_s:.2f} s, {self.peak / 1e6:.0f} MB"
        crowd = os.getloadavg()[0] / (os.cpu_count() or 1)  # load of other processes
        assert self.slowest_s < IN_TIME_S * max(1, crowd), seen
        assert self.peak < MAX_MEMORY, seen
