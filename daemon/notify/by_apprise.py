"""Delivery by Apprise: `python -m warmd.daemon.notify.by_apprise`, the address and text on stdin.

A process of its own, because a service of Apprise may take any time and must end with its limit;
the address comes by stdin, because other users can read command lines.
"""

from __future__ import annotations

import sys

import orjson

NOT_INSTALLED, UNKNOWN, REFUSED = 3, 4, 5  # exit codes


def main() -> int:
    """Send one notification; return the exit code."""
    try:
        from apprise import Apprise
    except ImportError:
        return NOT_INSTALLED
    request = orjson.loads(sys.stdin.buffer.read())
    service = Apprise()
    if not service.add(request["address"]):
        return UNKNOWN
    return 0 if service.notify(body=request["text"], title="") else REFUSED


if __name__ == "__main__":
    sys.exit(main())
