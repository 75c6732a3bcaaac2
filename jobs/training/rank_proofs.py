"""How the ranks of a job on several nodes recognize each other: by the secret of the execution.

gloo and its store accept whoever connects. A rank therefore signs the address that it leaves in the
store, so that ranks connect to none that a stranger has left; and both ends of each connection
prove that they know the secret before anything else goes over it. The secret itself is never sent.
Whoever can change the packets between two nodes can still change what follows. Imports torch.
"""

from __future__ import annotations

import hmac
import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ..errors import JobFailed

_BYTES = 32  # of a proof (SHA-256), and of the random number that it is for


def proof(secret: str, *parts: str | int | bytes) -> bytes:
    """Return the HMAC of the parts, which only those who know the secret can compute."""
    return hmac.digest(secret.encode(), repr(parts).encode(), "sha256")


class SignedStore(Store):
    """A store whose values are signed; for gloo, which uses no other methods of a store."""

    def __init__(self, store: Any, secret: str) -> None:
        super().__init__()
        self._store = store
        self._secret = secret

    def set(self, key: str, value: Any) -> None:
        """`value`: bytes."""
        self._store.set(key, proof(self._secret, "address", key, value) + value)

    def get(self, key: str) -> bytes:
        """Raises JobFailed for a value that another program has written."""
        content = self._store.get(key)
        found, value = content[:_BYTES], content[_BYTES:]
        if not hmac.compare_digest(found, proof(self._secret, "address", key, value)):
            raise _stranger(f"the address of a rank ({key}) is not signed with")
        return bytes(value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, *(() if timeout is None else (timeout,)))


def prove(group: Any, rank: int, size: int, secret: str, *, limit_s: float) -> None:
    """Prove to each other rank of a gloo group who this is, and require the same of it.

    Raises JobFailed for a connection of another program, TimeoutError for one over which no proof
    has come within `limit_s` seconds, and RuntimeError for one that breaks. Another program cannot
    be replaced by the rank: gloo keeps the first connection for a pair of ranks, and drops others.
    """
    end = time.monotonic() + limit_s
    own = {other: os.urandom(_BYTES) for other in range(size) if other != rank}
    try:
        theirs = _swap(group, own, end)
        proofs = _swap(
            group,
            {other: proof(secret, "rank", rank, other, own[other], theirs[other]) for other in own},
            end,
        )
    except RuntimeError as error:
        if time.monotonic() < end:
            raise
        raise TimeoutError(
            f"a rank has not proved within {limit_s:g} s that it knows the secret of this job: it "
            "is suspended, or another program has connected in its place (gang_address must be in "
            "a private network)"
        ) from error
    for other, found in proofs.items():
        expected = proof(secret, "rank", other, rank, theirs[other], own[other])
        if not hmac.compare_digest(found, expected):
            raise _stranger(f"rank {other} of {size} does not know")


def _swap(group: Any, contents: Mapping[int, bytes], end: float) -> dict[int, bytes]:
    """Send bytes to each other rank; return those that came from it.

    Raises RuntimeError, also at the time `end` of the monotonic clock.
    """
    sent = {
        other: torch.tensor(list(content), dtype=torch.uint8) for other, content in contents.items()
    }
    received = {other: torch.zeros(_BYTES, dtype=torch.uint8) for other in contents}
    works = [group.send([content], other, 0) for other, content in sent.items()]
    works += [group.recv([content], other, 0) for other, content in received.items()]
    for work in works:
        # Rounded up to a millisecond, as the limit is cut to; 0 is no limit.
        work.wait(timedelta(milliseconds=max(math.ceil((end - time.monotonic()) * 1000), 1)))
    return {other: bytes(content.tolist()) for other, content in received.items()}


def _stranger(what: str) -> JobFailed:
    return JobFailed(
        f"nodes: {what} the secret of this job: another program has connected in its place "
        "(gang_address must be in a private network)"
    )
