"""The run directories of a home and their counterparts in the run store, for commands that read,
submit and remove jobs.

`publish` and `withdraw` are called where a job enters or leaves Redis (lifecycle).
`refresh` fetches everything that commands show: all files except weights.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ...jobs.context import MANIFEST
from ...jobs.errors import Conflict, NotFound
from ...jobs.ids import is_job_id
from ..host.home import Home
from ..runs.checkpoints import Checkpoints
from ..runs.rundir import RunDir
from . import copies, event_segments, fetching, index, run_files, seen
from .bucket import Bucket, StoreDenied, StoreUnavailable
from .content import OnBytes, Transfer, is_same
from .event_segments import EventUpload
from .index import Index, StoredFile
from .pending import PendingUploads

log = logging.getLogger(__name__)

_LARGE_BYTES = 16 << 20  # larger files are not fetched for reading
_MOST_READ = 1000  # jobs whose latest refresh is remembered
_THREADS = 16  # of small requests at the same time
_BY_PEOPLE = ("spec.json", "labels.json")
_SUMMARY = (*_BY_PEOPLE, "result.json")  # what lists of jobs show
_NOT_STORED = ("lock", "execution", "events.jsonl")


class RemoteRuns:
    """The run store of one home."""

    def __init__(self, home: Home, url: str, *, is_for_person: bool = False) -> None:
        """`is_for_person` as in Bucket. Raises SpecError without the library for it."""
        self.bucket = Bucket(url, is_for_person=is_for_person)
        self._home = home
        self._pending = PendingUploads(home)
        # Of the latest refreshes: the files that people change, as they were then in the store.
        self._read: dict[str, dict[str, StoredFile]] = {}

    def check_access(self) -> None:
        """Raise StoreDenied for wrong keys or a bucket that does not exist.

        An unreachable service is only logged: it may be back soon.
        """
        try:
            self.bucket.get(copies.ID)
        except StoreDenied:
            raise
        except StoreUnavailable as error:
            log.warning("%s; jobs wait until it can be reached", error)

    # --- changes by people ------------------------------------------------------------------

    def publish(self, job_id: str) -> None:
        """Publish a run directory of this machine, or the changes that people made in it.

        Raises StoreUnavailable and OSError; Conflict if another machine has changed the same file
        since the latest `refresh` here.
        """
        path = self._home.runs / job_id
        if not (path / "spec.json").is_file():
            return
        try:
            now = index.read(self.bucket, job_id)
        except NotFound:
            self._create(job_id, path)
            return
        seen.check(self.bucket, path, now)
        base = self._read.get(job_id, now.files)
        transfer = Transfer(self.bucket, job_id, now.execution)
        known = {file.content: file for file in now.files.values()}
        changed = {
            name: transfer.upload(path / name, known)
            for name in _BY_PEOPLE
            if (path / name).is_file()
            and (name not in base or not is_same(path / name, base[name]))
        }

        def change(old: Index) -> Index:
            for name, file in changed.items():
                if name in old.files and old.files[name] not in (base.get(name), file):
                    raise Conflict(f"job: {job_id} was changed on another machine: try again")
            return replace(old, files={**old.files, **changed})

        if changed:
            try:
                self._note_read(job_id, self._replace(job_id, change))
            except Conflict:
                self.bucket.delete([f.key for f in changed.values() if f not in known.values()])
                raise

    def _note_read(self, job_id: str, now: Index | None) -> None:
        """Record the base of the next changes of a job; None: the state on this machine."""
        self._read.pop(job_id, None)
        if now is not None:
            self._read[job_id] = {n: file for n, file in now.files.items() if n in _BY_PEOPLE}
            while len(self._read) > _MOST_READ:
                self._read.pop(next(iter(self._read)), None)

    def _create(self, job_id: str, path: Path) -> None:
        transfer = Transfer(self.bucket, job_id, 0)
        copies.mark(self.bucket, path)
        files: dict[str, StoredFile] = {}
        known: dict[tuple[str, int], StoredFile] = {}
        for name, file in run_files.files(path, without=_NOT_STORED):
            files[name] = transfer.upload(file, known)
            known[files[name].content] = files[name]
        EventUpload(self.bucket, job_id, path / "events.jsonl", execution=0, start=0).upload()
        index.create(self.bucket, job_id, files)

    def note_removed_checkpoints(self, job_id: str) -> None:
        """Remove the checkpoints and initial weights that are not on this machine any more.

        Called after a refresh, which had placed the folders of all of them.
        """
        rundir = RunDir(self._home.runs / job_id)
        here = {path.name for path in Checkpoints(rundir.checkpoints).list()}
        has_init = (rundir.path / "init").is_dir()

        def is_kept(name: str) -> bool:
            parts = name.split("/")
            if parts[0] == "checkpoints":
                return parts[1] in here
            return parts[0] != "init" or has_init

        self._replace(
            job_id,
            lambda old: replace(old, files={n: f for n, f in old.files.items() if is_kept(n)}),
        )

    def withdraw(self, job_id: str) -> None:
        """Remove a job from the store: first its index, so that it is gone even if interrupted."""
        copies.note_removal(self.bucket, job_id)
        self.bucket.delete([f"{job_id}/{index.NAME}"])
        self.bucket.delete(list(self.bucket.sizes(job_id)))
        self._pending.remove(job_id)

    def _replace(self, job_id: str, change: index.Change) -> Index:
        old, new = index.commit(self.bucket, job_id, change)
        self.bucket.delete(index.unused(old, new))
        return new

    # --- reading ----------------------------------------------------------------------------

    def ids(self) -> list[str]:
        """Return the ids of all jobs in the store."""
        return [name for name in self.bucket.folders() if is_job_id(name)]

    def refresh(self, job_id: str) -> None:
        """Update all files of a job on this machine except weights; of checkpoints the manifests.

        A job that is not in the store, or runs here, is left alone.
        """
        with self._reading(job_id) as now:
            self._note_read(job_id, now)
            if now is None:
                return
            rundir = RunDir(self._home.runs / job_id)
            small = {
                name: file
                for name, file in now.files.items()
                if (
                    file.bytes <= _LARGE_BYTES
                    and name.partition("/")[0] not in ("checkpoints", "init", "model")
                )
                or name.endswith(f"/{MANIFEST}")
            }
            fetching.fetch_files(self.bucket, rundir.path, small)
            segments = event_segments.segments(self.bucket, job_id)
            if not _has_length(rundir.events, event_segments.length(segments)):
                problem = event_segments.download(self.bucket, segments, rundir.events)
                if problem is not None:
                    log.warning("%s: %s", job_id, problem)
            fetching.remove_others(rundir, now)
            seen.note(rundir.path, now)

    def refresh_summaries(self, job_ids: Collection[str]) -> None:
        """Update the files of these jobs that lists show, many at a time."""
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._refresh_summary, job_ids))

    def _refresh_summary(self, job_id: str) -> None:
        if (self._home.runs / job_id / "result.json").is_file():
            return  # it has ended: a request for each such job would make lists slow
        with suppress(seen.WentBack), self._reading(job_id) as now:
            if now is not None:
                files = {name: file for name, file in now.files.items() if name in _SUMMARY}
                fetching.fetch_files(self.bucket, self._home.runs / job_id, files)

    def size_bytes(self, job_id: str, folder: str) -> int:
        """Return the bytes of a folder of a job in the store; 0 if it has none."""
        with suppress(NotFound):
            files = index.read(self.bucket, job_id).below(folder)
            return sum(file.bytes for file in files.values())
        return 0

    def fetch_model(
        self,
        job_id: str,
        *,
        on_begin: fetching.OnBegin = lambda name, total: None,
        on_bytes: OnBytes = lambda number: None,
    ) -> None:
        """Make the final model of a job complete on this machine, if it has one."""
        fetching.fetch_model(self._home, self.bucket, job_id, on_begin=on_begin, on_bytes=on_bytes)

    def fetch_checkpoint(self, job_id: str, step: int | None) -> None:
        """Complete a checkpoint on this machine; None: the latest. Raises CheckpointDamaged."""
        with self._reading(job_id) as now:
            if now is not None:
                rundir = RunDir(self._home.runs / job_id)
                fetching.fetch_checkpoint(self.bucket, rundir, now, step=step)

    @contextmanager
    def _reading(self, job_id: str) -> Iterator[Index | None]:
        """Keep workers from using the run directory in the block; yield None if one uses it.

        Raises WentBack.
        """
        with self._pending.fetching(job_id):
            now = None
            if self._pending.is_uploaded(job_id):
                with suppress(NotFound):
                    now = index.read(self.bucket, job_id)
                    seen.check(self.bucket, self._home.runs / job_id, now)
            yield now


def _has_length(path: Path, length: int) -> bool:
    try:
        return path.stat().st_size == length
    except FileNotFoundError:
        return False
