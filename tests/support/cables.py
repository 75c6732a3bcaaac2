"""Network cables between machines and a hub, each a network namespace; they can be cut and slow.

    python cables.py NAME...      # as root; prints one JSON line: {"hub": "/proc/…", NAME: …}

Every line of stdin, `NAME STATE [SECONDS [JITTER]]`, changes one cable, and is answered by a line:

up        packets pass, SECONDS ± JITTER later, in their order
cut       packets are lost in both directions, without a notice: connections hang
deaf      only packets to the machine are lost: its commands are executed and never answered
reset     packets of the machine are answered by a TCP reset, as a firewall does
apart     packets to and from other machines are lost, those to and from the hub pass

A cable is a pair of TUN devices whose packets this process passes on, because kernels for
containers and small virtual machines have no `netem`. Everything ends with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HUB = "10.77.0.1"  # the address of the hub in all its networks

_HUB = bytes(map(int, HUB.split(".")))
_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUN, _NO_PACKET_INFORMATION = 0x0001, 0x1000
_PACKET_BYTES = 65536
_MOST_LATE = 10_000  # packets on one way; more are lost, as in a full router
_TCP = 6
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Cable:
    """The cable of one machine."""

    outside: int  # descriptors of the TUN devices: of the machine,
    inside: int  # and of the hub
    state: str = "up"
    delay_s: float = 0.0
    jitter_s: float = 0.0
    due: dict[int, float] = field(default_factory=dict)  # of the last packet to each device


class Cables:
    """All cables of one hub."""

    def __init__(self, names: list[str]) -> None:
        hub = _new_namespace()
        self.namespaces = {"hub": hub}
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # of the hub, where this process is
        self._selector = selectors.DefaultSelector()
        self._cables: dict[str, Cable] = {}
        self._late: list[tuple[float, int, int, bytes]] = []  # heap: due, number, device, packet
        self._numbers = itertools.count()
        for number, name in enumerate(names, 1):
            _enter(hub)
            inside = _device(f"to{number}")
            _ip("address", "add", HUB, "peer", f"10.77.0.{number + 1}", "dev", f"to{number}")
            self.namespaces[name] = _new_namespace()
            outside = _device("eth0")
            _ip("address", "add", f"10.77.0.{number + 1}", "peer", HUB, "dev", "eth0")
            _ip("route", "add", "10.77.0.0/24", "dev", "eth0")  # other machines, by the hub
            cable = self._cables[name] = Cable(outside, inside)
            self._selector.register(outside, selectors.EVENT_READ, (cable, True))
            self._selector.register(inside, selectors.EVENT_READ, (cable, False))

    def run(self) -> None:
        """Pass packets on and obey stdin until it ends."""
        self._selector.register(0, selectors.EVENT_READ, None)
        commands = b""
        while True:
            wait_s = max(self._late[0][0] - time.monotonic(), 0.0) if self._late else None
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    data = os.read(0, 65536)
                    if not data:
                        return
                    *lines, commands = (commands + data).split(b"\n")
                    for line in lines:
                        self._obey(*line.decode().split())
                else:
                    self._pass_on(*key.data)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(self._late)
                _write(device, packet)

    def _obey(self, name: str, state: str, delay_s: str = "0", jitter_s: str = "0") -> None:
        cable = self._cables[name]
        cable.state, cable.delay_s, cable.jitter_s = state, float(delay_s), float(jitter_s)
        if state == "cut":  # also what is on its way
            ends = (cable.inside, cable.outside)
            self._late = [item for item in self._late if item[2] not in ends]
            heapq.heapify(self._late)
        os.write(1, b"done\n")

    def _pass_on(self, cable: Cable, is_outward: bool) -> None:
        source, target = cable.outside, cable.inside
        if not is_outward:
            source, target = target, source
        packet = os.read(source, _PACKET_BYTES)
        if cable.state == "reset" and is_outward:
            answer = _reset_for(packet)
            if answer is not None:
                _write(source, answer)
        if cable.state in ("cut", "reset") or (cable.state == "deaf" and not is_outward):
            return
        if cable.state == "apart" and _HUB not in (packet[12:16], packet[16:20]):
            return
        if cable.delay_s == 0 and not self._late:
            _write(target, packet)
        elif len(self._late) < _MOST_LATE:
            later = random.uniform(-cable.jitter_s, cable.jitter_s)
            due = time.monotonic() + max(cable.delay_s + later, 0.0)
            cable.due[target] = due = max(due, cable.due.get(target, 0.0))
            heapq.heappush(self._late, (due, next(self._numbers), target, packet))


def _new_namespace() -> str:
    """Enter a new network namespace; return its path for other processes."""
    _check(_libc.unshare(_NEWNET))
    _ip("link", "set", "lo", "up")
    # Open as long as this process lives, and the namespace with it.
    return f"/proc/{os.getpid()}/fd/{os.open('/proc/self/ns/net', os.O_RDONLY)}"


def _enter(namespace: str) -> None:
    descriptor = int(Path(namespace).name)
    _check(_libc.setns(descriptor, _NEWNET))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _device(name: str) -> int:
    """Create a TUN device in this namespace; return its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _TUN | _NO_PACKET_INFORMATION)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    _ip("link", "set", name, "up")
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _write(device: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # full, or down: the packet is lost
        os.write(device, packet)


def _reset_for(packet: bytes) -> bytes | None:
    """Return the packet that resets the connection of a TCP packet; None for other packets."""
    length = (packet[0] & 15) * 4
    if packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    source, target = packet[12:16], packet[16:20]
    ports = struct.unpack_from("!HH", packet, length)
    sequence, acknowledged, offset, flags = struct.unpack_from("!IIBB", packet, length + 4)
    if flags & _RST:
        return None
    carried = len(packet) - length - (offset >> 4) * 4 + bool(flags & _SYN) + bool(flags & _FIN)
    own = acknowledged if flags & _ACK else 0
    fields = (ports[1], ports[0], own, (sequence + carried) & 0xFFFFFFFF, 5 << 4, _RST | _ACK)
    tcp = bytearray(struct.pack("!HHIIBBHHH", *fields, 0, 0, 0))
    tcp[16:18] = _checksum(target + source + struct.pack("!BBH", 0, _TCP, len(tcp)) + tcp)
    ip = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, _TCP, 0) + target + source)
    ip[10:12] = _checksum(bytes(ip))
    return bytes(ip + tcp)


def _checksum(data: bytes) -> bytes:
    """The Internet checksum (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


def main() -> None:
    cables = Cables(sys.argv[1:])
    sys.stdout.write(json.dumps(cables.namespaces) + "\n")
    sys.stdout.flush()
    cables.run()


if __name__ == "__main__":
    main()
