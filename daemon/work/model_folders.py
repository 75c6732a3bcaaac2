"""Where the model of a job is on this machine.

The spec of a job names folders as they are on the machine that submitted it. Run directories may be
in another folder here: initial weights in the job's own one, and models that other jobs trained.
"""

from __future__ import annotations

from pathlib import Path

from ...configs.config import ModelConfig
from ...jobs.errors import NotFound
from ..host import fetch
from ..runs.rundir import RunDir, trainer_of


def path_here(rundir: RunDir, path: str) -> str:
    """Return where a folder is here that the spec of the job in `rundir` names."""
    if is_own(rundir, path):
        own = rundir.path / "init"
        return str(own) if own.is_dir() else path
    return _in_runs(rundir.path.parent, path)


def is_own(rundir: RunDir, path: str) -> bool:
    """Whether a path names the weights that were placed in the job's run directory."""
    folder = Path(path)
    return folder.is_absolute() and folder.parts[-2:] == (rundir.path.name, "init")


def is_here(runs: Path, path: str) -> bool:
    """Whether the model folder at a path of a spec is on this machine, even if damaged."""
    try:
        fetch.folder_at_hand(ModelConfig(name="model", path=_in_runs(runs, path)))
    except fetch.NoModelFolder:
        return False
    except NotFound:
        return True  # the job will fail with the reason
    return True


def _in_runs(runs: Path, path: str) -> str:
    job_id = trainer_of(path)
    if job_id is None or Path(path).is_dir():
        return path
    return str(runs / job_id / "model")
