"""Downloads of models from a hub, each in a child process.

A worker selects on the child's socket, so a download never blocks its loop; the supervisor waits
for the child. The child and all processes it started end when nobody needs the model or when its
owner dies.

Run as `python -m warmd.daemon.host.downloads MODEL` this module is that child: it downloads one
model and reports its progress on stdout twice a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import orjson

from ...configs.config import ModelConfig
from ...jobs.errors import NotFound, Unavailable
from ...jobs.files import records, umask
from ...jobs.files.shortage import Lacking, Shortage, can_start_threads, no_process, of_start
from . import fetch
from .channel import Channel
from .messages import Downloaded, DownloadProgress, Failure, Message, encode

log = logging.getLogger(__name__)

_THREADS = 2  # that the child starts before it downloads
_TRY_AGAIN_S = 1.0  # until another try on a machine that can start no process
_PERIOD_S = 0.5  # between two progress reports, and between two polls of a blocked owner


class Download:
    """A child process that downloads one model, as its owner sees it."""

    def __init__(self, model: ModelConfig) -> None:
        """Start the child. Raises Lacking on a machine that can start none now."""
        self.model = model
        with ExitStack() as opened:
            try:
                own, other = map(opened.enter_context, socket.socketpair())
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, orjson.dumps(model).decode()],
                    stdin=other.fileno(),
                    stdout=other.fileno(),
                    env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                    start_new_session=True,
                    umask=umask.of_user(),  # the hub's cache is the user's; a group may share it
                )
            except OSError as error:
                if (lacking := of_start(error)) is not None:
                    raise Lacking(lacking) from error
                raise
            other.close()
            opened.pop_all()
        own.settimeout(_PERIOD_S)
        self.channel = Channel(own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def receive(self) -> list[Message]:
        """Return the child's messages: DownloadProgress, at the end Downloaded or Failure.

        Raises Lacking if the child has ended because it could start no thread.
        """
        messages = self.channel.receive()
        if self.channel.closed_by_peer:
            code = self._process.wait()
            if code > 0 and not can_start_threads(_THREADS):
                raise Lacking(no_process(f"the download process ended with {code}"))
            messages.append(
                Failure(f"model: {self.model.path}: the download process ended with {code}")
            )
        return messages

    def kill(self) -> None:
        """End the child and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.channel.close()


class Downloader(Protocol):
    """An attempt at a job whose model is being downloaded."""

    @property
    def is_downloading(self) -> bool: ...  # still waits for the model

    def handle(self, message: Message) -> None: ...  # from Download.receive

    def set_lacking(self, lacking: Shortage | None) -> None: ...  # for the download to start


@dataclass
class _Wanted:
    """A model that jobs wait for."""

    download: Download | None = None  # None: the machine could not start it yet
    attempts: list[Downloader] = field(default_factory=list)
    try_at: float = 0.0  # monotonic


class Downloads:
    """The downloads of a worker: one child per model, shared by all jobs that need it."""

    def __init__(self) -> None:
        self._wanted: dict[ModelConfig, _Wanted] = {}

    def add(self, model: ModelConfig, attempt: Downloader) -> None:
        """Download a model for a job, or join the download that is running.

        A machine that can start no process now is asked again by `sweep`.
        """
        wanted = self._wanted.setdefault(model, _Wanted())
        wanted.attempts.append(attempt)
        self._start_if_due(model, wanted)

    def _start_if_due(self, model: ModelConfig, wanted: _Wanted) -> None:
        if wanted.download is not None or time.monotonic() < wanted.try_at:
            return
        try:
            wanted.download = Download(model)
        except Lacking as error:
            self._wait(wanted, error.lacking)
        else:
            for attempt in wanted.attempts:
                attempt.set_lacking(None)

    def _wait(self, wanted: _Wanted, lacking: Shortage) -> None:
        """Let the jobs wait until `sweep` tries again."""
        wanted.try_at = time.monotonic() + _TRY_AGAIN_S
        for attempt in wanted.attempts:
            attempt.set_lacking(lacking)

    def channels(self) -> list[Channel]:
        """The channels to select on."""
        return [one.download.channel for one in self._wanted.values() if one.download is not None]

    def read(self, channel: Channel) -> None:
        """Read a readable channel and pass its messages to the jobs that wait for the model."""
        for model, wanted in list(self._wanted.items()):
            if wanted.download is not None and wanted.download.channel is channel:
                try:
                    messages = wanted.download.receive()
                except Lacking as error:
                    wanted.download.kill()
                    wanted.download = None
                    self._wait(wanted, error.lacking)
                    return
                for message in messages:
                    for attempt in wanted.attempts:
                        attempt.handle(message)
                    if not isinstance(message, DownloadProgress):
                        self._end(model)
                        return

    def sweep(self) -> None:
        """Drop the jobs that no longer wait, and end the downloads of models without one."""
        for model, wanted in list(self._wanted.items()):
            wanted.attempts[:] = [one for one in wanted.attempts if one.is_downloading]
            if not wanted.attempts:
                self._end(model)
            else:
                self._start_if_due(model, wanted)

    def _end(self, model: ModelConfig) -> None:
        download = self._wanted.pop(model).download
        if download is not None:
            download.kill()


