"""`warmd checkpoints verify --trl`: compares a job's first steps with TRL's stock trainer.

Both sides train in a process of their own (daemon.fork.verify_trl), on the CPU; no worker is
needed, and nothing of the job is changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import orjson

from ...configs.config import ModelConfig
from ...jobs.compute import cache
from ...jobs.errors import JobFailed, SpecError
from ...jobs.files.atomic import scratch_folder
from ...jobs.verify_trl.options import check_kind
from ..client.client import Client
from ..host import fetch


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the comparison.

    `steps`: {"step", "trl", "warmd"}, both with loss, grad_norm and learning_rate. `weights`: the
    largest difference of a weight after the last step, the largest change of one by the training,
    and the number of weights that differ by more than rounding. `differences`: one line each.
    `changed`: options that TRL has no equal for, one line each.
    """

    kind: str
    trl: str  # version
    steps: list[dict[str, Any]]
    weights: dict[str, Any]
    differences: list[str]
    changed: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether the sides differ by no more than rounding."""
        return not self.differences


def verify(client: Client, job_id: str, *, steps: int, report: Callable[[str], None]) -> Verdict:
    """Train both sides; `report` receives the progress.

    Raises SpecError for a job without a trainer in TRL, NotFound without its model, JobFailed if a
    side fails.
    """
    rundir = client.rundir(job_id)
    document = rundir.read_spec()
    check_kind(document["kind"])
    if document["spec"].get("time_limit") is not None:
        raise SpecError("job", f"must have steps, not a time limit, got {job_id}")
    folder = fetch.folder_at_hand(ModelConfig(**document["model"]))
    if folder is None:
        raise SpecError("model", f"must be on this machine, got {document['model']['path']}")
    # There the context of the job finds the home's cache of tokenized data sets.
    with scratch_folder(client.home.cache) as scratch:
        request = {
            "run_dir": str(rundir.path),
            "model": document["model"],
            "folder": str(folder),
            "scratch": str(scratch),
            "steps": steps,
        }
        found = _in_a_process(request, report)
    return Verdict(kind=document["kind"], trl=version("trl"), **found)


def _in_a_process(request: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """Send a request to a new process; return what it found. Raises JobFailed."""
    cache.keep_library_caches()
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "warmd.daemon.fork.verify_trl"]
    report("starting a process")
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended: its log says why
                child.stdin.write(orjson.dumps(request) + b"\n")
                child.stdin.flush()
            for line in child.stdout:
                message = orjson.loads(line)
                if "progress" in message:
                    report(message["progress"])
                elif "error" in message:
                    raise JobFailed(f"verify --trl: {message['error']}")
                else:
                    found: dict[str, Any] = message["found"]
                    return found
        finally:
            child.kill()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    raise JobFailed(f"verify --trl: the process ended: {lines[-1] if lines else 'without a word'}")
