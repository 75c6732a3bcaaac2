"""Views of training jobs, their events and checkpoints in the shape of OpenAI's API.

They are read from run directories and the queue, so they include jobs of the command line. Every
function reads files or Redis: call it in a thread.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ....jobs.environments.tasks import SEEDS
from ....jobs.errors import NotFound
from ....jobs.ids import is_job_id, kind_of
from ...client.client import Client
from ...lifecycle.statuses import UNREGISTERED
from ...runs import events
from ...runs.checkpoints import Checkpoints
from ..core.models_index import CHECKPOINT
from ..http.strict import place_after
from . import result_files
from .methods import method_of

ABOUT = "http"  # key in spec.json for the fields of the request that are not options

_STATUSES = {
    "queued": "queued",
    "deferred": "queued",
    "scheduled": "queued",
    "started": "running",
    "finished": "succeeded",
    "failed": "failed",
    "stopped": "cancelled",
    "canceled": "cancelled",
}
_LEVELS = {"failed": "error", "warning": "warn", "divergence": "warn", "stall": "warn"}
_COMMON = {"seq", "execution", "time", "type"}  # fields of every event


def _check(client: Client, job_id: str) -> None:
    if not is_job_id(job_id) or method_of(kind_of(job_id)) is None:
        raise NotFound(f"fine_tuning_job_id: no training job {job_id[:80]!r}")
    client.rundir(job_id)


def view(client: Client, job_id: str) -> dict[str, Any]:
    """Return a job. Raises NotFound unless it is a training job."""
    _check(client, job_id)
    document = client.rundir(job_id).read_spec()
    created = int(datetime.fromisoformat(document["created"]).timestamp())
    spec, about = document["spec"], document.get(ABOUT) or {}
    kind = document["kind"]
    job = client.jobs.get(job_id)
    status = _status(job)
    made = client.rundir(job_id).path / "model"
    http = method_of(kind)
    assert http is not None
    hidden = {"model", "seed", http.training_file, http.validation_file}
    options = {
        name: value for name, value in spec.items() if value is not None and name not in hidden
    }
    method = {"type": http.type, http.type: {"hyperparameters": options}}
    return {
        "id": job_id,
        "object": "fine_tuning.job",
        "created_at": created,
        "finished_at": _seconds(job["ended_at"]),
        "estimated_finish": _estimated_finish(client, job) if status == "running" else None,
        "status": status,
        "model": spec["model"] or spec["architecture"],
        "fine_tuned_model": job_id if status == "succeeded" and made.is_dir() else None,
        "training_file": about.get("training_file")
        or spec[http.training_file]
        or (SEEDS if spec.get("environment") else http.builtin_data),
        "validation_file": about.get("validation_file")
        or (http.validation_file and spec[http.validation_file]),
        "method": method,
        "hyperparameters": {
            "n_epochs": spec.get("epochs", "auto"),
            "batch_size": spec.get("prompts_per_step", spec.get("batch_size")) or "auto",
            "learning_rate_multiplier": "auto",
        },
        "seed": spec["seed"],
        "metadata": about.get("metadata"),
        "error": _error(job) if status == "failed" else None,
        "organization_id": "warmd",
        "result_files": [result_files.id_of(job_id)] if status == "succeeded" else [],
        "trained_tokens": None,
        "integrations": about.get("integrations"),
    }


def _status(job: dict[str, Any]) -> str:
    if job["status"] == UNREGISTERED:  # unknown to Redis: the run directory has the outcome
        return "cancelled" if job["result"] is None else "succeeded"
    return "paused" if job["paused"] else _STATUSES[job["status"]]


def _seconds(when: float | None) -> int | None:
    return int(when) if when is not None else None


def _error(job: dict[str, Any]) -> dict[str, Any]:
    return {"code": "job_failed", "message": job["error"] or "see `warmd logs`", "param": None}


def _estimated_finish(client: Client, job: dict[str, Any]) -> int | None:
    return None if job["eta_s"] is None else int(client.now() + job["eta_s"])


def events_of(client: Client, job_id: str, after: str | None, limit: int) -> dict[str, Any]:
    """Return a page of a job's events, newest first, starting after the id `after`."""
    _check(client, job_id)
    found = [_event(job_id, event) for event in events.read(client.rundir(job_id).events)]
    return _page(found[::-1], after, limit)


def _event(job_id: str, event: dict[str, Any]) -> dict[str, Any]:
    data = {name: value for name, value in event.items() if name not in _COMMON}
    is_metrics = event["type"] in ("step", "eval")
    words = [event["type"].replace("_", " ")]
    if event["step"] is not None:
        words.append(f"{event['step']}")
    for name in ("message", "reason", "error", "loss", "reward"):
        if isinstance(value := data.get(name), int | float):
            words.append(f"{name} {value:.4g}")
        elif value:
            words.append(str(value))
    return {
        "id": f"ftevent-{job_id}-{event['seq']}",
        "object": "fine_tuning.job.event",
        "created_at": int(event["time"]),
        "level": _LEVELS.get(event["type"], "info"),
        "type": "metrics" if is_metrics else "message",
        "message": " ".join(words),
        "data": data,
    }


def checkpoints_of(client: Client, job_id: str, after: str | None, limit: int) -> dict[str, Any]:
    """Return a page of a job's checkpoints, newest first."""
    _check(client, job_id)
    rundir = client.rundir(job_id)
    steps = {
        event["step"]: event for event in events.read(rundir.events) if event["type"] == "step"
    }
    found = []
    for path in reversed(Checkpoints(rundir.checkpoints).list()):
        step = int(path.name.rpartition("-")[2])
        numbers = {
            name: value
            for name, value in steps.get(step, {}).items()
            if isinstance(value, int | float) and name not in _COMMON
        }
        found.append(
            {
                "id": f"{CHECKPOINT}{job_id}-{step}",
                "object": "fine_tuning.job.checkpoint",
                "created_at": int(path.stat().st_mtime),
                "fine_tuning_job_id": job_id,
                "fine_tuned_model_checkpoint": f"{job_id}@{step}",
                "step_number": step,
                "metrics": {**numbers, "step": step, "train_loss": numbers.get("loss")},
            }
        )
    page = _page(found, after, limit)
    ids = [checkpoint["id"] for checkpoint in page["data"]]
    return {
        **page,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def _page(found: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    if after is not None:
        found = found[place_after([item["id"] for item in found], after) :]
    return {"data": found[:limit], "has_more": len(found) > limit}
