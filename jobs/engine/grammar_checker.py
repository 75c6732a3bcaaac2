"""Checks llguidance grammars, in a process with limits (user_code/limited_processes.py).

Compiling a JSON Schema of a few hundred bytes can take hours or all memory. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from ..user_code.child_server import serve_within_limits

_BYTES_TRIED = 100


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar and decode its first bytes; return the error as `unsupported`, or nothing.

    A grammar that compiles may still accept no text, or exceed the parser's limits in the first
    bytes of every text.
    """
    matcher = LLMatcher(LLTokenizer("byte"), request["grammar"])
    for _ in range(_BYTES_TRIED):
        allowed = matcher.compute_bitmask()
        if matcher.is_error():
            return {"unsupported": matcher.get_error()}
        if matcher.is_stopped() or (byte := _first(allowed)) is None:
            break
        matcher.consume_token(byte)
    return {}


def _first(allowed: bytes) -> int | None:
    """Return the first byte that is allowed; None if the text can only end."""
    bits = int.from_bytes(allowed, "little") & (1 << 256) - 1
    return (bits & -bits).bit_length() - 1 if bits else None


if __name__ == "__main__":
    serve_within_limits(_answer)
