"""Uploads the run directory of one execution while it runs, in the order in which it may be seen.

It first notes which checkpoints are committed, then uploads the events, then content, and commits
the index last: a resume from a checkpoint finds the events of all steps before it.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...jobs.context import MANIFEST, checkpoint_name, step_of
from ...jobs.errors import CheckpointDamaged
from ..runs.checkpoints import Checkpoints, read_manifest
from ..runs.rundir import RunDir
from . import index, run_files, seen
from .bucket import Bucket
from .content import Transfer
from .event_segments import EventUpload
from .index import Index, StoredFile
from .pending import Pending

log = logging.getLogger(__name__)

_PERIOD_S = 10.0  # between two uploads of events and files that grow
_LARGE_BYTES = 16 << 20  # other files from this size on are uploaded at the end only
_STAGING = ".upload"  # links to the checkpoint that is being uploaded: training may prune it
# Files written by commands (client), files of this machine only, and files uploaded separately.
_NOT_OTHERS = (
    *("spec.json", "labels.json", "init", "execution", "lock"),
    *("events.jsonl", "checkpoints"),
)


class RunUpload:
    """The uploads of one execution."""

    def __init__(self, bucket: Bucket, rundir: RunDir, pending: Pending) -> None:
        """Raises StoreUnavailable, NotFound and Conflict."""
        self.execution = pending.execution
        self._bucket = bucket
        self._rundir = rundir
        self._job_id = rundir.path.name
        self._index = index.read(bucket, self._job_id)
        self._transfer = Transfer(bucket, self._job_id, pending.execution)
        self._events = EventUpload(
            bucket,
            self._job_id,
            rundir.events,
            execution=pending.execution,
            start=pending.events_from,
        )
        self._damaged: set[str] = set()  # checkpoints that do not match their manifest
        self._missing: set[str] = set()  # checkpoints in the index that were not here last time
        self._seen: dict[str, tuple[int, int]] = {}  # other files, as uploaded: time and bytes
        self._uploaded_at = float("-inf")
        shutil.rmtree(rundir.path / _STAGING, ignore_errors=True)  # of a process that was killed

    def is_due(self) -> bool:
        """Whether there may be something to upload."""
        is_time = time.monotonic() - self._uploaded_at > _PERIOD_S
        return is_time or self._next_checkpoint() is not None

    def advance(self, *, is_last: bool) -> None:
        """Upload the changes; `is_last`: nothing is written any more, so everything is uploaded.

        Raises StoreUnavailable, Superseded and OSError.
        """
        while True:
            checkpoint = self._next_checkpoint()
            gone = self._gone_checkpoints()
            if checkpoint is None and not is_last:
                has_result = False
            else:
                has_result = self._rundir.read_result() is not None
            self._events.upload()
            files = {} if checkpoint is None else self._upload_checkpoint(checkpoint)
            if checkpoint is None:
                files |= self._upload_others(is_last=is_last, has_result=has_result)
            self._commit(files, gone, is_last=is_last and checkpoint is None)
            if checkpoint is None:
                break
        self._uploaded_at = time.monotonic()

    def remove_unused(self) -> None:
        """Delete content that no commit refers to, left by uploads that were interrupted.

        Only that of this execution and of earlier ones: a later one may have begun elsewhere.
        """
        used = {file.key for file in self._index.files.values()}
        folder = f"{self._job_id}/data"
        found = self._bucket.sizes(folder)
        older = [key for key in found if _execution_of(key) <= self.execution]
        self._bucket.delete([key for key in older if key not in used])

    # --- checkpoints ------------------------------------------------------------------------

    def _next_checkpoint(self) -> Path | None:
        """The newest checkpoint that is here and not in the index.

        The newest first: with a slow network training prunes the older ones meanwhile.
        """
        stored = self._index.checkpoints()
        for path in reversed(Checkpoints(self._rundir.checkpoints).list()):
            if step_of(path) not in stored and path.name not in self._damaged:
                return path
        return None

    def _gone_checkpoints(self) -> set[str]:
        """The checkpoints in the index that training has removed: missing here twice in a row.

        A checkpoint that is being replaced is missing for a moment.
        """
        here = {step_of(path) for path in Checkpoints(self._rundir.checkpoints).list()}
        missing = {f for step, f in self._index.checkpoints().items() if step not in here}
        gone = missing & self._missing
        self._missing = missing
        return gone

    def _upload_checkpoint(self, path: Path) -> dict[str, StoredFile]:
        """Upload a checkpoint; return its files, or none if it was removed or is damaged."""
        staging = self._rundir.path / _STAGING
        try:
            staging.mkdir(mode=0o700)
            linked = _link(path, staging / path.name)
            return self._upload_linked(linked)
        except FileNotFoundError:  # pruned before it was linked
            return {}
        except CheckpointDamaged as problem:
            log.warning("%s: not uploaded: %s", self._job_id, problem)
            self._damaged.add(path.name)
            return {}
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _upload_linked(self, path: Path) -> dict[str, StoredFile]:
        known = self._known()
        files = {}
        for name, expected in read_manifest(path)["files"].items():
            content = (expected["xxh3_128"], expected["bytes"])
            file = self._transfer.upload(path / name, known, digest=content[0])
            if file.content != content:
                self._bucket.delete([file.key])
                raise CheckpointDamaged(f"{path.name}: {name} does not match its checksum")
            known[content] = file
            files[f"checkpoints/{path.name}/{name}"] = file
        manifest = self._transfer.upload(path / MANIFEST, known)
        return {**files, f"checkpoints/{path.name}/{MANIFEST}": manifest}

    # --- other files ------------------------------------------------------------------------

    def _upload_others(self, *, is_last: bool, has_result: bool) -> dict[str, StoredFile]:
        """Upload the other files that have changed; return them."""
        known = self._known()
        files = {}
        for name, path in self._others().items():
            with suppress(FileNotFoundError):
                found = path.stat()
                state = (found.st_mtime_ns, found.st_size)
                is_large = found.st_size >= _LARGE_BYTES
                if self._seen.get(name) == state or (is_large and not is_last):
                    continue
                if name == "result.json" and not has_result:
                    continue
                files[name] = self._transfer.upload(path, known)
                known[files[name].content] = files[name]
                self._seen[name] = state
        return files

    def _others(self) -> dict[str, Path]:
        return dict(run_files.files(self._rundir.path, without=_NOT_OTHERS))

    # --- the index --------------------------------------------------------------------------

    def _commit(self, files: Mapping[str, StoredFile], gone: set[str], *, is_last: bool) -> None:
        others = self._others() if is_last else None

        def change(old: Index) -> Index:
            kept = {
                name: file
                for name, file in old.files.items()
                if not any(name.startswith(f"{folder}/") for folder in gone)
                and (others is None or name in others or name.partition("/")[0] in _NOT_OTHERS)
            }
            return replace(old, files={**kept, **files})

        old, self._index = index.commit(
            self._bucket, self._job_id, change, execution=self.execution
        )
        self._bucket.delete(index.unused(old, self._index))
        seen.note(self._rundir.path, self._index)  # last: on a full disk it fails

    def _known(self) -> dict[tuple[str, int], StoredFile]:
        return {file.content: file for file in self._index.files.values()}


def remove_leftovers(bucket: Bucket, job_id: str) -> None:
    """Delete objects of a job that were uploaded after its removal from the store.

    A removal deletes the existing objects; an upload in progress may add more, without an index.
    """
    if bucket.get(f"{job_id}/{index.NAME}") is None:
        bucket.delete(list(bucket.sizes(job_id)))


def _link(path: Path, target: Path) -> Path:
    """Link all files of a checkpoint. Raises FileNotFoundError when it is removed meanwhile."""
    target.mkdir(mode=0o700)
    assert target.name == checkpoint_name(step_of(path))
    for root, _, names in os.walk(path):
        folder = target / Path(root).relative_to(path)
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            try:
                os.link(Path(root, name), folder / name)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without links
                shutil.copyfile(Path(root, name), folder / name)
    if not (target / MANIFEST).is_file():
        raise FileNotFoundError(target / MANIFEST)
    return target


def _execution_of(key: str) -> int:
    number = key.rpartition("/")[2].partition("-")[0]
    return int(number) if number.isdigit() else 0
