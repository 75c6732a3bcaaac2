"""Readers of setting values: from text, YAML or an option to one checked type.

Every reader takes the field's name, for the message, and raises ConfigError.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([kmgt]i?b|b|%)?", re.ASCII | re.IGNORECASE)
_DURATION = re.compile(r"(?:\d{1,9}(?:\.\d{1,6})?[smhd])+", re.ASCII)
_DURATION_PART = re.compile(r"([\d.]+)([smhd])", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 10 * 365 * 86400
_LARGEST = 2**62  # JSON and Redis hold 64 bits


class ConfigError(ValueError):
    """A setting is wrong. The message is one line: [source: ]field: must be X, got Y."""

    exit_code = 2

    def __init__(self, field: str, problem: str, *, source: str = "") -> None:
        super().__init__(f"{source}: {field}: {problem}" if source else f"{field}: {problem}")
        self.field = field
        self.problem = problem


def shown(value: object) -> str:
    """Return a value as a message quotes it: on one line, cut when it is long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def wrong(field: str, takes: str, value: object) -> ConfigError:
    """Return the error for a value that the field does not accept."""
    return ConfigError(field, f"must be {takes}, got {shown(value)}")


def unknown_key(field: str, key: object, known: Iterable[str]) -> ConfigError:
    """Return the error of a key that nothing reads, with the name that was likely meant."""
    import difflib  # imported here: it costs 5 ms at every start

    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    path = f"{field}.{key}" if field else str(key)
    return ConfigError(path if path.isprintable() else repr(path), f"unknown key{hint}")


def plain_text(field: str, value: object, takes: str = "text") -> str:
    """Read text on one line that is not empty and can be written down as UTF-8."""
    if not isinstance(value, str) or not value or _CONTROL.search(value):
        raise wrong(field, takes, value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(field, takes, value) from None
    return value


def name(field: str, value: object) -> str:
    """Read the name of a model or worker; it may stand in file names and Redis keys."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise wrong(field, "1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit", value)


def choice(field: str, value: object, choices: tuple[str, ...]) -> str:
    """Read one word of several."""
    if isinstance(value, str) and value in choices:
        return value
    raise wrong(field, f"one of {', '.join(choices)}", value)


def host(field: str, value: object) -> str:
    """Read the name or address of an interface to listen on."""
    text = value if isinstance(value, str) else ""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}|[0-9A-Fa-f:.]{2,45}", text, re.ASCII):
        raise wrong(field, "a host name or an IP address", value)
    return text


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    import ipaddress  # imported here: it costs 2 ms at every start

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def integer(field: str, value: object, *, minimum: int, maximum: int) -> int:
    """Read a whole number within bounds (inclusive)."""
    number: object = value
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value, re.ASCII):
        number = int(value)
    if isinstance(number, int) and not isinstance(number, bool) and minimum <= number <= maximum:
        return number
    raise wrong(field, f"an integer from {minimum} to {maximum}", value)


def size_bytes(field: str, value: object, *, whole: Callable[[], int] | None = None) -> int:
    """Read a size like 8GB or 512 MiB, in bytes; with `whole`, also a share of it like 60%."""
    takes = "a size like 8GB or 512MiB" + (" or a share like 60%" if whole else "")
    match = _SIZE.fullmatch(str(value)) if _is_number_or_text(value) else None
    if match is None:
        raise wrong(field, takes, value)
    amount, unit = float(match[1]), (match[2] or "b").lower()
    if unit == "%":
        if whole is None or not 0 < amount <= 100:
            raise wrong(field, takes, value)
        return int(whole() * amount / 100)
    factor = (1024 if "i" in unit else 1000) ** " kmgt".index(unit[0] if len(unit) > 1 else " ")
    if not 1 <= amount * factor <= _LARGEST:
        raise wrong(field, takes, value)
    return int(amount * factor)


def duration_s(field: str, value: object) -> float:
    """Read a duration like 90s, 2m or 1h30m, in seconds; a bare number means seconds."""
    seconds = math.nan
    if isinstance(value, str) and _DURATION.fullmatch(value):
        seconds = sum(float(n) * _UNITS_S[unit] for n, unit in _DURATION_PART.findall(value))
    elif _is_number_or_text(value):
        seconds = _number(value)
    if not 0 <= seconds <= _LONGEST_S:
        raise wrong(field, "a duration like 90s, 2m or 1h30m", value)
    return seconds


def folder(field: str, value: object, base: Path) -> Path:
    """Read a path, relative to `base`, as an absolute one without links. It need not exist."""
    path = unresolved(field, value, base)
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ConfigError(field, f"must be a path, got {shown(str(path))}: {error}") from error


def unresolved(field: str, value: object, base: Path) -> Path:
    """Read a path, relative to `base`, as an absolute one that keeps its links.

    Its owner counts, and what it leads to may change (Kubernetes' secrets).
    """
    text = plain_text(field, str(value) if isinstance(value, Path) else value, "a path")
    try:
        return (base / Path(text).expanduser()).absolute()
    except (OSError, RuntimeError) as error:  # no such user, or no current folder
        raise ConfigError(field, f"must be a path, got {shown(text)}: {error}") from error


def redis_url(field: str, value: object) -> str:
    """Read a Redis URL. A message never shows its password."""
    from urllib.parse import urlsplit

    from .sentinel import is_sentinel, parse_sentinel

    text = value if isinstance(value, str) else ""
    try:
        if is_sentinel(plain_text(field, text)):
            parse_sentinel(text)
            return text
        parts = urlsplit(text)
        if parts.scheme == "unix":
            is_right = bool(parts.path) and not parts.hostname
        else:
            has_database = re.fullmatch(r"(/\d*)?", parts.path, re.ASCII) is not None
            is_right = bool(parts.hostname) and has_database and parts.port != 0
    except ValueError:  # also a port that is no number, or a broken IPv6 address
        raise _wrong_url(field, value) from None
    if not is_right or parts.scheme not in ("redis", "rediss", "unix") or parts.fragment:
        raise _wrong_url(field, value)
    return text


def _wrong_url(field: str, value: object) -> ConfigError:
    takes = (
        "redis://HOST:PORT/DB, rediss://… (TLS) or unix:///PATH, or redis+sentinel://HOST,…/SERVICE"
    )
    return wrong(field, takes, redacted_url(value) if isinstance(value, str) else value)


def redacted_url(url: str) -> str:
    """Return the URL with user, password and secret parameters as ***, however malformed it is."""
    head, separator, tail = url.rpartition("://")
    user = r"^[^/]*@" if head == "unix" else r"^.*@"
    tail = re.sub(user, "***@", tail, flags=re.DOTALL)
    tail = re.sub(r"((?:password|username)=)[^&]*", r"\1***", tail, flags=re.IGNORECASE)
    return head + separator + tail


def num_cores() -> int:
    """Return the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_number_or_text(value: object) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return math.nan
