"""The home folder: all state of one daemon, and the lock that allows only one at a time.

HOME/
  config.yaml        the user's settings (optional)
  daemon.json        address of the daemon that runs or last ran here (0600: may hold a password)
  daemon.lock        held by the supervisor while it lives
  models.json        the warm models
  order.json         the queues after the latest move
  notify.json        the events for which a notification was sent
  runs/JOB/          run directories
  sweeps/SWEEP/      sweeps: their jobs and decisions
  store/JOB          jobs that are not completely in the run store (with `runs: s3://…`)
  curricula/ID/      curricula: their stages, and the decisions between them
  cache/             data shared by jobs, such as tokenized corpora; code that libraries compile
  id                 a random id, which the run directories of this home's jobs name
  server/            append-only file of the embedded Redis
  damaged/           copies of append-only files that were repaired
  logs/              rotated logs
  sockets/           unix sockets (a link to another folder if the path would be too long)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import platform
import secrets
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from ...configs import ownership
from ...jobs.errors import Conflict, SpecError
from ...jobs.files.atomic import locked, make_folder, write_atomic

log = logging.getLogger(__name__)

# sun_path holds 108 bytes on Linux and 104 on macOS, the longest name here takes 14.
_LONGEST_SOCKET_FOLDER = 85

_MIN_FREE_BYTES = 100_000
_LOCK_TIMEOUT_S = 0.5  # much longer than `is_locked` holds the lock


@dataclass(frozen=True)
class Home:
    """Paths below one WARMD_HOME."""

    path: Path

    @property
    def runs(self) -> Path:
        """The folder of run directories."""
        return self.path / "runs"

    @property
    def sweeps(self) -> Path:
        """The folder of sweeps."""
        return self.path / "sweeps"

    @property
    def curricula(self) -> Path:
        """The folder of curricula."""
        return self.path / "curricula"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def log(self) -> Path:
        """The log of supervisor, zygote and workers."""
        return self.logs / "daemon.log"

    @property
    def redis_folder(self) -> Path:
        return self.path / "server"

    @property
    def damaged(self) -> Path:
        """The folder of copies of append-only files that were repaired."""
        return self.path / "damaged"

    @property
    def state(self) -> Path:
        return self.path / "daemon.json"

    @property
    def models(self) -> Path:
        return self.path / "models.json"

    @property
    def cache(self) -> Path:
        """The folder of data that jobs share."""
        return self.path / "cache"

    @property
    def code_caches(self) -> Path:
        """The folder of code that libraries compile, such as torch's inductor."""
        return self.cache / "libraries"

    @property
    def notified(self) -> Path:
        """The events for which a notification was sent."""
        return self.path / "notify.json"

    @property
    def order(self) -> Path:
        """The order of the queues after the latest move."""
        return self.path / "order.json"

    @property
    def store(self) -> Path:
        """The run directories that are not completely in the run store, a file per job."""
        return self.path / "store"

    @property
    def weight_digests(self) -> Path:
        """The cache of weight digests, one file per model folder."""
        return self.cache / "weights"

    @property
    def machine_limits(self) -> Path:
        """The measured limits of this machine, for estimates."""
        return self.cache / f"limits-{_digest(_machine())}.json"

    @property
    def key(self) -> str:
        """Eight hexadecimal digits that identify this home (in worker names).

        The same path on another machine, or in another container, has another key.
        """
        return _digest(_machine() + os.fsencode(self.path))

    @property
    def sockets(self) -> Path:
        """The folder of the unix sockets, 0700; HOME/sockets, or where that leads to."""
        if not self._has_sockets_elsewhere:
            return self._own_sockets
        with contextlib.suppress(OSError):
            linked = self._own_sockets.readlink()
            if linked.name.startswith(self._socket_prefix) and _is_private_folder(linked):
                return linked
        # A daemon of an earlier version may run, which made no link.
        former = _socket_base() / f"warmd-{os.getuid()}-{_digest(os.fsencode(self.path))}"
        return former if _is_private_folder(former) else self._own_sockets

    @property
    def _own_sockets(self) -> Path:
        return self.path / "sockets"

    @property
    def _socket_prefix(self) -> str:
        """Where HOME/sockets leads to begins so; a copy of a home has another prefix."""
        return f"warmd-{_digest(os.fsencode(self.path))}-"

    @property
    def _has_sockets_elsewhere(self) -> bool:
        return len(os.fsencode(self._own_sockets)) > _LONGEST_SOCKET_FOLDER

    @property
    def control_socket(self) -> Path:
        return self.sockets / "control.sock"

    @property
    def zygote_socket(self) -> Path:
        return self.sockets / "zygote.sock"

    @property
    def next_zygote_socket(self) -> Path:
        """Where a zygote listens that is to replace another one; renamed when it is ready."""
        return self.sockets / "zygote.new"

    @property
    def redis_socket(self) -> Path:
        return self.sockets / "redis.sock"

    @property
    def redis_url(self) -> str:
        """The URL of the embedded Redis."""
        return f"unix://{quote(str(self.redis_socket))}"

    def id(self) -> str:
        """Return the random id of this home, which must exist; the first caller creates it."""
        path = self.path / "id"
        if not path.exists():
            with locked(self.path):
                if not path.exists():  # no other process created it meanwhile
                    write_atomic(path, secrets.token_hex(16).encode())
        return path.read_text()

    def create(self) -> None:
        """Create the folders, for their owner only. Raises SpecError.

        Modes of existing ones that let other users in are changed, and logged.
        """
        try:
            self._refuse_if_exposed(self.path)  # before anything is created there
            for folder in (self.path, self.runs, self.logs, self.redis_folder):
                make_folder(folder)
            if not os.access(self.path, os.W_OK):  # a read-only disk, where all folders exist
                raise OSError(f"{self.path} cannot be written")
            if not self.is_locked():  # a running daemon keeps its sockets
                self._create_sockets()
            self._protect()
        except OSError as error:
            raise SpecError("home", f"must be a writable folder: {error}") from error
        with contextlib.suppress(OSError):  # a full disk: the next one creates it
            self.id()

    def _create_sockets(self) -> None:
        link = self._own_sockets
        if not self._has_sockets_elsewhere:
            if link.is_symlink():  # the home was at a longer path
                link.unlink()
            link.mkdir(mode=0o700, exist_ok=True)
            return
        with locked(self.path):
            if self.sockets.name.startswith(self._socket_prefix):
                return
            if link.is_dir() and not link.is_symlink():  # the home was at a shorter path
                shutil.rmtree(link)
            link.unlink(missing_ok=True)
            # At a new name, which no other user can take first.
            link.symlink_to(tempfile.mkdtemp(prefix=self._socket_prefix, dir=_socket_base()))

    def _protect(self) -> None:
        """Let no other user change what is in the home. Raises SpecError, OSError."""
        if ownership.is_single_user():
            return
        changes = ownership.narrow_folder(self.path)
        if changes:
            log.warning("home: %s", ownership.narrowed_line(changes))
            shutil.rmtree(self.code_caches, ignore_errors=True)  # others could change them
        for entry in (*self.path.iterdir(), self.sockets):
            self._refuse_if_exposed(entry)

    def _refuse_if_exposed(self, path: Path) -> None:
        if ownership.is_single_user():
            return
        if (problem := ownership.problem(path)) is not None:
            raise SpecError("home", ownership.refusal(self.path, problem))

    def link_runs(self, folder: Path) -> None:
        """Make `runs` a link to another folder. Raises SpecError; Conflict when it has jobs."""
        try:
            make_folder(self.path)
            make_folder(folder)
            if self.runs.is_symlink() and self.runs.resolve() != folder.resolve():
                self.runs.unlink()
            elif self.runs.is_dir() and not self.runs.is_symlink():
                if any(entry for entry in os.listdir(self.runs) if not entry.startswith(".")):
                    raise Conflict(f"runs: {self.runs} has jobs: move them to {folder} first")
                shutil.rmtree(self.runs)
            with contextlib.suppress(FileExistsError):  # by another process
                self.runs.symlink_to(folder)
        except OSError as error:
            raise SpecError("runs", f"must be a writable folder, got {folder}: {error}") from error

    def read_state(self) -> dict[str, Any] | None:
        """Return the record of the last supervisor, or None. It may have ended since."""
        try:
            state = orjson.loads(self.state.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return state if isinstance(state, dict) and {"pid", "url"} <= state.keys() else None

    def write_state(self, state: dict[str, Any]) -> None:
        write_atomic(self.state, orjson.dumps(state, option=orjson.OPT_INDENT_2))

    def lock(self) -> int:
        """Lock the home for this process; return the lock's descriptor. Raises Conflict.

        The kernel releases the lock with its last holder: a dead daemon never blocks a new one.
        Retries for a moment, because `is_locked` in another process holds the lock briefly.
        """
        fd = os.open(self.path / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise Conflict(self.occupied()) from None
                time.sleep(0.001)
            else:
                return fd

    def is_removed(self, lock: int) -> bool:
        """Whether the home of a lock was removed, or replaced by another one."""
        try:
            found = os.stat(self.path / "daemon.lock")
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a file system that fails for a moment
            return False
        return not os.path.samestat(found, os.fstat(lock))

    def is_locked(self) -> bool:
        """Whether a daemon runs here now."""
        lock = self.path / "daemon.lock"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)  # NFS alone needs a writable one
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def full_folder(self) -> Path | None:
        """Return a folder of this home whose disk is full, or None."""
        full = self.full_folder_of_redis()
        return self.runs if full is None and _is_full(self.runs) else full

    def full_folder_of_redis(self) -> Path | None:
        """Return a folder that the embedded Redis writes to, and whose disk is full, or None."""
        folders = (self.path, self.redis_folder, self.logs)
        return next((folder for folder in folders if _is_full(folder)), None)

    def free_bytes(self) -> int | None:
        """Return the space that its disk has left; None if the home does not exist yet."""
        try:
            disk = os.statvfs(self.path)
        except OSError:
            return None
        return disk.f_bavail * disk.f_frsize

    def occupied(self) -> str:
        """Return an error message about the daemon that runs here."""
        state = self.read_state() or {}
        folder = self.full_folder()
        full = "" if folder is None else f"; the disk of {folder} is full: free some space"
        return (
            f"a daemon already runs in {self.path} (pid {state.get('pid', 'unknown')}, "
            f"since {state.get('started', 'just now')}): stop it with `warmd stop`, or choose "
            f"another home with --home{full}"
        )


def private(path: str, flags: int) -> int:
    """An opener for `open` that creates files readable by their owner only."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _is_full(folder: Path) -> bool:
    """Whether the disk of a folder has no space or no inodes for a few more files."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    has_files = not disk.f_files or disk.f_favail > 0  # some file systems report none
    return disk.f_bavail * disk.f_frsize < _MIN_FREE_BYTES or not has_files


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:8]


def _machine() -> bytes:
    """Bytes that identify this machine; usually the same after a reboot."""
    name = os.fsencode(
        platform.node()
    )  # distinguishes containers of one image, which share the file
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            return Path(path).read_bytes().strip() + name
    return name


def _socket_base() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def _is_private_folder(folder: Path) -> bool:
    """Whether a path is a folder, no link, that this user owns and others have no rights to."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    mode = found.st_mode
    return stat.S_ISDIR(mode) and not mode & 0o077 and found.st_uid == os.getuid()
