"""The notification protocol of systemd (sd_notify): a service reports when it is ready."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

READY, STOPPING = "READY=1", "STOPPING=1"


def notify(state: str) -> None:
    """Send a state to systemd; does nothing where no unit of Type=notify has started warmd."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # the abstract namespace
        address = f"\0{address[1:]}"
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as channel:
        channel.sendto(state.encode(), address)