def ensure_folder(
    model: ModelConfig, *, refresh: bool = False, is_canceled: Callable[[], bool]
) -> Path:
    """Return the folder that holds a model; downloads it if needed, unless `is_canceled()`.

    `refresh`: ask the hub for a newer version of a model that is in the cache. Raises NotFound,
    and Unavailable when canceled.
    """
    folder = None if refresh and fetch.hub_id(model) else fetch.folder_at_hand(model)
    if folder is not None:
        return folder
    with ExitStack() as running:
        download: Download | None = None
        while not is_canceled():
            try:
                download = download or running.enter_context(Download(model))
                messages = _receive(download)
            except Lacking as error:
                log.error("model: %s: not downloaded: %s", model.name, error)
                running.pop_all().close()
                download = None
                time.sleep(_TRY_AGAIN_S)
                continue
            for message in messages:
                match message:
                    case Failure():
                        raise NotFound(message.error)
                    case Downloaded():
                        return Path(message.folder)
    raise Unavailable(f"model: {model.name} was not downloaded: the daemon is stopping")


def _receive(download: Download) -> list[Message]:
    try:
        return download.receive()
    except TimeoutError:
        return []


# --- the child ------------------------------------------------------------------------------


class _Progress:
    """Measures a download by the hub's list of files and the size of the hub's cache."""

    def __init__(self) -> None:
        self._blobs: Path | None = None
        self._sizes: dict[str, int] = {}  # bytes of each file, by the name of its blob

    def begin(self, model_id: str, revision: str | None) -> None:
        """Start with one repository. The total stays unknown if the hub does not list sizes."""
        from huggingface_hub import constants

        folder = "--".join(("models", *model_id.split("/")))
        self._blobs = Path(constants.HF_HUB_CACHE, folder, "blobs")
        self._sizes = {}
        # Sizes serve the progress display only. If the hub cannot list them, for whatever reason,
        # the download fails too and reports why.
        with contextlib.suppress(Exception):
            self._sizes = _sizes(model_id, revision)

    def report(self, done: threading.Event) -> None:
        """Send progress reports until `done`."""
        while not done.wait(_PERIOD_S):
            _send(DownloadProgress(self._num_bytes(), sum(self._sizes.values()) or None))

    def _num_bytes(self) -> int:
        num_bytes = 0
        with contextlib.suppress(OSError):  # not there yet, or renamed just now
            for entry in os.scandir(self._blobs or ""):
                if not self._sizes or entry.name.partition(".")[0] in self._sizes:
                    num_bytes += entry.stat().st_size
        return num_bytes


def _sizes(model_id: str, revision: str | None) -> dict[str, int]:
    """The sizes of a repository's files, by the names of their blobs in the hub's cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi().list_repo_tree(model_id, revision=revision, recursive=True)
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    return {f.lfs.sha256 if f.lfs is not None else f.blob_id: f.size for f in files}


def _fetch(model: ModelConfig, progress: _Progress) -> None:
    """Download a model, and the base model of an adapter. Raises NotFound."""
    import huggingface_hub as hub

    fetched: set[str] = set()
    while (named := fetch.next_id(model, fetched)) is not None:
        model_id, _, revision = named.partition("@")
        progress.begin(model_id, revision or None)
        try:
            hub.snapshot_download(model_id, revision=revision or None)
        except Exception as error:  # network, disk or hub: its library raises many types
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise NotFound(
                "model: must be a loaded model, a model folder, or the id of a model on a hub that "
                f"can be reached, got {named!r}: {reason}"
            ) from error
        fetched.add(named)


def _end_with_owner() -> None:
    """Wait for the owner's end of stdin to close; then end this process group."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _send(message: Message) -> None:
    os.write(1, encode(message))


def main() -> None:
    # It ends with its owner: a stop may be sent to all processes at once, as by Slurm, and the job
    # of a download that ended by itself fails.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_owner, daemon=True).start()
    model = records.decode(sys.argv[1], ModelConfig)
    progress, done = _Progress(), threading.Event()
    reporting = threading.Thread(target=progress.report, args=(done,))
    reporting.start()
    outcome: Message
    try:
        _fetch(model, progress)
        outcome = Downloaded(str(fetch.local_folder(model)))
    except NotFound as error:
        outcome = Failure.of(error)
    finally:
        done.set()
        reporting.join()
    _send(outcome)


if __name__ == "__main__":
    main()
