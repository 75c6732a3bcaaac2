"""The weights that a job trained: their files, and how they are linked or exported.

They are linked into the run directory of a job that starts from them, or exported to a folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...jobs.context import MANIFEST, step_of
from ...jobs.errors import CheckpointDamaged, Conflict, NotFound, SpecError
from ...jobs.files.atomic import fsync, make_folder
from ...jobs.models.adapters import is_model
from .checkpoints import Checkpoints, verify
from .rundir import RunDir

# Files of a checkpoint that are not the model's: jobs.snapshot.STATE_FILES needs torch to import.
STATE_FILES = (
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "job_state.pt",
    "trainer_state.json",
)


@dataclass(frozen=True)
class Weights:
    """A folder of a job with weights, configuration and tokenizer."""

    name: str  # JOB for its final model, JOB@STEP for a checkpoint
    folder: Path

    def files(self, *, with_optimizer: bool = False) -> Iterator[Path]:
        """Yield the files of the model, and perhaps of the training's state."""
        for path in sorted(self.folder.rglob("*")):
            is_state = path.parent == self.folder and path.name in STATE_FILES
            if path.is_file() and path.name != MANIFEST and (with_optimizer or not is_state):
                yield path


def final_model(rundir: RunDir) -> Weights:
    """Return the final weights of a finished job. Raises NotFound."""
    folder = rundir.path / "model"
    if rundir.read_result() is None or not is_model(folder):
        steps = ", ".join(str(step_of(path)) for path in Checkpoints(rundir.checkpoints).list())
        if not steps:
            raise NotFound(f"job: {rundir.path.name} has neither a final model nor a checkpoint")
        raise NotFound(
            f"job: {rundir.path.name} has no final model yet: "
            f"name a checkpoint as JOB@STEP, of {steps}"
        )
    return Weights(rundir.path.name, folder)


def checkpoint(
    rundir: RunDir, step: int | None = None, *, on_bytes: Callable[[int], None] | None = None
) -> Weights:
    """Return the verified weights of a checkpoint, by default of the latest undamaged one.

    Raises NotFound, and CheckpointDamaged for the given step. `on_bytes`: as in `verify`.
    """
    job_id, checkpoints = rundir.path.name, Checkpoints(rundir.checkpoints)
    found = {step_of(path): path for path in checkpoints.list()}
    if step is not None and step not in found:
        steps = ", ".join(map(str, found))
        if not steps:
            raise NotFound(f"checkpoint: {job_id} has none")
        raise NotFound(f"checkpoint: must be a step of {job_id} ({steps}), got {step}")
    for number in reversed(found) if step is None else [step]:
        try:
            verify(found[number], on_bytes=on_bytes)
        except CheckpointDamaged:
            if step is not None:
                raise
        else:
            return Weights(f"{job_id}@{number}", found[number])
    raise NotFound(f"checkpoint: {job_id} has none{' that is undamaged' if found else ''}")


def link(weights: Weights, folder: Path) -> None:
    """Create `folder` with the files of the model, by hard links where the file system has them.

    Pruning the checkpoint does not affect them. Only for folders whose files are never modified.
    """
    for source in weights.files():
        target = folder / source.relative_to(weights.folder)
        make_folder(target.parent)
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            _copy(source, target)
            target.chmod(0o600)
        fsync(target.parent)


def export(weights: Weights, folder: Path, *, with_optimizer: bool = False) -> int:
    """Copy the files of the model into a new folder, whole or not at all; return their bytes.

    Copies, not links: a later save into the folder must not modify the checkpoint.
    Raises SpecError as `new_folder`, Conflict when the job pruned the checkpoint meanwhile.
    """
    size_bytes = 0
    with new_folder(folder) as staging:
        try:
            for source in weights.files(with_optimizer=with_optimizer):
                target = staging / source.relative_to(weights.folder)
                target.parent.mkdir(exist_ok=True)
                size_bytes += _copy(source, target)
                fsync(target.parent)
        except FileNotFoundError as error:
            raise Conflict(f"checkpoint: {weights.name} was pruned meanwhile: {error}") from error
    return size_bytes


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that becomes `folder` at the end of the block, and is removed on an error.

    Raises SpecError if `folder` exists.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise SpecError("dest", f"must be a new folder, got {folder}, which is there")
    if not folder.parent.is_dir():
        raise SpecError("dest", f"must be in a folder that is there, got {folder}")
    # Not jobs.durable's whole_folder: it sweeps the parent, and this one is the user's.
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        staging.mkdir()
        yield staging
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    fsync(folder.parent)


def _copy(source: Path, target: Path) -> int:
    shutil.copyfile(source, target)
    fsync(target)
    return target.stat().st_size
