"""Makes the run directory of a job complete on this machine, for an execution that begins.

Local files are kept if they are the same, or if this machine is ahead of the store: the latest
execution ran here and was killed before everything was uploaded, or the store was restored from an
older snapshot. Of the checkpoints only the latest complete one is fetched; the others are folders
with only a manifest, so that training counts, ranks and removes them as if they were local.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...jobs.context import MANIFEST, step_of
from ...jobs.errors import CheckpointDamaged, Conflict, NotFound
from ...jobs.files.atomic import whole_folder, write_atomic
from ..host.home import Home
from ..runs.checkpoints import Checkpoints, verify
from ..runs.rundir import RunDir
from . import copies, event_segments, index, seen
from .bucket import Bucket
from .content import OnBytes, download, is_safe, is_same
from .index import Index, StoredFile
from .pending import Pending, PendingUploads


class NotUploaded(Exception):
    """A job has finished, and the machine that ran it has not uploaded its files yet."""


OnBegin = Callable[[str, int], None]  # what is fetched now, and its bytes
OnProblem = Callable[[str], None]

log = logging.getLogger(__name__)

_LARGE_BYTES = 16 << 20
_MODEL_MARK = ".model"  # in a run directory: of which files in the store its model is a copy
_ABOUT = ("spec.json", "labels.json", "result.json")
_OUTCOME = ("result.json", "model")  # of an execution that later ones have superseded


def open_rundir(
    home: Home, bucket: Bucket, job_id: str, execution: int, *, on_problem: OnProblem = log.warning
) -> Index:
    """Claim a job for an execution, and fetch small files and events; return the remaining index.

    It leaves out files of which this machine has a newer version. `on_problem` receives damage in
    the store that does not prevent the execution. Raises Superseded, StoreUnavailable, Conflict,
    NotFound and OSError.
    """
    pending = PendingUploads(home)
    rundir = RunDir(home.runs / job_id)
    with pending.fetching(job_id):
        old, new = index.claim(bucket, job_id, execution)
        unsent = pending.read(job_id)
        is_ahead = unsent is not None and unsent.execution == old.execution
        is_ahead = is_ahead or (unsent is None and seen.is_earlier(rundir.path, old))
        log_segments = event_segments.segments(bucket, job_id)
        if is_ahead:
            by_people = {n: f for n, f in new.files.items() if _is_by_people(n)}
            small = {n: f for n, f in by_people.items() if f.bytes < _LARGE_BYTES}
            fetch_files(bucket, rundir.path, small)
        else:
            remove_others(rundir, new)
            fetch_small(bucket, rundir, new)
            problem = event_segments.download(bucket, log_segments, rundir.events)
            if problem is not None:
                on_problem(problem)
        copies.mark(bucket, rundir.path)
        started = Pending(execution, event_segments.length(log_segments))
        pending.write(job_id, started)
        seen.note(rundir.path, new)
    if is_ahead:
        # Not all initial weights are here if this machine was interrupted while it fetched them.
        fetched = {n: f for n, f in new.files.items() if _is_of_checkpoint(n) or _is_by_people(n)}
        new = replace(new, files=fetched)
    return new


def fetch_small(bucket: Bucket, rundir: RunDir, now: Index) -> None:
    """Fetch the small files, of checkpoints only the manifests."""
    files = {
        name: file
        for name, file in now.files.items()
        if (file.bytes < _LARGE_BYTES and not _is_of_checkpoint(name))
        or name.endswith(f"/{MANIFEST}")
    }
    fetch_files(bucket, rundir.path, files)


def fetch_named(home: Home, bucket: Bucket, job_id: str) -> None:
    """Fetch the files of a finished job that another one names, if it is in the store.

    Weights are left out, and files of this machine that are not uploaded yet are left alone. Raises
    NotUploaded, StoreUnavailable, Conflict and OSError.
    """
    pending = PendingUploads(home)
    with pending.fetching(job_id), suppress(NotFound):
        if pending.is_uploaded(job_id):
            rundir = RunDir(home.runs / job_id)
            now = index.read(bucket, job_id)
            if seen.is_earlier(rundir.path, now):
                return
            if "result.json" not in now.files:
                raise NotUploaded(f"run store {bucket.name}: waits for the result of {job_id}")
            left_out = ("checkpoints", "init", "model")
            files = {n: f for n, f in now.files.items() if n.partition("/")[0] not in left_out}
            fetch_files(bucket, rundir.path, files)
            copies.mark(bucket, rundir.path)


def fetch_large(
    bucket: Bucket, rundir: RunDir, now: Index, *, on_begin: OnBegin, on_bytes: OnBytes
) -> None:
    """Fetch the files that `fetch_small` leaves out, except checkpoints."""
    files = {
        name: file
        for name, file in now.files.items()
        if file.bytes >= _LARGE_BYTES and not _is_of_checkpoint(name)
    }
    if files:
        on_begin("files", sum(file.bytes for file in files.values()))
        fetch_files(bucket, rundir.path, files, on_bytes=on_bytes)


def fetch_files(
    bucket: Bucket,
    folder: Path,
    files: dict[str, StoredFile],
    *,
    on_bytes: OnBytes = lambda number: None,
) -> None:
    """Fetch files that are not in the folder, or not the same there."""
    for name, file in files.items():
        if not is_safe(name):
            raise Conflict(f"run store: {name!r} is not a path in a run directory")
        if not is_same(folder / name, file):
            download(bucket, file, folder / name, on_bytes=on_bytes)


def fetch_checkpoint(
    bucket: Bucket,
    rundir: RunDir,
    now: Index,
    *,
    step: int | None = None,
    on_begin: OnBegin = lambda name, total: None,
    on_bytes: OnBytes = lambda number: None,
) -> Path | None:
    """Make a checkpoint complete on this machine, by default the latest; return its folder.

    None: there is none. A checkpoint that is damaged in the store is skipped for the one before,
    unless it was requested. Raises CheckpointDamaged.
    """
    here = {step_of(path): path for path in Checkpoints(rundir.checkpoints).list()}
    stored = now.checkpoints()
    for number in sorted({*here, *stored} if step is None else {step} & {*here, *stored})[::-1]:
        path = rundir.checkpoints / f"checkpoint-{number}"
        if number in here and _is_whole(path):
            return path
        if number not in stored:
            continue
        files = now.below(stored[number])
        on_begin(path.name, sum(file.bytes for file in files.values()))
        try:
            with whole_folder(path) as staging:
                fetch_files(bucket, staging, files, on_bytes=on_bytes)
            verify(path)
        except (Conflict, NotFound, CheckpointDamaged) as problem:
            if step is not None:
                raise CheckpointDamaged(f"{path.name}: {problem}") from None
            log.warning("%s: %s: %s", rundir.path.name, path.name, problem)
            continue
        return path
    return None


def fetch_model(
    home: Home,
    bucket: Bucket,
    job_id: str,
    *,
    on_begin: OnBegin = lambda name, total: None,
    on_bytes: OnBytes = lambda number: None,
) -> None:
    """Make the final model of a job whole on this machine, if the store has one.

    A model that is here is read once, to compare it with that in the store. One that is not
    uploaded yet is left alone. The folder appears as a whole. Raises StoreUnavailable, Conflict,
    NotFound and OSError.
    """
    pending = PendingUploads(home)
    folder = home.runs / job_id
    with pending.fetching(job_id):
        if not pending.is_uploaded(job_id):
            return
        try:
            now = index.read(bucket, job_id)
        except NotFound:
            return
        seen.check(bucket, folder, now)
        files = now.below("model")
        mark, content = folder / _MODEL_MARK, _content_of(files)
        model = folder / "model"
        if not files or (model.is_dir() and _read(mark) == content):
            return
        if not all(is_same(model / name, file) for name, file in files.items()):
            on_begin("model", sum(file.bytes for file in files.values()))
            about = {name: file for name, file in now.files.items() if name in _ABOUT}
            fetch_files(bucket, folder, about)  # without them it is not the run directory of a job
            copies.mark(bucket, folder)
            with whole_folder(model) as staging:
                fetch_files(bucket, staging, files, on_bytes=on_bytes)
        write_atomic(mark, content)


def _content_of(files: dict[str, StoredFile]) -> bytes:
    return "".join(f"{f.xxh3_128} {f.bytes} {name}\n" for name, f in sorted(files.items())).encode()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _is_of_checkpoint(name: str) -> bool:
    return name.startswith("checkpoints/")


def _is_by_people(name: str) -> bool:
    """Whether commands write the file, and no execution does."""
    return name in ("spec.json", "labels.json") or name.startswith("init/")


def _is_whole(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointDamaged:
        return False
    return True


def remove_others(rundir: RunDir, now: Index) -> None:
    """Remove the files that a superseded execution left here."""
    stored = now.checkpoints()
    for path in Checkpoints(rundir.checkpoints).list():
        if step_of(path) not in stored:
            shutil.rmtree(path)
    for name in _OUTCOME:
        if name not in now.files and not now.below(name):
            path = rundir.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
