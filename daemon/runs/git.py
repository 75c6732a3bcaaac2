"""The state of a git working tree: commit, branch and uncommitted changes of a folder.

Nothing of the repository is executed: external diff programs, text converters, hooks and file
system monitors are off.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_TIMEOUT_S = 5.0
_SAFE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_MAX_DIFF_BYTES = 1_000_000


@dataclass(frozen=True)
class GitState:
    """The work tree that a folder belongs to."""

    commit: str | None  # None before the first commit
    branch: str | None  # None: detached
    changed: list[str]  # paths below the folder that differ from the commit, or are untracked
    diff: bytes  # of tracked files below the folder against the commit; empty if too large
    diff_bytes: int


def state_of(folder: Path) -> GitState | None:
    """Return the state of a folder's work tree; None without git, or if it takes too long."""
    status = _git(folder, "status", "--porcelain=v2", "--branch", "-z", "--", ".")
    if status is None:
        return None
    heads: dict[str, str] = {}
    changed = []
    entries = iter(status.decode(errors="replace").split("\0"))
    for entry in entries:
        if entry.startswith("# branch."):
            name, _, value = entry.removeprefix("# branch.").partition(" ")
            heads[name] = value
        elif entry[:2] in ("1 ", "2 ", "u "):
            changed.append(entry.split(" ", {"1": 8, "2": 9, "u": 10}[entry[0]])[-1])
            if entry[0] == "2":
                next(entries, None)  # skips the old path of a renamed file
        elif entry[:2] == "? ":
            changed.append(entry[2:])
    commit = heads.get("oid")
    commit = None if commit == "(initial)" else commit
    diff = b""
    if commit is not None and changed:
        arguments = ("--no-ext-diff", "--no-textconv", "--binary", "HEAD", "--", ".")
        diff = _git(folder, "diff", *arguments) or b""
    head = heads.get("head")
    return GitState(
        commit=commit,
        branch=None if head == "(detached)" else head,
        changed=sorted(changed),
        diff=diff if len(diff) <= _MAX_DIFF_BYTES else b"",
        diff_bytes=len(diff),
    )


def begin_state_of(folder: Path) -> Callable[[], GitState | None]:
    """Begin to read the state in a thread; the returned function waits for it.

    git takes milliseconds, which a submission needs for its checks.
    """
    found: list[GitState | None] = []
    thread = threading.Thread(target=lambda: found.append(state_of(folder)), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the machine can start no thread
        return partial(state_of, folder)

    def wait() -> GitState | None:
        thread.join()
        return found[0] if found else None

    return wait


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", *_SAFE, *arguments],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
