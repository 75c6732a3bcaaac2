"""The keys of agents: each names a running job and one of its episodes, and is signed by the job.

The folder of the daemon's sockets (0700) has two files for each rank of such a job: the unix socket
at which the job listens (`endpoint`), and the secret that signs its keys. The gateway verifies the
signature before it reads a request, and passes the request to the socket. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "warmd-agent-"
URL_FILE = "http.url"  # in the folder of the sockets: where the gateway listens
_KEY = re.compile(PREFIX + r"([0-9a-f]{8})-([0-9a-f]{16})-([0-9a-f]{32})", re.ASCII)
_SECRET_BYTES = 32
_BOUND_S = 60.0  # much longer than from bind to listen


@dataclass(frozen=True)
class AgentKey:
    """A valid key. `text`: all of it; `socket`: of the job."""

    text: str
    job: str
    socket: Path


class Keys:
    """The keys of a rank of a job: valid from `publish` to `revoke`. `socket`: where it listens."""

    def __init__(self, folder: Path, job_id: str, rank: int) -> None:
        """`folder`: of the sockets."""
        # Short: a path of a socket has at most 107 bytes.
        self._name = hashlib.sha256(f"{job_id} {rank}".encode()).hexdigest()[:8]
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._file = _secret_file(folder, self._name)
        self.socket = _socket(folder, self._name)

    def publish(self) -> None:
        """Write the secret for the gateway. Raises OSError."""
        self._file.unlink(missing_ok=True)  # of an execution that was killed
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(self._secret)

    def revoke(self) -> None:
        """Remove the secret."""
        with suppress(OSError):  # a newer execution has its own file there
            if self._file.read_bytes() == self._secret:
                self._file.unlink()

    def new(self) -> str:
        """Return the key of another episode."""
        episode = secrets.token_hex(8)
        return f"{PREFIX}{self._name}-{episode}-{_signature(self._secret, episode)}"


def remove_dead(folder: Path) -> None:
    """Remove the files of jobs that were killed: nobody listens at their sockets.

    A socket that was bound a moment ago may not listen yet.
    """
    for path in folder.glob("a-*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            if time.time() - path.stat().st_mtime < _BOUND_S:
                continue
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.with_suffix(".key").unlink(missing_ok=True)
                path.unlink()


def checked(folder: Path, text: str) -> AgentKey | None:
    """Return a key that a running job has given; None for any other text. `folder`: of sockets."""
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    name, episode, signature = match.groups()
    try:
        secret = _secret_file(folder, name).read_bytes()
    except OSError:
        return None
    is_valid = len(secret) == _SECRET_BYTES and hmac.compare_digest(
        signature, _signature(secret, episode)
    )
    return AgentKey(text, name, _socket(folder, name)) if is_valid else None


def _signature(secret: bytes, episode: str) -> str:
    return hmac.new(secret, episode.encode(), hashlib.sha256).hexdigest()[:32]


def _secret_file(folder: Path, name: str) -> Path:
    return folder / f"a-{name}.key"


def _socket(folder: Path, name: str) -> Path:
    return folder / f"a-{name}.sock"
