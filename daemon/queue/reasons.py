"""Why Redis cannot be used, in words that name the cause and the next step.

Servers and redis-py report what they noticed: a password that is missing as "HELLO must be called
…", a port without TLS as a timeout.
"""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, urlsplit

import redis

from ...configs.config import redacted_url

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def reason(error: redis.RedisError, url: str) -> str:
    """Describe why a command to the Redis at `url` failed, in one line without secrets."""
    where = redacted_url(url)
    if isinstance(error, redis.exceptions.NoPermissionError):
        return f"Redis at {where} refuses its user: {error}; docs/operations.md has its rights"
    if isinstance(error, redis.AuthenticationError):
        if any(word in str(error) for word in ("HELLO", "NOAUTH", "Authentication required")):
            return f"Redis at {where} needs a password: redis://:PASSWORD@HOST:PORT/DB"
        return f"Redis at {where} refuses the user or the password of the URL"
    if urlsplit(url).scheme.startswith("rediss"):
        for name, path in parse_qsl(urlsplit(url).query):
            if name in _FILES and not os.access(path, os.R_OK):
                return f"redis_url: {name} must be a file that can be read, got {path}"
    if isinstance(error, redis.TimeoutError):
        text = f"Redis at {where} does not answer: {error}"
        if urlsplit(url).scheme.startswith("rediss") and "connecting" in str(error):
            text += "; if that port has no TLS, use redis:// instead of rediss://"
        return text
    text = f"no Redis at {where}: {error}"
    if urlsplit(url).scheme == "redis" and isinstance(error.__cause__, ConnectionResetError):
        text += "; if that port has TLS, use rediss:// instead of redis://"
    return text
