"""The address at which the jobs of several nodes listen on this machine."""

from __future__ import annotations

import socket
from typing import Any

import redis

from .sockets import socket_of


def address_here(connection: redis.Redis, configured: str) -> str:
    """Return the address of this machine that a setting names, after a test listen there.

    `auto`: the one from which it reaches Redis. Raises OSError and RedisError.
    """
    address = configured
    if configured == "auto":
        pool: Any = connection.connection_pool
        used = pool.get_connection()
        try:
            end = socket_of(used)
            name = None if end is None else end.getsockname()
        finally:
            pool.release(used)
        if not isinstance(name, tuple):
            raise OSError("Redis is reached by a unix socket")
        address = name[0]
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    socket.create_server((address, 0), family=family).close()
    return address
