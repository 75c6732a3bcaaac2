"""Result files of OpenAI's fine-tuning jobs: the metrics of each step as CSV, made on request."""

from __future__ import annotations

import csv
import io

from ....jobs.errors import NotFound
from ....jobs.ids import is_job_id, kind_of
from ...client.client import Client
from ...reports.columns import columns_of
from ...runs import events
from ..core.file_store import FileObject
from .methods import method_of

_PREFIX = "file-"
_FILENAME = "step_metrics.csv"
_NAMES = {  # those of OpenAI's supervised fine-tuning
    "loss": "train_loss",
    "mean_token_accuracy": "train_accuracy",
    "eval_loss": "valid_loss",
    "eval_mean_token_accuracy": "valid_mean_token_accuracy",
}


def id_of(job_id: str) -> str:
    """Return the id of a job's result file."""
    return _PREFIX + job_id


def job_of(file_id: str) -> str | None:
    """Return the training job whose result file has this id; None for another id."""
    job_id = file_id.removeprefix(_PREFIX)
    if not file_id.startswith(_PREFIX) or not is_job_id(job_id):
        return None
    return None if method_of(kind_of(job_id)) is None else job_id


def describe(client: Client, job_id: str) -> FileObject:
    """Describe a result file. Raises NotFound."""
    size, ended = len(content(client, job_id)), client.jobs.get(job_id)["ended_at"]
    return FileObject(
        id=id_of(job_id),
        bytes=size,
        created_at=int(ended or 0),
        filename=_FILENAME,
        purpose="fine-tune-results",
    )


def content(client: Client, job_id: str) -> bytes:
    """Return a result file: a row for each step. Raises NotFound."""
    rundir = client.rundir(job_id)
    if rundir.read_result() is None:
        raise NotFound(f"file_id: {job_id} has not finished: it has no result file yet")
    columns = columns_of(events.read(rundir.events))
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([_NAMES.get(name, name) for name in columns])
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()
