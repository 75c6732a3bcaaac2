"""The sockets at which processes listen, while a test does something, as the manual names them."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).parents[2]
PERIOD_S = 0.05
_ACCEPTS = 0x10000  # the flag of a unix socket that listens
_LISTEN, _UNCONNECTED = "0A", "07"  # states of TCP, and of UDP


def documented() -> set[str]:
    """The sockets in the table of docs/security.md."""
    section = (ROOT / "docs" / "security.md").read_text().partition("## What listens where")[2]
    rows = [row.split("|")[1] for row in section.partition("\n## ")[0].splitlines() if "|" in row]
    return {row.replace("`", "").strip() for row in rows[2:]}


class Listeners:
    """Collects the sockets at which processes listen; a context manager."""

    def __init__(
        self, processes: Callable[[], Iterable[psutil.Process]], names: Callable[[str], str]
    ) -> None:
        """`names`: from an address (unix:PATH, tcp:HOST:PORT, udp:…) to its name in the manual."""
        self.found: set[str] = set()
        self._processes = processes
        self._names = names
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._has_ended.wait(PERIOD_S):
            with suppress(psutil.NoSuchProcess):
                own = set().union(*(_sockets(one.pid) for one in self._processes()))
                # Read afterwards: an inode is not used again so soon.
                listening = {**_internet("tcp"), **_internet("udp"), **_unix()}
                self.found |= {self._names(listening[inode]) for inode in own & listening.keys()}


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path))
                if match is not None:
                    found.add(match[1])
    return found


def _internet(protocol: str) -> dict[str, str]:
    """The addresses at which somebody listens, by the inode of the socket."""
    found = {}
    for version in ("", "6"):
        for line in Path(f"/proc/net/{protocol}{version}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == (_LISTEN if protocol == "tcp" else _UNCONNECTED):
                address, port = fields[1].split(":")
                found[fields[9]] = f"{protocol}:{_host(address)}:{int(port, 16)}"
    return found


def _host(text: str) -> str:
    """The address that the kernel writes as hexadecimal words of this machine's byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))


def _unix() -> dict[str, str]:
    """Unix sockets that listen, or that have a name, by inode; abstract names begin with @."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        is_bound_datagram = fields[4] == "0002" and len(fields) == 8
        if int(fields[3], 16) & _ACCEPTS or is_bound_datagram:
            found[fields[6]] = f"unix:{fields[7] if len(fields) == 8 else ''}"
    return found
