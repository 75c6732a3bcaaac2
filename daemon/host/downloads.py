"""Models on their way from a hub: each comes by a child process, which its owner watches.

A worker has it among what it selects on, and hears of its progress; whoever has time waits for it.
The child ends, with all that it started, when it is no longer wanted or its owner is gone.

Run as `python -m warmd.daemon.host.downloads MODEL` it is that child: it downloads one model, and
reports its progress on stdout twice a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self

import orjson

from ...configs.config import ModelConfig
from ...jobs.errors import NotFound, Unavailable
from . import fetch
from .channel import Channel

_TICK_S = 0.5  # between two reports of the child, and between two looks of who waits for it


class Download:
    """A child that fetches one model, seen by its owner."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, orjson.dumps(model.__dict__).decode()],
                stdin=other.fileno(),
                stdout=other.fileno(),
                env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                start_new_session=True,
            )
        own.settimeout(_TICK_S)
        self.channel = Channel(own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def receive(self) -> list[dict[str, Any]]:
        """Return what it says: `bytes` and `total_bytes` so far; at its end `folder` or `error`."""
        said = self.channel.receive()
        if self.channel.closed_by_peer:
            code = self._process.wait()
            said.append({"error": f"model: {self.model.path}: its download ended with {code}"})
        return said

    def kill(self) -> None:
        """End it with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.channel.close()


class Waiting(Protocol):
    """An attempt at a job whose model is being downloaded."""

    @property
    def is_fetching(self) -> bool: ...  # still waits for the model

    def hear(self, message: dict[str, Any]) -> None: ...  # of Download.receive


class Downloads:
    """What a worker's jobs wait for: one child for each model, whoever wants it."""

    def __init__(self) -> None:
        self._running: dict[ModelConfig, tuple[Download, list[Waiting]]] = {}

    def want(self, model: ModelConfig, attempt: Waiting) -> None:
        """Fetch a model for one job more."""
        if model not in self._running:
            self._running[model] = Download(model), []
        self._running[model][1].append(attempt)

    def channels(self) -> list[Channel]:
        """What to select on."""
        return [download.channel for download, _ in self._running.values()]

    def hear(self, channel: Channel) -> None:
        """Pass on what the child at the other end says to the jobs that wait for it."""
        for download, attempts in list(self._running.values()):
            if download.channel is channel:
                for message in download.receive():
                    for attempt in attempts:
                        attempt.hear(message)
                    if "bytes" not in message:
                        self._end(download)
                        return

    def sweep(self) -> None:
        """Let go of the jobs that wait no more, and of the children that no job waits for."""
        for download, attempts in list(self._running.values()):
            attempts[:] = [attempt for attempt in attempts if attempt.is_fetching]
            if not attempts:
                self._end(download)

    def _end(self, download: Download) -> None:
        download.kill()
        del self._running[download.model]


def folder_of(model: ModelConfig, *, is_newest: bool = False, over: Callable[[], bool]) -> Path:
    """Return the folder that holds a model, fetched from the hub if need be, while not `over()`.

    `is_newest`: ask the hub also for what was fetched before, as there may be a newer one. Raises
    NotFound, and Unavailable when it is over before the model is there.
    """
    folder = None if is_newest and fetch.hub_id(model) else fetch.folder_at_hand(model)
    if folder is not None:
        return folder
    with Download(model) as download:
        while not over():
            for message in _said_by(download):
                if "error" in message:
                    raise NotFound(message["error"])
                if "folder" in message:
                    return Path(message["folder"])
    raise Unavailable(f"model: {model.name} was not fetched: the daemon stops")


def _said_by(download: Download) -> list[dict[str, Any]]:
    try:
        return download.receive()
    except TimeoutError:
        return []


# --- the child ------------------------------------------------------------------------------


class _Progress:
    """How much of a model is there, from the hub's list of its files and the hub's cache."""

    def __init__(self) -> None:
        self._blobs: Path | None = None
        self._sizes: dict[str, int] = {}  # of the files, by the names of their blobs

    def begin(self, model_id: str, revision: str | None) -> None:
        """Begin with the files of one repository; where the hub gives no list, none is known."""
        from huggingface_hub import constants

        folder = "--".join(("models", *model_id.split("/")))
        self._blobs = Path(constants.HF_HUB_CACHE, folder, "blobs")
        self._sizes = {}
        # Sizes are for the progress only. A hub that cannot be asked for them (of whatever error)
        # fails the download, too, which reports it.
        with contextlib.suppress(Exception):
            self._sizes = _listed(model_id, revision)

    def tell(self, over: threading.Event) -> None:
        """Say how far it is until it is over."""
        while not over.wait(_TICK_S):
            _tell(bytes=self._present(), total_bytes=sum(self._sizes.values()) or None)

    def _present(self) -> int:
        present = 0
        with contextlib.suppress(OSError):  # not yet, or just renamed
            for entry in os.scandir(self._blobs or ""):
                if not self._sizes or entry.name.partition(".")[0] in self._sizes:
                    present += entry.stat().st_size
        return present


def _listed(model_id: str, revision: str | None) -> dict[str, int]:
    """The sizes of a repository's files, by the names of their blobs in the hub's cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi().list_repo_tree(model_id, revision=revision, recursive=True)
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    return {f.lfs.sha256 if f.lfs is not None else f.blob_id: f.size for f in files}


def _fetch(model: ModelConfig, progress: _Progress) -> None:
    """Download what of a model is on a hub, its base too. Raises NotFound."""
    import huggingface_hub as hub

    fetched: set[str] = set()
    while (named := fetch.next_id(model, fetched)) is not None:
        model_id, _, revision = named.partition("@")
        progress.begin(model_id, revision or None)
        try:
            hub.snapshot_download(model_id, revision=revision or None)
        except Exception as error:  # of the network, the disk, the hub: whatever its library raises
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise NotFound(
                "model: must be a warm model's name, a folder, or an id on a hub that can be "
                f"reached, got {named!r}: {reason}"
            ) from error
        fetched.add(named)


def _end_with_owner() -> None:
    """Wait for the owner's end of stdin to close; then end this process and all its children."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _tell(**message: Any) -> None:
    os.write(1, orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))


def main() -> None:
    threading.Thread(target=_end_with_owner, daemon=True).start()
    model = ModelConfig(**orjson.loads(sys.argv[1]))
    progress, over = _Progress(), threading.Event()
    ticking = threading.Thread(target=progress.tell, args=(over,))
    ticking.start()
    try:
        _fetch(model, progress)
        end = {"folder": str(fetch.local_folder(model))}
    except NotFound as error:
        end = {"error": str(error)}
    finally:
        over.set()
        ticking.join()
    _tell(**end)


if __name__ == "__main__":
    main()
