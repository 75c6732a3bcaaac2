"""What a user of the queue does with jobs: submit, look, follow, stop, resume. Imports no torch."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson
import redis
from rq.job import Job, JobStatus

from ..configs.config import DaemonConfig, ModelConfig, redacted_url
from ..jobs.errors import Conflict, NotFound, SpecError, Unavailable
from ..jobs.spec import Spec
from . import fetch, joblist, keys, stream
from .home import Home
from .jobstore import ENDED, JobStore
from .rundir import RunDir, is_id_prefix, is_job_id
from .server import url_of
from .warmset import known_models

Method = TypeVar("Method", bound=Callable[..., Any])

_PATIENCE_S = 0.2  # between two tries to reach a server that is away
_RECENT = 32  # events that a look at a job reads, to find its last steps


def _needs_server(method: Method) -> Method:
    """Turn a server that is not there into Unavailable, with what to do about it."""

    @wraps(method)
    def wrapper(self: Client, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise self.unavailable(error) from error

    return cast(Method, wrapper)


class Client:
    """The jobs of one home, by way of its server."""

    def __init__(self, config: DaemonConfig) -> None:
        self.config = config
        self.home = Home(config.home)

    @cached_property
    def url(self) -> str:
        """The configured server, else the one that the daemon of this home uses or last used."""
        if self.config.redis_url is not None:
            return self.config.redis_url
        state = self.home.read_state()
        return state["url"] if state is not None else url_of(self.home)

    @cached_property
    def connection(self) -> redis.Redis:
        return keys.connect(self.url)

    @cached_property
    def store(self) -> JobStore:
        return JobStore(self.connection)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if "connection" in self.__dict__:
            self.connection.close()

    def unavailable(self, error: Exception) -> Unavailable:
        if self.url == url_of(self.home):
            return Unavailable(f"no daemon runs in {self.home.path}: start it with `warmd start`")
        return Unavailable(f"no server at {redacted_url(self.url)}: {error}")

    # --- submitting -------------------------------------------------------------------------

    def check(self, spec: Spec) -> dict[str, Any]:
        """Check a spec against files and models; return what its run directory will say.

        Raises SpecError or NotFound. Needs no server.
        """
        located = spec.located(Path.cwd())
        model = self._resolve_model(located)
        document: dict[str, Any] = {"spec": located.to_json(), "python_path": [str(Path.cwd())]}
        settings = None
        if model is not None:
            document["model"] = model.__dict__
            settings = _model_settings(model)
        located.check_inputs(settings)
        return document

    @_needs_server
    def submit(
        self,
        spec: Spec,
        *,
        front: bool = False,
        after: str | None = None,
        at: datetime | None = None,
        retries: int = 0,
        timeout_s: float | None = None,
    ) -> str:
        """Check and queue a job; return its id. Raises SpecError, NotFound or Unavailable.

        The run directory is whole before the job is queued, and gone again if it cannot be.
        """
        document = self.check(spec)
        self.connection.ping()
        if after is not None:
            after = self.find(after)
        self.home.create()
        rundir = RunDir.create(self.home.runs, spec.kind, document)
        try:
            self.store.enqueue(
                rundir.path.name,
                spec.queue,
                front=front,
                after=after,
                at=at,
                retries=retries,
                timeout_s=timeout_s,
            )
        except BaseException:
            rundir.remove()
            raise
        return rundir.path.name

    def _resolve_model(self, spec: Spec) -> ModelConfig | None:
        """What the spec's `model` names: a warm model, a configured one, a folder, or a hub id."""
        name = getattr(spec, "model", None)
        if name is None:
            return None
        known = {m.name: m for m in self.config.models} | known_models(self.home)
        if name in known:
            return known[name]
        folder = Path(name).expanduser()
        if folder.is_dir():
            return ModelConfig(name=folder.resolve().name, path=str(folder.resolve()))
        if name.count("/") == 1 and not name.startswith((".", "/", "~")):
            return ModelConfig(name=name.replace("/", "--"), path=name)
        raise SpecError(
            "model",
            f"must be a warm model ({', '.join(sorted(known)) or 'none'}), a model folder or a hub "
            f"id, got {name!r}",
        )

    # --- looking ----------------------------------------------------------------------------

    def find(self, text: str | None) -> str:
        """Return the id that an id, an unambiguous beginning of one, `-` or nothing means."""
        ids = sorted(
            (path.name for path in self.home.runs.glob("*") if is_job_id(path.name)),
            key=lambda job_id: job_id.split("-", 1)[1],
        )
        if text is None or text == "-":
            if not ids:
                raise NotFound(f"job: none in {self.home.runs} yet: `warmd submit` makes one")
            return ids[-1]
        if not is_id_prefix(text):
            raise SpecError(
                "job", f"must be a job id such as grpo-20260131-184200-x7f2, got {text[:80]!r}"
            )
        matches = [job_id for job_id in ids if job_id.startswith(text)]
        if text in matches:
            return text
        if len(matches) > 1:
            raise SpecError("job", f"{text!r} begins {len(matches)} ids: {', '.join(matches[:4])}")
        if not matches:
            raise NotFound(f"job: no job {text!r} in {self.home.runs}")
        return matches[0]

    def rundir(self, job_id: str) -> RunDir:
        return RunDir.open(self.home.runs, job_id)

    @_needs_server
    def job(self, job_id: str) -> dict[str, Any]:
        """Return all that is known of a job as plain values. Raises NotFound."""
        return self._views([self._fetch(job_id)])[0]

    @_needs_server
    def jobs(self, *, statuses: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Return every job, or those of some statuses, newest first."""
        found = [
            job
            for job in joblist.every_job(self.connection)
            if statuses is None or job._status in statuses
        ]
        found.sort(key=lambda job: job.created_at, reverse=True)
        return self._views(found)

    @_needs_server
    def queues(self) -> list[dict[str, Any]]:
        """Return how many jobs of each status every queue has."""
        return [{"name": name, **joblist.counts(self.connection, name)} for name in keys.QUEUES]

    @_needs_server
    def result(self, job_id: str) -> dict[str, Any] | None:
        """Return what the job made, or None while it has not."""
        result = self.rundir(job_id).read_result()
        if result is None:
            job = self._fetch(job_id)
            result = job.return_value() if job.get_status() == JobStatus.FINISHED else None
        return result

    def follow(
        self, job_id: str, *, live: bool = True, after_seq: int = 0
    ) -> Iterator[dict[str, Any] | None]:
        """Yield a job's events, and None for every half second of silence, until the job ends.

        A server that is away is waited for as long as the daemon of this home lives: it is being
        replaced, or the machine is short of breath. Raises Unavailable when the daemon is gone.
        """
        path = self.rundir(job_id).events

        def over() -> bool:
            return not live or self._fetch(job_id).get_status(refresh=False) in ENDED

        while True:
            follow = stream.follow(self.connection, job_id, path, after=after_seq, over=over)
            try:
                for event in follow:
                    if event is not None:
                        after_seq = event["seq"]
                    yield event
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if not self.home.is_locked():
                    raise self.unavailable(error) from error
                yield None
                time.sleep(_PATIENCE_S)
            else:
                return

    def _fetch(self, job_id: str) -> Job:
        rundir = self.rundir(job_id)
        job = self.store.fetch(job_id)
        if job is None:
            raise NotFound(
                f"job: {job_id} is not in the server, but its files are in {rundir.path}"
            )
        return job

    def _views(self, jobs: list[Job]) -> list[dict[str, Any]]:
        places = joblist.positions(self.connection)
        recent = stream.newest(self.connection, [job.id for job in jobs], count=_RECENT)
        numbers = joblist.execution_numbers(self.connection, jobs)
        return [
            self._view(job, last, number, places.get(job.id))
            for job, last, number in zip(jobs, recent, numbers, strict=True)
        ]

    def _view(
        self, job: Job, recent: list[dict[str, Any]], number: int, position: int | None
    ) -> dict[str, Any]:
        rundir = self.home.runs / job.id
        try:
            document = RunDir(rundir).read_spec()
        except Conflict:
            document = {}
        status = job.get_status(refresh=False).value
        is_scheduled = status == "scheduled"
        due = joblist.scheduled_at(self.connection, job) if is_scheduled else None
        steps = [event for event in recent if event["type"] == "step"]
        totals = [event["steps_total"] for event in recent if "steps_total" in event]
        failures = (event["error"] for event in recent if event["type"] == "failed")
        error = next(failures, None) or _last_line(job._exc_info)
        return {
            "id": job.id,
            "kind": job.id.split("-")[0],
            "status": status,
            "queue": job.origin,
            "model": document.get("spec", {}).get("model"),
            "step": next((event["step"] for event in recent if event["step"] is not None), 0),
            "steps_total": totals[0] if totals else None,
            "execution": number,
            "run_dir": str(rundir),
            "error": error if status in ("failed", "stopped") else None,
            "result": RunDir(rundir).read_result() if status == "finished" and document else None,
            "created_at": _seconds(job.created_at),
            "enqueued_at": _seconds(job.enqueued_at),
            "started_at": _seconds(job.started_at),
            "ended_at": _seconds(job.ended_at),
            "scheduled_at": due,
            "position": position,
            "after": list(job._dependency_ids),
            "worker": job.worker_name if status == "started" else None,
            "seconds_per_step": _pace(steps),
            "retries_left": job.retries_left or 0,
        }

    # --- steering ---------------------------------------------------------------------------

    @_needs_server
    def cancel(self, job_id: str) -> str:
        """Take a waiting job out ("canceled"), or have a running one save and stop ("stopping")."""
        return self._end(job_id, "cancel", "stopping")

    @_needs_server
    def kill(self, job_id: str) -> str:
        """Take a waiting job out ("canceled"), or end a running one now ("killing")."""
        return self._end(job_id, "kill", "killing")

    def _end(self, job_id: str, how: str, answer: str) -> str:
        job = self._fetch(job_id)
        while True:
            # A job may start or end between two of these.
            if self.store.cancel_waiting(job):
                return "canceled"
            if self.store.request_stop(job, how):
                return answer
            status = job.get_status()
            if status in ENDED:
                raise Conflict(f"job: {job_id} is {status.value} already")

    @_needs_server
    def resume(self, job_id: str, *, steps: int | None = None) -> str:
        """Queue an ended job again, to go on from its latest checkpoint, perhaps to more steps.

        Returns "queued", or "finished" when there is nothing left to do.
        """
        job = self._fetch(job_id)
        status = job.get_status()
        if status not in ENDED:
            raise Conflict(f"job: {job_id} is {status.value}: nothing to resume")
        rundir = self.rundir(job_id)
        document = rundir.read_spec()
        spec = _parse_spec(document)
        if steps is not None:
            revised = spec.extended(steps)
            if revised != spec:
                rundir.revise_spec(revised.to_json())
        if rundir.read_result() is not None and status == JobStatus.FINISHED:
            return "finished"
        if not self.store.enqueue_again(job):
            raise Conflict(f"job: {job_id} was resumed by somebody else")
        return "queued"


def _parse_spec(document: dict[str, Any]) -> Spec:
    from ..jobs import spec_class

    return spec_class(document["kind"]).parse(document["spec"])


def _model_settings(model: ModelConfig) -> dict[str, Any] | None:
    """The model's config.json; None for a hub id that is not on this disk yet."""
    if not model.path.startswith(fetch.BUILTIN) and not Path(model.path).is_absolute():
        return None
    path = fetch.local_folder(model) / "config.json"
    try:
        settings = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise SpecError(
            "model", f"must be a model folder, got {path} that is not JSON: {error}"
        ) from error
    if not isinstance(settings, dict):
        raise SpecError("model", f"must be a model folder, got {path} that is no JSON object")
    return settings


def _pace(steps: list[dict[str, Any]]) -> float | None:
    """Median seconds between consecutive steps of one execution, newest first."""
    gaps = [
        (newer["time"] - older["time"]) / (newer["step"] - older["step"])
        for newer, older in itertools.pairwise(steps)
        if newer["execution"] == older["execution"] and newer["step"] > older["step"]
    ]
    return round(statistics.median(gaps), 4) if gaps else None


def _seconds(when: datetime | None) -> float | None:
    return round(when.timestamp(), 3) if when is not None else None


def _last_line(text: str | None) -> str | None:
    return text.strip().splitlines()[-1] if text and text.strip() else None
