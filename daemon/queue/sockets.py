"""Connections outside redis-py's pool, and the sockets of connections.

A worker selects on a connection together with its horses; a node needs its address at the local
end of one. redis-py documents no way to either: tests/project/test_versions.py has what is used.
"""

from __future__ import annotations

import socket
from typing import Any

import redis


def connect(client: redis.Redis) -> Any:
    """Return a new connection with the settings of a client, outside its pool."""
    pool: Any = client.connection_pool
    connection = pool.make_connection()
    connection.connect()
    return connection


def socket_of(connection: Any) -> socket.socket | None:
    """Return the socket of a connection (None: it is not connected)."""
    found: socket.socket | None = connection._sock
    return found


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
