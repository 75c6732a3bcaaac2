"""A command line, and all that its process inherits from the shell, on its way to the server.

Imports the standard library only: the client loads nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

SOCKET = "commands.sock"  # in the folder `sockets` of a home

# A fork of the server sends its process id, eight bytes, waits for GO and replies with two bytes. A
# client that has given up sends no GO, so that no command runs twice.
GO = b"g"
DONE = b"d"  # followed by the exit code
COLD = b"c\0"  # the client has to run the command itself; nothing was written yet

_NAMESPACES = ("mnt", "net", "pid", "user")


class Request:
    """A command and the state of the process that a shell has started for it.

    No dataclass, whose import would cost a third of what the client does.
    """

    def __init__(
        self,
        around: str,
        folder: str,
        umask: int,
        streams: list[str],
        arguments: list[str],
        environment: list[str],
    ) -> None:
        """`around`: see `surroundings`. `streams`: encoding and error handler of each of three.

        `environment`: NAME=VALUE.
        """
        self.around = around
        self.folder = folder
        self.umask = umask
        self.streams = streams
        self.arguments = arguments
        self.environment = environment

    @classmethod
    def of_this_process(cls, arguments: Sequence[str]) -> Request:
        """Describe this process. Raises OSError if its folder was removed."""
        umask = os.umask(0o077)
        os.umask(umask)
        streams = (sys.stdin, sys.stdout, sys.stderr)
        return cls(
            surroundings(),
            os.getcwd(),
            umask,
            [text for one in streams for text in (one.encoding, one.errors or "strict")],
            list(arguments),
            [f"{name}={value}" for name, value in os.environ.items()],
        )

    def encode(self) -> bytes:
        """Return the request as bytes: their number after the first eight, and the request itself.

        Neither arguments nor variables nor paths can have a NUL, which separates them.
        """
        parts = [self.around, self.folder, str(self.umask), *self.streams]
        parts += [str(len(self.arguments)), *self.arguments, *self.environment]
        body = os.fsencode("\0".join(parts))
        return len(body).to_bytes(8, "big") + body

    @classmethod
    def decode(cls, body: bytes) -> Request:
        """Return the request of `encode`, without its first eight bytes. Raises ValueError."""
        around, folder, umask, *rest = os.fsdecode(body).split("\0")
        streams, count, words = rest[:6], int(rest[6]), rest[7:]
        return cls(around, folder, int(umask), streams, words[:count], words[count:])


def surroundings() -> str:
    """Describe what a fork of another process cannot take over.

    Python and its options, where modules are found, the user and the namespaces of containers:
    there, the same paths and addresses may lead elsewhere.
    """
    root = os.stat("/")
    parts: list[object] = [sys.version, sys.prefix, sys.flags, sys.warnoptions, sys.path[1:]]
    parts += [sys.getfilesystemencoding(), __file__, os.geteuid(), os.getegid(), os.getgroups()]
    parts += [root.st_dev, root.st_ino]
    if sys.platform == "linux":
        parts += [os.stat(f"/proc/self/ns/{name}").st_ino for name in _NAMESPACES]
    return repr(parts)
