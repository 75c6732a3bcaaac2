"""The setting `runs`: a folder, or a bucket of an S3 service.

s3://BUCKET/PREFIX?endpoint=URL&region=NAME. Keys and tokens come from the environment only, so that
no configuration file, log or run directory ever holds one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from .values import ConfigError, folder, plain_text

SCHEME = "s3://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|[sS]3:")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_TAKES = "a folder, or s3://BUCKET/PREFIX with ?endpoint=URL and &region=NAME as needed"


@dataclass(frozen=True)
class Location:
    """Where in an S3 service run directories are kept."""

    bucket: str
    prefix: str  # without slashes at its ends; may be empty
    endpoint: str | None  # None: AWS, or AWS_ENDPOINT_URL
    region: str | None  # None: AWS_REGION

    @property
    def name(self) -> str:
        """The URL without the options, for messages."""
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")


def read_runs(field: str, value: object, base: Path) -> str:
    """Read the setting: an absolute path, or the URL of a bucket. A message never shows a key."""
    if not isinstance(value, str) or not _SCHEME.match(value):
        return str(folder(field, value, base))
    if not value.startswith(SCHEME):  # as a path: a folder `gs:` in this one
        raise ConfigError(field, f"must be {_TAKES}, got another kind of URL")
    plain_text(field, value, _TAKES)
    try:
        parse_location(value)
    except ValueError as error:
        raise ConfigError(field, f"must be {_TAKES}: {error}") from None
    return value


def is_bucket(runs: str | None) -> bool:
    """Whether run directories are kept in a bucket."""
    return runs is not None and runs.startswith(SCHEME)


def parse_location(url: str) -> Location:
    """Return the parts of an s3:// URL. Raises ValueError, which names the wrong part."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    given = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(given)
    unknown = options.keys() - {"endpoint", "region"}
    if "@" in parts.netloc or unknown or parts.fragment:
        raise ValueError("keys and tokens belong into the variables AWS_…, not into the URL")
    if len(options) < len(given):
        raise ValueError("endpoint and region must be given once")
    if not _BUCKET.fullmatch(parts.netloc):
        raise ValueError("the bucket must be 3 to 63 of a-z 0-9 . -")
    if prefix and (not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/")):
        raise ValueError("the prefix must be names of A-Z a-z 0-9 . _ - separated by /")
    endpoint, region = options.get("endpoint"), options.get("region")
    if endpoint is not None:
        at = urlsplit(endpoint)
        _ = at.port  # raises ValueError if it is not a port
        if at.scheme not in ("http", "https") or not at.hostname or "@" in at.netloc or at.query:
            raise ValueError("endpoint must be http://HOST:PORT or https://HOST")
    if region is not None and not _REGION.fullmatch(region):
        raise ValueError("region must be a name such as eu-central-1")
    return Location(parts.netloc, prefix, endpoint, region)
