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
