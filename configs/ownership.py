"""Whether other users of the machine could change what is at a path: owners and modes.

Every folder and symbolic link on the way counts, since whoever may write a folder can replace what
is in it. Trusted owners are this process's user, root, and the owner of `/`: in a user namespace
without the machine's root, files of root belong to whoever `/` belongs to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .values import choice

SINGLE_USER = "WARMD_SINGLE_USER"
_MOST_LINKS = 40  # on one path, as in Linux
_MOST_NAMED = 3  # changed modes in one message


@dataclass(frozen=True)
class Exposure:
    """A file or folder on a path that lets other users change what is there."""

    path: Path
    mode: int
    reason: str
    is_ours: bool  # its mode is the reason, and this user may change it
    is_last: bool  # what the path leads to, not a folder above it


def is_single_user(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable says that the machine has no other users. Raises ConfigError."""
    return choice(SINGLE_USER, environ.get(SINGLE_USER) or "off", ("on", "off")) == "on"


def exposures(path: Path) -> Iterator[Exposure]:
    """Yield what exposes an absolute path to other users; parts that do not exist are left out."""
    users = trusted()
    for entry, found, is_last in _passed(path):
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in users:
            reason = f"{entry} belongs to user {_user(found.st_uid)}"
            yield Exposure(entry, mode, reason, is_ours=False, is_last=is_last)
        elif stat.S_ISLNK(found.st_mode) or (mode & stat.S_ISVTX and not is_last):
            continue  # nobody but its owner can replace a link, or what is in a sticky folder
        elif writers := _writers(entry, found):
            reason = f"{writers} may write to {entry} (mode {mode:04o})"
            is_ours = found.st_uid == os.geteuid()
            yield Exposure(entry, mode, reason, is_ours=is_ours, is_last=is_last)


def problem(path: Path) -> str | None:
    """Return why other users could change what is at `path`, or None.

    Modes of this user's own files and folders do not count: `narrow` changes them.
    """
    return next((one.reason for one in exposures(path) if not one.is_ours), None)


def narrow(path: Path) -> list[str]:
    """Protect this user's own files and folders on a path; return what has changed.

    Others may no longer write to what the path leads to. A folder above it gets the sticky bit:
    others may still use it, but not replace what is not theirs.
    """
    return [
        _change(one.path, one.mode, one.mode & ~0o022) if one.is_last else _stick(one)
        for one in exposures(path)
        if one.is_ours
    ]


def narrow_folder(folder: Path) -> list[str]:
    """Allow only the owner to enter a folder, and its folders, if they are this user's.

    Files in it that others may write lose all permissions of others; where links lead to, and the
    folders above, are as in `narrow`. Returns what has changed.
    """
    changes = [_stick(one) for one in exposures(folder) if one.is_ours and not one.is_last]
    folder = folder.resolve()
    for entry in (folder, *sorted(folder.iterdir())):
        with suppress(FileNotFoundError):  # a running daemon has removed it
            found = entry.lstat()
            mode = stat.S_IMODE(found.st_mode)
            if stat.S_ISLNK(found.st_mode):
                changes += narrow(entry)
                continue
            wide = mode & (0o077 if stat.S_ISDIR(found.st_mode) else 0o022)
            if wide and found.st_uid == os.geteuid():
                changes.append(_change(entry, mode, mode & ~0o077))
    return changes


def refusal(path: Path, problem: str) -> str:
    """Return the end of the error for a path that other users could change."""
    return (
        f"must be a folder that no other user can change, got {path}: {problem}; "
        f"{SINGLE_USER}=on accepts it on a machine without other users"
    )


def narrowed_line(changes: list[str]) -> str:
    """Return the changes as one line."""
    more = len(changes) - _MOST_NAMED
    named = ", ".join(changes[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"other users had access; modes are now: {named}"


def _stick(exposed: Exposure) -> str:
    return _change(exposed.path, exposed.mode, exposed.mode | stat.S_ISVTX)


def _change(path: Path, before: int, mode: int) -> str:
    with suppress(OSError):  # a file system without modes: the message shows that nothing changed
        path.chmod(mode)
    return f"{path} {stat.S_IMODE(path.stat().st_mode):04o} (before: {before:04o})"


def _passed(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield each file, folder and link on the way, with its lstat, and whether it is the last."""
    links = 0
    current, rest = Path("/"), list(path.parts[1:])
    yield current, current.lstat(), not rest
    while rest:
        name = rest.pop(0)
        if name == "..":
            current = current.parent
            continue
        entry = current / name
        try:
            found = entry.lstat()
        except OSError:  # it does not exist, or is not for us: whoever opens it reports that
            return
        is_link = stat.S_ISLNK(found.st_mode)
        yield entry, found, not rest and not is_link
        if is_link:
            links += 1
            if links > _MOST_LINKS:
                return
            target = entry.readlink()
            rest = [*(target.parts[1:] if target.is_absolute() else target.parts), *rest]
            current = Path("/") if target.is_absolute() else current
        else:
            current = entry


def trusted() -> set[int]:
    """Return the users whose files are as safe as this user's own."""
    return {0, os.geteuid(), os.stat("/").st_uid}


def _writers(path: Path, found: os.stat_result) -> str | None:
    """Name the other users who may write to a file or folder; None if there are none."""
    if found.st_mode & stat.S_IWOTH:
        return "everyone"
    if not found.st_mode & stat.S_IWGRP:
        return None
    if _has_access_list(path):  # the bits of the group are then the most that anyone listed has
        return "an access list"
    return _group(found.st_gid)


def _has_access_list(path: Path) -> bool:
    with suppress(AttributeError, OSError):  # not on this system, not on this file system
        return "system.posix_acl_access" in os.listxattr(path)
    return False


def _group(gid: int) -> str | None:
    """Name a group that has other members than this user and root; None if it has none."""
    import grp
    import pwd

    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return f"group {gid}"  # not in the group database: its members are unknown
    members: Iterable[str] = {
        *group.gr_mem,
        *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid),
    }
    allowed = {user.pw_name for user in pwd.getpwall() if user.pw_uid in (0, os.geteuid())}
    return None if set(members) <= allowed else f"group {group.gr_name}"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
