"""Redis clients for every form of URL, for threads and for asyncio."""

from __future__ import annotations

from typing import Any, cast

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.connection import parse_url

from ...configs.sentinel import SentinelUrl, is_sentinel, parse_sentinel


def client(url: str, **options: Any) -> redis.Redis:
    """Return a client that connects at its first command; with Sentinel, to the primary."""
    if not is_sentinel(url):
        return redis.Redis.from_url(url, **options)
    parsed = parse_sentinel(url)
    primary, sentinels = _options(parsed, options)
    manager: Any = redis.sentinel.Sentinel(parsed.sentinels, sentinel_kwargs=sentinels, **primary)
    found: redis.Redis = manager.master_for(parsed.service, redis_class=_OfSentinel)
    return found


def async_client(url: str, *, max_connections: int, **options: Any) -> redis.asyncio.Redis:
    """The same for asyncio. Commands beyond `max_connections` wait for a connection."""
    if not is_sentinel(url):
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, max_connections=max_connections, **options
        )
        return redis.asyncio.Redis.from_pool(pool)
    parsed = parse_sentinel(url)
    primary, sentinels = _options(parsed, options)
    manager: Any = redis.asyncio.sentinel.Sentinel(
        parsed.sentinels, sentinel_kwargs=sentinels, **primary
    )
    # redis-py has no blocking pool for Sentinel: its pool grows as needed.
    found: redis.asyncio.Redis = manager.master_for(parsed.service, redis_class=_AsyncOfSentinel)
    return found


class _OfSentinel(redis.Redis):
    """A client of the primary that closes the connections to the Sentinels with its own."""

    def close(self) -> None:
        super().close()
        for sentinel in cast(Any, self.connection_pool).sentinel_manager.sentinels:
            sentinel.close()


class _AsyncOfSentinel(redis.asyncio.Redis):
    """The same for asyncio."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for sentinel in cast(Any, self.connection_pool).sentinel_manager.sentinels:
            await sentinel.aclose()


def _options(parsed: SentinelUrl, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options for connections to the primary, and for those to the Sentinels."""
    primary = {**parse_url(parsed.primary), **options}
    del primary["host"]
    primary.pop("connection_class", None)
    shared = {
        name: value for name, value in primary.items() if name.startswith(("socket_", "ssl_"))
    }
    sentinels = {**shared, "username": parsed.username, "password": parsed.password}
    if parsed.is_tls:
        primary["ssl"] = sentinels["ssl"] = True
    return primary, sentinels
