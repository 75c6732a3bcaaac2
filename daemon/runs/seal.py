"""JSON files with a digest of their content, which detects flipped bits."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
import xxhash

from ...jobs.files import records

_SEAL = "digest"  # the field of a document with the digest of the others
_SEAL_PREFIX = "xxh3:"

T = TypeVar("T")

DAMAGED = "damaged, or changed by hand: then remove its digest"


def sealed(document: Any) -> bytes:
    """Return a dict or a dataclass as JSON with a digest of all its fields."""
    # Read back first: a NaN is written as null, a number of numpy as a plain one.
    plain = orjson.loads(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))
    document = {**plain, _SEAL: _digest(plain)}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def unsealed(content: bytes, record: type[T]) -> T:
    """Return what was sealed. Raises ValueError, also if it does not match its digest."""
    document = records.decode(content, dict[str, Any])
    if not is_whole(document):
        raise ValueError(DAMAGED)
    return records.convert(document, record)


def is_whole(document: dict[str, Any]) -> bool:
    """Whether a document matches its digest, which is removed from it.

    Earlier versions wrote none.
    """
    found = document.pop(_SEAL, None)
    if found is None:  # or the name of the field is damaged
        texts = (value for value in document.values() if isinstance(value, str))
        return not any(text.startswith(_SEAL_PREFIX) for text in texts)
    return bool(found == _digest(document))


def _digest(document: dict[str, Any]) -> str:
    return f"{_SEAL_PREFIX}{xxhash.xxh3_64_hexdigest(orjson.dumps(document))}"
