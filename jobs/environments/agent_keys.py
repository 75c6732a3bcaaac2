"""The keys of agents: each names a running job and one of its episodes, and is signed by the job.

A job that trains or evaluates an agent listens on a unix socket in the folder of the daemon's
sockets (0700), and has a file with its secret beside it. The gateway checks a key by that file,
before it reads the request, and passes the request on to the socket. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "warmd-agent-"
URL_FILE = "http.url"  # in the folder of the sockets: where the gateway listens
_KEY = re.compile(PREFIX + r"([0-9a-f]{8})-([0-9a-f]{16})-([0-9a-f]{32})", re.ASCII)
_SECRET_BYTES = 32


@dataclass(frozen=True)
class AgentKey:
    """A valid key. `text`: all of it; `socket`: of the job."""

    text: str
    job: str
    socket: Path


class Keys:
    """The keys of a rank of a job. A context manager; in it, the gateway accepts them."""

    def __init__(self, folder: Path, job_id: str, rank: int) -> None:
        """`folder`: of the sockets."""
        # Short: a path of a socket has at most 107 bytes.
        self._name = hashlib.sha256(f"{job_id} {rank}".encode()).hexdigest()[:8]
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._file = _secret_file(folder, self._name)
        self.socket = _socket(folder, self._name)

    def __enter__(self) -> Keys:
        """Raises OSError."""
        self._file.unlink(missing_ok=True)  # of an execution that was killed
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(self._secret)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a newer execution has its own file there
            if self._file.read_bytes() == self._secret:
                self._file.unlink()

    def new(self) -> str:
        """Return the key of another episode."""
        episode = secrets.token_hex(8)
        return f"{PREFIX}{self._name}-{episode}-{_signature(self._secret, episode)}"


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
