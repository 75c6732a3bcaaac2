"""Whose run directories the jobs of a server have.

Any worker may take any job of its server: daemons that share one must share the folder `runs`, too,
or each would fail the other's jobs. A server of somebody else's is therefore marked with the
folder, and the folder with a name of its own that a link or a mount does not change.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import orjson
import redis

from ...jobs.errors import Conflict
from ...jobs.files.atomic import locked, write_atomic
from ..host.home import Home
from . import keys


def claim(connection: redis.Redis, home: Home) -> None:
    """Mark a server with the run directories of a home. Raises Conflict when it has another mark.

    The home's folders are there.
    """
    own = {"id": _id_of(home.runs), "path": str(home.runs.resolve())}
    connection.set(keys.RUNS, orjson.dumps(own), nx=True)
    raw: Any = connection.get(keys.RUNS)
    noted = orjson.loads(raw)
    if noted["id"] != own["id"]:
        raise Conflict(
            f"redis_url: the jobs there have their run directories in {noted['path']}, on this or "
            f"another machine: make {home.runs} a link to that folder, or use a database of its "
            f"own (redis://HOST:PORT/1); if the folder is gone for good, delete the key {keys.RUNS}"
        )


def _id_of(runs: Path) -> str:
    """Return the name of a folder of run directories, which its first user gives it."""
    path = runs / ".id"
    if not path.exists():
        with locked(runs):
            if not path.exists():  # nobody was quicker
                write_atomic(path, secrets.token_hex(16).encode())
    return path.read_text()
