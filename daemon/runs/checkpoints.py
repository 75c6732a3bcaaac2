"""The checkpoints of one job: committed atomically, and verified before use.

A checkpoint is a folder `checkpoint-N` with a manifest of its files' sizes and checksums. A
checkpoint that a dead process left half-written is never seen; if one is damaged, the one before it
is used.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import xxhash

from ...jobs.context import MANIFEST, checkpoint_name, step_of
from ...jobs.errors import CheckpointDamaged
from ...jobs.files.atomic import recover, whole_folder
from .directio import DirectFile
from .fence import Fence
from .saving import Save

SCHEMA = 2
_BLOCK_BYTES = 1 << 22


class Checkpoints:
    """The checkpoints in `folder`, of which the `keep` newest and the best stay.

    `best`: the metric of the best one, and whether lower is better. `fence`: the right of this
    execution to write; None if nothing can supersede it. `on_warning` receives a line
    about a checkpoint that was skipped or cannot be removed. `before_commit` flushes files
    that must be on the disk before a checkpoint is, such as the events; it is called in the thread
    of a save and may raise OSError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        best: tuple[str, bool] | None = None,
        fence: Fence | None = None,
        on_warning: Callable[[str], None] = lambda message: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.best = best
        self.fence = fence
        self.on_warning = on_warning
        self._before_commit = before_commit
        self._saving: Save | None = None  # the latest

    def latest(self) -> Path | None:
        """Return the newest checkpoint that matches its manifest byte for byte, or None."""
        recover(self.folder)
        for path in reversed(self.list()):
            try:
                verify(path)
            except CheckpointDamaged as problem:
                self.on_warning(str(problem))
            else:
                return path
        return None

    @contextmanager
    def commit(self, step: int, about: Mapping[str, Any] | None = None) -> Iterator[Staging]:
        """Yield an empty folder to fill; leaving the block makes it the checkpoint of `step`.

        `about` goes into the manifest. An exception inside the block leaves no trace. Surplus
        checkpoints are removed after the commit. Raises Superseded, before and after the block,
        once a later execution has begun.
        """
        self._check_fence()
        with whole_folder(self.folder / checkpoint_name(step)) as folder:
            staging = Staging(folder)
            yield staging
            execution = None if self.fence is None else self.fence.execution
            _write_manifest(staging, step, about or {}, execution)
            self._before_commit()
            self._check_fence()
        for path in self.surplus(newest=step):
            try:
                remove(path)
            except OSError as problem:  # the new checkpoint exists in any case
                self.on_warning(f"{path.name}: cannot be removed: {problem}")

    def _check_fence(self) -> None:
        if self.fence is not None:
            self.fence.check()

    def save(
        self,
        step: int,
        prepare: Callable[[Staging], Callable[[], None]],
        *,
        about: Mapping[str, Any],
    ) -> Save:
        """Commit a checkpoint concurrently with the caller (jobs.context.Checkpoints)."""
        path = self.folder / checkpoint_name(step)
        rest = ExitStack()
        try:
            with ExitStack() as stack:
                write = prepare(stack.enter_context(self.commit(step, about)))
                rest = stack.pop_all()
        except OSError as problem:  # the same full disk that the thread may meet
            write = _raising(problem)

        def finish() -> int:
            with rest:
                write()
            return size_bytes(path)

        self._saving = Save(step, path, finish)
        return self._saving

    def settle(self) -> None:
        """Wait for a save that is in flight: its process must not end before it."""
        if self._saving is not None:
            self._saving.outcome(patience_s=None)

    def about(self, checkpoint: Path) -> dict[str, Any]:
        """Return the metadata that was committed with a checkpoint.

        Raises CheckpointDamaged.
        """
        about: dict[str, Any] = read_manifest(checkpoint)["about"]
        return about

    def list(self) -> Sequence[Path]:
        """Return the folders of all checkpoints, oldest first, without reading them."""
        found = {step_of(path): path for path in self.folder.glob("checkpoint-*") if path.is_dir()}
        return [found[step] for step in sorted(found) if step >= 0]

    def best_one(self) -> Path | None:
        """Return the checkpoint with the best metric, the later of equals; None without any."""
        if self.best is None:
            return None
        name, lower_is_better = self.best
        scores = {}
        for path in self.list():
            try:
                value = self.about(path).get("metrics", {}).get(name)
            except CheckpointDamaged:
                continue
            if isinstance(value, int | float):
                scores[path] = -value if lower_is_better else value
        return max(scores, key=lambda path: (scores[path], step_of(path))) if scores else None

    def surplus(self, *, newest: int | None = None) -> Sequence[Path]:
        """Return the checkpoints that need not be kept.

        With `newest`, a step that was just committed, those above it are among them: they were
        passed over as damaged when this execution began, and would push whole ones out.
        """
        every = self.list()
        counting = [path for path in every if newest is None or step_of(path) <= newest]
        kept = {*counting[-self.keep :], self.best_one()}
        return [path for path in every if path not in kept]


