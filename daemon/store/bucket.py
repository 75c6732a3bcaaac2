"""The objects of a run store: reading, writing and conditional writing, by obstore.

Every problem with the service becomes StoreUnavailable, with one line that holds no credentials.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ...configs.run_store import parse_location
from ...jobs.errors import NotFound, SpecError, Unavailable

PART_BYTES = 8 << 20  # of a large object; S3 takes 10,000 parts: objects of up to 80 GB
_RETRIES = 2  # of one request; callers wait longer
_TIMEOUT_S = 120.0  # of a request; the largest one transfers a part
_PATIENCE_S = 20.0  # how long a person waits for a service that sends nothing
_MOST_PROBLEM = 300  # characters
_CHECKSUM = "xxh3-128"  # the header x-amz-meta-xxh3-128 of an object
_HTTP_STATUS = re.compile(r"non-2xx status code: (.{3,60}?)(?::|$)")
_NO_BUCKET = "NoSuchBucket"
_DENIED = re.compile(r"40[13]\b")
_SERVICE_CODE = re.compile(r"<Code>(\w{1,60})</Code>")


class StoreUnavailable(Unavailable):
    """The service cannot be reached, or refuses a request."""


class StoreDenied(StoreUnavailable):
    """The service answers, but not with these keys, or not for this bucket."""


class Changed(Exception):
    """A conditional write failed: another process has written the object."""


@dataclass(frozen=True)
class Content:
    """A small object as it was read."""

    data: bytes
    tag: str  # for a conditional write
    checksum: str | None  # as it was written with; None: without one, or by an earlier warmd


class Bucket:
    """The objects below the URL's prefix."""

    def __init__(self, url: str, *, is_for_person: bool = False) -> None:
        """`is_for_person`: a person waits for each request and reads its error.

        Raises SpecError without the library.
        """
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError:
            raise SpecError("runs", "needs obstore for s3://…: pip install 'warmd[s3]'") from None
        location = parse_location(url)
        self.name = location.name
        self._library: Any = obstore
        options: dict[str, Any] = {}
        if location.endpoint is not None:
            options["endpoint"] = location.endpoint
        if location.region is not None:
            options["region"] = location.region
        endpoint = location.endpoint or os.environ.get("AWS_ENDPOINT_URL", "")
        patience = timedelta(seconds=_PATIENCE_S if is_for_person else _TIMEOUT_S)
        with self._translated():
            self._store: Any = S3Store(
                location.bucket,
                prefix=location.prefix or None,
                client_options={
                    "allow_http": endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=5),
                    "read_timeout": patience,
                    "timeout": timedelta(seconds=_TIMEOUT_S),
                },
                retry_config={"max_retries": _RETRIES, "retry_timeout": patience},
                **options,
            )

    def get(self, key: str) -> Content | None:
        """Return a small object; None if there is none."""
        with self._translated():
            try:
                found = self._library.get(self._store, key)
                checksum = found.attributes.get(_CHECKSUM)
                return Content(bytes(found.bytes()), str(found.meta["e_tag"]), checksum)
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):
                    raise
                return None

    def read(self, key: str, size: int) -> Iterator[bytes]:
        """Yield an object of this size in parts, a request for each. Raises NotFound."""
        for start in range(0, size, PART_BYTES):
            end = min(start + PART_BYTES, size)
            with self._translated():
                try:
                    part = self._library.get_range(self._store, key, start=start, end=end)
                except FileNotFoundError:
                    raise NotFound(f"run store: {key} is missing in {self.name}") from None
            yield bytes(part)

    def put(self, key: str, data: bytes, *, checksum: str | None = None) -> None:
        """Write a small object, with the checksum of its data if the index does not have it."""
        attributes = None if checksum is None else {_CHECKSUM: checksum}
        with self._translated():
            self._library.put(self._store, key, data, attributes=attributes, use_multipart=False)

    def put_blocks(self, key: str, blocks: Iterable[bytes]) -> None:
        """Write a large object, in parts; it becomes visible as a whole or not at all."""
        with self._translated():
            self._library.put(self._store, key, blocks, chunk_size=PART_BYTES, max_concurrency=2)

    def put_if(self, key: str, data: bytes, tag: str | None) -> None:
        """Replace an object that still has this tag; None: create it. Raises Changed."""
        mode = "create" if tag is None else {"e_tag": tag}
        errors = self._library.exceptions
        with self._translated():
            try:
                self._library.put(self._store, key, data, mode=mode, use_multipart=False)
            except (errors.AlreadyExistsError, errors.PreconditionError):
                raise Changed(key) from None
            except FileNotFoundError as error:  # S3's response if the object to replace is missing
                if _NO_BUCKET in str(error):
                    raise
                raise Changed(key) from None

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the keys below a prefix, sorted, each with its bytes."""
        with self._translated():
            found = self._library.list(self._store, prefix)
            return dict(sorted((meta["path"], meta["size"]) for page in found for meta in page))

    def folders(self) -> list[str]:
        """Return the first parts of all keys, sorted."""
        with self._translated():
            found = self._library.list_with_delimiter(self._store)
            return sorted(name.strip("/") for name in found["common_prefixes"])

    def delete(self, keys: list[str]) -> None:
        """Delete objects; missing ones are ignored."""
        if keys:
            with self._translated():
                self._library.delete(self._store, keys)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (self._library.exceptions.BaseError, FileNotFoundError) as error:
            problem = f"run store {self.name}: {_problem(error)}"
            if _DENIED.match(_problem(error)):
                advice = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                raise StoreDenied(f"{problem}: {advice}") from None
            if _NO_BUCKET in problem:
                raise StoreDenied(problem) from None
            raise StoreUnavailable(problem) from None


def _problem(error: Exception) -> str:
    """The reason in a message of obstore, which adds URLs, counts and a dump of the error."""
    text = str(error)
    status, code = _HTTP_STATUS.search(text), _SERVICE_CODE.search(text)
    if status is not None:
        return f"{status[1]} ({code[1]})" if code is not None else status[1]
    plain = " ".join(text.partition("Debug source")[0].split())
    return plain[-_MOST_PROBLEM:] or type(error).__name__
