"""URLs of a Redis that Sentinel monitors.

    redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DB][?OPTIONS]

The hosts are the Sentinels (port 26379), SERVICE is their name for the primary. User, password and
OPTIONS are for the primary, as in a redis:// URL; `sentinel_username` and `sentinel_password` are
for the Sentinels. rediss+sentinel:// uses TLS for all connections.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

SCHEMES = ("redis+sentinel", "rediss+sentinel")

_PORT = 26379
_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d{1,5}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SentinelUrl:
    """The parts of such a URL."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    is_tls: bool
    primary: str  # a redis:// or rediss:// URL with a placeholder for the host
    username: str | None  # for the Sentinels
    password: str | None


def is_sentinel(url: str) -> bool:
    return url.partition("://")[0] in SCHEMES


def parse_sentinel(url: str) -> SentinelUrl:
    """Return the parts of a URL. Raises ValueError, without the URL: it may hold a password."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    found = [_HOST.fullmatch(host) for host in hosts.split(",")]
    service, _, database = parts.path.removeprefix("/").partition("/")
    is_right = _SERVICE.fullmatch(service) and re.fullmatch(r"\d{0,3}", database, re.ASCII)
    if parts.scheme not in SCHEMES or parts.fragment or not is_right:
        raise ValueError("not a Sentinel URL")
    sentinels = []
    for match in found:
        if match is None or not 0 < int(match[2] or _PORT) < 65536:
            raise ValueError("not a list of Sentinels")
        sentinels.append((match[1].strip("[]"), int(match[2] or _PORT)))
    options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    username, password = (options.pop(f"sentinel_{n}", None) for n in ("username", "password"))
    is_tls = parts.scheme.startswith("rediss")
    query = f"?{urlencode(options)}" if options else ""
    scheme = "rediss" if is_tls else "redis"
    return SentinelUrl(
        sentinels=tuple(sentinels),
        service=unquote(service),
        is_tls=is_tls,
        primary=f"{scheme}://{user}{at}primary/{database or 0}{query}",
        username=username,
        password=password,
    )
