"""Peak memory of the current process."""

from __future__ import annotations

import threading
from pathlib import Path

SAMPLED_S = 0.02  # sampling period


class Peak:
    """Context manager: samples the peak memory of this process from /proc; 0 without /proc."""

    def __init__(self) -> None:
        self.private_bytes = 0  # anonymous memory, which no other process shares
        self.resident_bytes = 0
        self._status = Path("/proc/self/status")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while self._status.exists() and not self._done.wait(SAMPLED_S):
            status = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
            private, resident = (
                1024 * int(status[name].split()[0]) for name in ("RssAnon", "VmRSS")
            )
            self.private_bytes = max(self.private_bytes, private)
            self.resident_bytes = max(self.resident_bytes, resident)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
