"""The checkpoints of one job: committed whole or not at all, believed only when verified.

A checkpoint is a folder `checkpoint-N` with a manifest of its files' sizes and checksums. What a
dead process left half-written is never seen, and what the disk has damaged is passed over for the
one before.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson

from ..jobs.durable import recover, whole_folder
from ..jobs.errors import CheckpointDamaged

MANIFEST = "manifest.json"
SCHEMA = 1


class Checkpoints:
    """The checkpoints in `folder`, of which the `keep` newest stay.

    `on_skip` is told, in one line, why a checkpoint was passed over.
    """

    def __init__(
        self, folder: Path, *, keep: int = 3, on_skip: Callable[[str], None] | None = None
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.on_skip = on_skip

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose every byte is as committed, or None."""
        recover(self.folder)
        for path in reversed(self.list()):
            try:
                verify(path)
            except CheckpointDamaged as problem:
                if self.on_skip is not None:
                    self.on_skip(str(problem))
            else:
                return path
        return None

    @contextmanager
    def commit(self, step: int) -> Iterator[Path]:
        """Give an empty folder to write into; leaving the block makes it `checkpoint-{step}`."""
        with whole_folder(self.folder / f"checkpoint-{step}") as staging:
            yield staging
            _write_manifest(staging, step)
        self._prune(newest=step)

    def list(self) -> Sequence[Path]:
        """Return the folders of all checkpoints, oldest first, without looking into them."""
        found = {_step(path): path for path in self.folder.glob("checkpoint-*")}
        return [found[step] for step in sorted(found) if step >= 0]

    def _prune(self, newest: int) -> None:
        # Steps above the one just committed were passed over as damaged when this execution
        # began; they would push whole ones out if they counted.
        kept = [path for path in self.list() if _step(path) <= newest][-self.keep :]
        for path in self.list():
            if path not in kept:
                # The manifest goes first: a folder that is half gone must not look whole.
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)


def verify(path: Path) -> None:
    """Compare every file with the manifest. Raises CheckpointDamaged at the first difference."""
    try:
        manifest = orjson.loads((path / MANIFEST).read_bytes())
        if manifest["schema"] != SCHEMA or manifest["step"] != _step(path):
            raise CheckpointDamaged(f"{path.name}: {MANIFEST} is not of this checkpoint")
        for name, expected in manifest["files"].items():
            _verify_file(path, name, expected["bytes"], expected["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{path.name}: {error}") from None


def _verify_file(path: Path, name: str, size_bytes: int, sha256: str) -> None:
    found_bytes = (path / name).stat().st_size
    if found_bytes != size_bytes:
        raise CheckpointDamaged(f"{path.name}: {name} has {found_bytes} bytes, not {size_bytes}")
    if _sha256(path / name) != sha256:
        raise CheckpointDamaged(f"{path.name}: {name} does not match its checksum")


def _write_manifest(folder: Path, step: int) -> None:
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"schema": SCHEMA, "step": step, "files": files}
    (folder / MANIFEST).write_bytes(orjson.dumps(manifest))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step(path: Path) -> int:
    """Return the step in a folder's name, or -1 when it is not a checkpoint's."""
    match = re.fullmatch(r"checkpoint-(\d{1,15})", path.name)
    return int(match[1]) if match and path.is_dir() else -1