class Staging:
    """The folder of a checkpoint that is being filled (jobs.context.Staging)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, DirectFile] = {}  # written through `open`, by name

    def open(self, name: str) -> DirectFile:
        """Open a new file for a large amount of data; close it before the folder is committed."""
        self.files[name] = DirectFile(self.path / name)
        return self.files[name]


def verify(path: Path, *, on_bytes: Callable[[int], None] | None = None) -> None:
    """Compare every file with the manifest. Raises CheckpointDamaged at the first difference.

    `on_bytes` is called with the number of bytes read since its last call.
    """
    for name, expected in read_manifest(path)["files"].items():
        try:
            found_bytes = (path / name).stat().st_size
            if found_bytes != expected["bytes"]:
                raise CheckpointDamaged(
                    f"{path.name}: {name} has {found_bytes} bytes, not {expected['bytes']}"
                )
            if _checksum(path / name, on_bytes) != expected["xxh3_128"]:
                raise CheckpointDamaged(f"{path.name}: {name} does not match its checksum")
        except (OSError, KeyError, TypeError) as error:
            raise CheckpointDamaged(f"{path.name}: {name}: {error}") from None


def remove(path: Path) -> None:
    """Delete a checkpoint, manifest first: a half-deleted one must not look complete."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def size_bytes(path: Path) -> int:
    """Return the disk space of a checkpoint."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def expected_bytes(path: Path) -> int:
    """Return the size of a checkpoint by its manifest; its other files may be elsewhere."""
    try:
        files = read_manifest(path)["files"].values()
        return int(sum(file["bytes"] for file in files)) + (path / MANIFEST).stat().st_size
    except (CheckpointDamaged, KeyError, TypeError):
        return size_bytes(path)


def _write_manifest(
    staging: Staging, step: int, about: Mapping[str, Any], execution: int | None
) -> None:
    folder, files = staging.path, {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name in staging.files:
            checksum = staging.files[name].checksum  # it is not read again here
        elif path.is_file():
            checksum = _checksum(path)
        else:
            continue
        files[name] = {"bytes": path.stat().st_size, "xxh3_128": checksum}
    about = {"time": round(time.time(), 3), **about}
    manifest = {"schema": SCHEMA, "step": step, "about": about, "files": files}
    if execution is not None:
        manifest["execution"] = execution
    document = {"manifest": manifest, "xxh3_128": xxhash.xxh3_128_hexdigest(_plain(manifest))}
    (folder / MANIFEST).write_bytes(_plain(document))


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises CheckpointDamaged."""
    try:
        content = (path / MANIFEST).read_bytes()
        document = orjson.loads(content)
        manifest: dict[str, Any] = document["manifest"]
        if _plain(document) != content or document["xxh3_128"] != xxhash.xxh3_128_hexdigest(
            _plain(manifest)
        ):
            raise CheckpointDamaged(f"{path.name}: {MANIFEST} does not match its checksum")
        if manifest["schema"] != SCHEMA or manifest["step"] != step_of(path):
            raise CheckpointDamaged(f"{path.name}: {MANIFEST} is not of this checkpoint")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{path.name}: {MANIFEST}: {error}") from None
    return manifest


def _raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def _plain(value: Any) -> bytes:
    return orjson.dumps(value)


def _checksum(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    # Detects damage, not tampering: xxh3 reads 32 GB/s on the development machine, sha256 2 GB/s.
    checksum = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return checksum.hexdigest()
