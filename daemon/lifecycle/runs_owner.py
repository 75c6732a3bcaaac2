"""The folder of run directories that belongs to the jobs in an external Redis.

Any worker may take any job of its Redis. Daemons that share one must therefore share the folder
`runs` too, otherwise each would fail the other's jobs. The Redis is marked with the folder's random
id, which does not depend on the path by which a machine sees the folder.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import redis

from ...configs.config import DaemonConfig
from ...jobs.errors import Conflict
from ...jobs.files import records
from ...jobs.files.atomic import locked, write_atomic
from ..host.home import Home
from ..queue import key_prefix, keys
from ..store.bucket import Bucket, Changed
from ..store.copies import ID
from ..store.remote import RemoteRuns
from .places import Places


@dataclass(frozen=True)
class _Owner:
    id: str  # of the folder or the run store
    path: str


def prepare(places: Places, config: DaemonConfig) -> None:
    """Create the home, and claim a Redis that others may use, before a job is queued."""
    places.home.create()
    if config.redis_url is not None:
        claim(places.connection, places.home, places.remote)


def claim(connection: redis.Redis, home: Home, remote: RemoteRuns | None) -> None:
    """Mark a Redis with the run directories of a home, and with the prefix of RQ's keys.

    Raises Conflict if it has other marks. The home's folders must exist. `remote`: the run store
    that has them, if it is not a folder.
    """
    key_prefix.claim(connection)
    if remote is None:
        own = _Owner(_id_of(home.runs), str(home.runs.resolve()))
        advice = f"make {home.runs} a symbolic link to that folder"
    else:
        own = _Owner(_id_in(remote.bucket), remote.bucket.name)
        advice = "set `runs` to that"
    connection.set(keys.RUNS, orjson.dumps(own), nx=True)
    raw: Any = connection.get(keys.RUNS)
    noted = records.decode(raw, _Owner)
    if noted.id != own.id:
        raise Conflict(
            f"redis_url: the jobs there have their run directories in {noted.path}, on this or "
            f"another machine: {advice}, or use another "
            "database (redis://HOST:PORT/1); if the folder no longer exists, delete the key "
            f"{keys.RUNS}"
        )


def _id_in(bucket: Bucket) -> str:
    """Return the random id of a run store; the first caller creates it."""
    with suppress(Changed):
        bucket.put_if(ID, secrets.token_hex(16).encode(), None)
    found = bucket.get(ID)
    return "" if found is None else found.data.decode(errors="replace")


def _id_of(runs: Path) -> str:
    """Return the random id of a folder of run directories; the first caller creates it."""
    path = runs / ID
    if not path.exists():
        with locked(runs):
            if not path.exists():  # no other process created it meanwhile
                write_atomic(path, secrets.token_hex(16).encode())
    return path.read_text()
