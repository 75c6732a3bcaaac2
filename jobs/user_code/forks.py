"""Ends child processes, forked by user code, that return into the job."""

from __future__ import annotations

import os

_EXIT_CODE = 70  # sysexits' EX_SOFTWARE: a fault in the job's code


def end_if_forked(owner: int, where: str) -> None:
    """End this process at once, without cleaning up, unless `owner` is its id.

    The child would write the events and checkpoints of its parent. The stack is not unwound:
    the resources on it belong to the parent.
    """
    if os.getpid() == owner:
        return
    message = (
        f"warmd: process {os.getpid()} was forked by the job's code and came {where}: it ends "
        "here. Only the process that runs the job may; end a forked one with os._exit().\n"
    )
    os.write(2, message.encode())
    os._exit(_EXIT_CODE)
