"""What every event of a job has, in events.jsonl and in the Redis stream."""

from __future__ import annotations

from typing import Any

import orjson

# The types that end an execution, for which `tail` waits.
TERMINAL = ("finished", "failed", "stopped")

# The fields of every event, with their types; a flipped bit may have renamed one.
_FIELDS: dict[str, tuple[type, ...]] = {
    "seq": (int,),
    "execution": (int,),
    "time": (int, float),
    "type": (str,),
    "step": (int, type(None)),
}


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line, or None if the line is incomplete or not an event."""
    if not line.endswith(b"\n"):
        return None
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(event, dict) or not event.keys() >= _FIELDS.keys():
        return None
    is_event = all(type(event[name]) in types for name, types in _FIELDS.items())
    # The step of an event of this type counts as well.
    return event if is_event and (event["type"] != "step" or event["step"] is not None) else None
