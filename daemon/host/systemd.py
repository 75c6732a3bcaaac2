"""The notification protocol of systemd (sd_notify): readiness, the stop, and the watchdog.

A unit of Type=notify gives its socket in NOTIFY_SOCKET, one with WatchdogSec the period in
WATCHDOG_USEC. Without these variables nothing is sent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Self

READY, STOPPING, WATCHDOG = "READY=1", "STOPPING=1", "WATCHDOG=1"

_PINGS_PER_PERIOD = 3  # systemd advises two; the third allows for a slow iteration


class ServiceManager:
    """The systemd that started this service, if any."""

    def __init__(self, address: str, watchdog_s: float | None) -> None:
        """`watchdog_s`: time without a ping after which the service is killed; None: none."""
        # Other transports, such as vsock, are for virtual machines.
        self._address = address if address.startswith(("/", "@")) else ""
        self._period_s = None if watchdog_s is None else watchdog_s / _PINGS_PER_PERIOD
        self._pinged_at = float("-inf")

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str] = os.environ) -> Self:
        """Take the variables out of the environment: jobs and their programs must not notify."""
        address = environ.pop("NOTIFY_SOCKET", "")
        period_us = environ.pop("WATCHDOG_USEC", "")
        # The process that is watched: a different one if a service with a watchdog started warmd.
        pid = environ.pop("WATCHDOG_PID", "") or str(os.getpid())
        is_ours = period_us.isdigit() and int(period_us) > 0 and pid == str(os.getpid())
        return cls(address, int(period_us) / 1e6 if is_ours else None)

    def notify(self, state: str) -> None:
        """Send a state; does not raise, and does not wait for systemd to read it."""
        if not self._address:
            return
        # A name in the abstract namespace begins with a zero byte.
        address = self._address.replace("@", "\0", 1) if self._address[0] == "@" else self._address
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as channel:
            channel.sendto(state.encode(), address)

    def ping_if_due(self) -> None:
        """Report to the watchdog that the main loop runs; called in every iteration of it."""
        now = time.monotonic()
        if self._period_s is not None and now - self._pinged_at >= self._period_s:
            self._pinged_at = now
            self.notify(WATCHDOG)
