"""Machines on one Redis, each with a network, process ids, a host name and a clock of its own.

Every machine is a set of Linux namespaces and shares with the others only the folder of run
directories. Its cable to the hub, where Redis listens, can be cut and slow (cables.py), and its
clock is minutes off (libfaketime). Ending its first process is what a power cut does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import libfaketime
import psutil
from cables import HUB
from clusters import Cluster, kill_tree
from daemons import gone
from needs import needs
from waiting import wait_until

from warmd.daemon.supervise.redis_server import find_binary

PASSWORD = "of-the-hub"
CLOCKS = {"first": "+0", "second": "+7m", "third": "-11m"}  # how far each is off
_PORT = 6379
_TOOLS = ("ip", "nsenter", "setpriv", "unshare")
_FAKETIME = Path(libfaketime.__file__).parent / "vendor/libfaketime/src/libfaketime.so.1"


def with_clock(offset: str) -> dict[str, str]:
    """The environment of a process whose clock is off ("+7m"); durations stay right."""
    return {
        "LD_PRELOAD": str(_FAKETIME),
        "FAKETIME": offset,
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",  # the times of files are those of the file server
        "FAKETIME_DISABLE_SHM": "1",
        # By default it ends each timed wait of Python's threads for the GIL at once: they spin.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }


class Machines(Cluster):
    """A hub with a Redis that only the machines and, by a unix socket, this process reach."""

    clocks: Mapping[str, str] = CLOCKS

    def _set_up(self) -> None:
        self.url = f"unix://:{PASSWORD}@{self.folder / 'redis.sock'}?db=0"
        self._boots: dict[str, subprocess.Popen[bytes]] = {}
        self._cables = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("cables.py")), *self.clocks],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._cables.stdout is not None
        self._namespaces: dict[str, str] = json.loads(self._cables.stdout.readline())

    def _redis_command(self) -> list[str]:
        options = ["--bind", HUB, "--port", str(_PORT), "--requirepass", PASSWORD]
        options += ["--unixsocket", str(self.folder / "redis.sock")]
        return ["nsenter", f"--net={self._namespaces['hub']}", find_binary(None), *options]

    def name_of(self, name: str) -> str:
        # A home's key depends on the host name, and this process has another one.
        names = [node.name for node in self.client.nodes.all() if node.machine == name]
        return names[0] if names else name

    def cable(self, name: str, state: str, *, delay_s: float = 0.0, jitter_s: float = 0.0) -> None:
        """Change the cable of a machine: "up", "cut", "deaf", "reset" or "apart"."""
        assert self._cables.stdin is not None
        assert self._cables.stdout is not None
        self._cables.stdin.write(f"{name} {state} {delay_s} {jitter_s}\n".encode())
        self._cables.stdin.flush()
        assert self._cables.stdout.readline() == b"done\n"

    def boot(self, name: str, *options: str, **settings: str) -> None:
        """Start `warmd node` on a machine; `settings`: WARMD_… without the prefix."""
        environ = self._environ(name, f"redis://:{PASSWORD}@{HUB}:{_PORT}/0")
        environ |= {f"WARMD_{key.upper()}": text for key, text in settings.items()}
        self._boots[name] = self._start(
            name, environ, self.command(name, "-m", "warmd.cli", "node", *options)
        )

    def command(self, name: str, *arguments: str) -> list[str]:
        """The command that runs Python in a new set of namespaces on a machine."""
        clock = ("env", *(f"{key}={text}" for key, text in with_clock(self.clocks[name]).items()))
        return [
            *("setpriv", "--pdeathsig", "KILL"),
            *("nsenter", f"--net={self._namespaces[name]}"),
            *("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"),
            # The shell is the first process, which has to wait for orphans.
            *("bash", "-c", 'hostname "$0"; "$@"; exit $?', name, *clock, sys.executable),
            *arguments,
        ]

    def run(self, name: str, *arguments: str, timeout_s: float = 60.0) -> tuple[int, str]:
        """Run a command of warmd on a machine; return its exit code and what it printed."""
        environ = self._environ(name, f"redis://:{PASSWORD}@{HUB}:{_PORT}/0")
        done = subprocess.run(
            self.command(name, "-m", "warmd.cli", *arguments),
            env=environ,
            cwd="/",
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        return done.returncode, done.stdout

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs on a machine."""
        boot = self._boots.get(name)
        if boot is None or boot.poll() is not None:
            return []
        return [p for p in psutil.Process(boot.pid).children(recursive=True) if not gone(p)]

    def power_off(self, name: str) -> None:
        """Simulate a power failure of a machine: all its processes end at once."""
        every = self.processes(name)
        self._boots[name].kill()
        self._boots[name].wait()
        wait_until(lambda: all(map(gone, every)))

    def suspend(self, name: str) -> None:
        for process in self.processes(name):
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self, name: str) -> None:
        for process in self.processes(name):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def drain(self, name: str) -> None:
        """Send SIGTERM to a node, as an init system does; its jobs are saved and requeued."""

        def stop() -> bool:
            for process in self.processes(name)[1:]:  # after the shell
                with suppress(psutil.NoSuchProcess):
                    if "warmd.cli" in process.cmdline():
                        process.send_signal(signal.SIGTERM)
                        return True
            return self.has_ended(name)

        wait_until(stop)  # it may be about to start

    def has_ended(self, name: str) -> bool:
        return self._boots[name].poll() is not None

    def wait_off(self, name: str, *, timeout_s: float = 60.0) -> int:
        """Wait until a machine has ended; return the exit code of its node."""
        return self._boots[name].wait(timeout_s)

    def copy_logs(self, folder: Path) -> None:
        """Keep the logs and the events of the jobs, for debugging."""
        shutil.copytree(self.runs, folder / "runs", ignore=shutil.ignore_patterns("checkpoints"))
        for path in self.folder.glob("*.log"):
            shutil.copy(path, folder)

    def close(self) -> None:
        self.client.close()
        for process in self._processes:
            kill_tree(process)
        if self._redis is not None:
            self.kill_redis()
        self._cables.communicate()  # it ends with its stdin


def check_tools() -> None:
    """Skip the test, or fail it in CI, where namespaces cannot be made."""
    for tool in _TOOLS:
        needs(shutil.which(tool), tool)
    needs(os.geteuid() == 0, "root")
    needs(os.access("/dev/net/tun", os.R_OK | os.W_OK), "/dev/net/tun")
    done = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"])
    needs(done.returncode == 0, "network namespaces")


@contextmanager
def machines(model: Path) -> Iterator[Machines]:
    """Machines in a folder with a short path: socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        made = Machines(Path(folder), model)
        try:
            yield made
        finally:
            made.close()
