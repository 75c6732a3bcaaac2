"""Free ports for servers that must be told one."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A free TCP port on loopback, outside the range from which the kernel takes ports.

    A port from that range (`bind` to port 0) may be given to any connection of any process before
    the server listens on it. The choice is random, as other test processes choose at the same time.
    """
    lowest_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, lowest_of_kernel)
        with socket.socket() as probe:
            # As servers do: a port on which only closed connections wait is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
