"""A session with a daemon: submit jobs, list them, and request completions."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, overload

import orjson

from ...configs.config import load
from ...configs.labels import read_labels
from ...configs.values import ConfigError
from ...jobs import spec_class
from ...jobs.errors import JobFailed, SpecError
from ..client import control
from ..client.client import Client
from ..lifecycle.queueing import Queueing
from ..lifecycle.statuses import PAUSABLE, PAUSED, shown
from ..lifecycle.view import JobFilter, listed_kinds
from ..runs.weights import Weights
from .curriculum import Curriculum
from .html import table_html
from .job import Job
from .sweep import Sweep


def connect(home: str | os.PathLike[str] | None = None, *, redis_url: str | None = None) -> Session:
    """Return a session with the daemon of a home; it connects at its first call.

    `home`: the folder that holds the daemon's state (default: as for the command line, WARMD_HOME
    or ~/.local/state/warmd). `redis_url`: the Redis that the home's jobs are in, where the
    settings of the home do not name it. Raises ConfigError for wrong settings.
    """
    overrides = {} if redis_url is None else {"redis_url": redis_url}
    return Session(Client(load(home=None if home is None else Path(home), overrides=overrides)))


class JobList(list[Job]):
    """Jobs that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return table_html([job.info() for job in self])


class Session:
    """The jobs and models of one home."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def submit(
        self,
        kind: str,
        /,
        *,
        name: str | None = None,
        tags: Sequence[str] = (),
        init_from: Job | str | None = None,
        front: bool = False,
        after: Job | str | None = None,
        at: datetime | None = None,
        retries: int = 0,
        timeout_s: float | None = None,
        needs: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Job:
        """Check and queue a job; return it. `options` are those of the kind (docs/options.md).

        `init_from`: a job, or JOB@STEP, whose weights it starts from. `after`: start only when that
        job has finished. `at`: queue it then. `retries`: how often a failed job is tried again.
        `timeout_s`: maximum running time. `needs`: labels of the machine that is to run it, such as
        {"gpu": "h200", "memory": "40G"}. User code is imported from the working directory.
        Raises SpecError (a wrong option: nothing is queued), NotFound and Unavailable.
        """
        values, init = self._values(kind, options, init_from)
        job_id = self._client.jobs.submit(
            spec_class(kind).parse(values),
            _queueing(
                name=name,
                tags=tags,
                front=front,
                after=after,
                at=at,
                retries=retries,
                timeout_s=timeout_s,
                needs=needs,
            ),
            init=init,
        )
        return Job(self._client, job_id)

    def sweep(
        self,
        kind: str,
        /,
        *,
        over: Mapping[str, Sequence[Any]] | None = None,
        seeds: int | None = None,
        array: int | None = None,
        halving: int | None = None,
        search: str | None = None,
        trials: int | None = None,
        parallel: int | None = None,
        metric: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        init_from: Job | str | None = None,
        front: bool = False,
        after: Job | str | None = None,
        at: datetime | None = None,
        retries: int = 0,
        timeout_s: float | None = None,
        needs: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Sweep:
        """Queue a job for each combination of values and each seed; return all as a sweep.

        `over`: options with their values, as `{"learning_rate": [1e-5, 1e-4]}`. `seeds`: jobs per
        combination. `array`: jobs that differ in the seed and in `{index}` of text options.
        `halving`: continue only the best 1/N at each comparison. `search`: "optuna" chooses the
        values of `trials` combinations, `parallel` of them at a time, and takes ranges, too, as
        `"1e-6..1e-3:log"`. `metric`: of the comparison. The rest is as for `submit`.
        """
        varied: dict[str, Any] = {"sweep": over, "seeds": seeds, "array": array}
        varied |= {"halving": halving, "metric": metric}
        varied |= {"search": search, "trials": trials, "parallel": parallel}
        given = {option: value for option, value in varied.items() if value is not None}
        if not given:
            raise SpecError("over", "must be given, or else seeds or array, got none")
        values, init = self._values(kind, options, init_from)
        sweep_id = self._client.groups.submit_sweep(
            kind,
            values,
            given,
            _queueing(
                name=name,
                tags=tags,
                front=front,
                after=after,
                at=at,
                retries=retries,
                timeout_s=timeout_s,
                needs=needs,
            ),
            init=init,
        )
        return Sweep(self._client, sweep_id)

    def sweeps(self, *, limit: int | None = 20) -> list[Sweep]:
        """Return sweeps, newest first; `limit`: None for all."""
        return [Sweep(self._client, line["id"]) for line in self._client.groups.sweeps(limit)]

    def curriculum(
        self,
        kind: str,
        /,
        *,
        stages: Sequence[Mapping[str, Any]],
        gate: Mapping[str, Any] | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        init_from: Job | str | None = None,
        front: bool = False,
        retries: int = 0,
        timeout_s: float | None = None,
        needs: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Curriculum:
        """Queue a training in stages, each from the weights of the one before.

        `stages`: options of each, with `name` and `gate=False` as in a job file. `gate`: options of
        the evaluations between them; None for no gates. The rest is as for `submit`.
        """
        values, init = self._values(kind, options, init_from)
        given = {"stages": [dict(stage) for stage in stages]}
        curriculum_id = self._client.groups.submit_curriculum(
            kind,
            values,
            given if gate is None else {**given, "gate": dict(gate)},
            _queueing(
                name=name,
                tags=tags,
                front=front,
                retries=retries,
                timeout_s=timeout_s,
                needs=needs,
            ),
            init=init,
        )
        return Curriculum(self._client, curriculum_id)

    def curricula(self, *, limit: int | None = 20) -> list[Curriculum]:
        """Return curricula, newest first; `limit`: None for all."""
        return [
            Curriculum(self._client, line["id"]) for line in self._client.groups.curricula(limit)
        ]

    def _values(
        self, kind: str, options: Mapping[str, Any], init_from: Job | str | None
    ) -> tuple[dict[str, Any], Weights | None]:
        """Return the raw options of a job with the defaults of the home, and initial weights."""
        values = {**self._client.config.defaults.get(kind, {}), **options}
        if init_from is None:
            return values, None
        if "model" in options:
            raise SpecError("init_from", "must not be given together with model")
        init = self._client.models.weights(_id(init_from), kind)
        return {**values, "model": init.name}, init

    def job(self, job: str) -> Job:
        """Return a job by its id, a unique prefix of it or its name; `-`: the latest.

        Raises NotFound.
        """
        return Job(self._client, self._client.find(job))

    def jobs(
        self,
        *,
        status: str | Sequence[str] | None = None,
        kind: str | Sequence[str] | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        limit: int | None = 20,
    ) -> JobList:
        """Return trainings and evaluations, newest first; a notebook shows them as a table.

        `status`, `kind`: only jobs with one of these; answers have the kind infer. `name`: a
        pattern such as `lr-*`. `tags`: only jobs with all of these. `limit`: None for all.
        """
        wanted = _words(status)
        # A paused job is a started or scheduled one to Redis.
        statuses = None if wanted is None else {*wanted} - {PAUSED} | {*PAUSABLE}
        found = self._client.jobs.all(
            JobFilter(
                statuses=statuses,
                kinds=_words(kind) or listed_kinds(),
                name=name,
                tags=tuple(tags),
                limit=limit if wanted is None else None,
            )
        )
        fitting = [info for info in found if wanted is None or shown(info) in wanted]
        return JobList(Job(self._client, info["id"]) for info in fitting[:limit])

    @overload
    def complete(self, prompt: str, *, stream: Literal[False] = ..., **options: Any) -> str: ...
    @overload
    def complete(
        self, prompt: str, *, stream: Literal[True], **options: Any
    ) -> Generator[str, None, None]: ...
    def complete(
        self, prompt: str, *, stream: bool = False, **options: Any
    ) -> str | Generator[str, None, None]:
        """Complete a prompt; `options` are those of `infer`: model, temperature, max_tokens, …

        `stream`: yield pieces of the text as they are generated; closing the iterator cancels the
        rest. Raises SpecError and JobFailed.
        """
        return self._answer({**options, "prompt": prompt}, stream=stream)

    @overload
    def chat(
        self, messages: str | Messages, *, stream: Literal[False] = ..., **options: Any
    ) -> str: ...
    @overload
    def chat(
        self, messages: str | Messages, *, stream: Literal[True], **options: Any
    ) -> Generator[str, None, None]: ...
    def chat(
        self, messages: str | Messages, *, stream: bool = False, **options: Any
    ) -> str | Generator[str, None, None]:
        """Answer a chat: messages with role and content, as in OpenAI's API, or the user's text.

        Otherwise as `complete`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._answer({**options, "messages": orjson.dumps(messages).decode()}, stream=stream)

    def _answer(
        self, options: Mapping[str, Any], *, stream: bool
    ) -> str | Generator[str, None, None]:
        if options.get("n", 1) != 1:
            raise SpecError("n", f"must be 1 here, got {options['n']}; submit('infer') takes more")
        job = self.submit("infer", **options)
        pieces = self._pieces(job)
        return pieces if stream else "".join(pieces)

    def _pieces(self, job: Job) -> Generator[str, None, None]:
        """Yield the text of an answer; cancel the job if the caller leaves before its end."""
        has_ended = False
        try:
            for piece in self._client.jobs.text(job.id):
                if piece is None:
                    raise JobFailed(f"{job.id}: its process died: submit it again")
                yield piece
            has_ended = True
        finally:
            if not has_ended:
                self._client.jobs.cancel_if_pending(job.id)
        if job.status != "finished":
            job.result()  # raises the reason

    def models(self) -> list[dict[str, Any]]:
        """Return the loaded models, as `warmd models --json` has them."""
        return control.models(self._client.config)

    def load(self, model: str, *, once: bool = False) -> dict[str, Any]:
        """Load a model, `[NAME=]PATH`, JOB or a hub id, and return it; later starts load it, too.

        `once`: later starts do not. Raises SpecError, and Unavailable where no daemon runs.
        """
        config = self._client.config
        return control.load_model(config, control.named_model(config, model), is_kept=not once)

    def unload(self, name: str) -> None:
        """Unload a model. Jobs that run with it keep it until they end."""
        control.unload_model(self._client.config, name)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Messages = Sequence[Mapping[str, Any]]
# Arguments that queue a job: their types, least value, and both in words. None is the default.
_QUEUEING: dict[str, tuple[Any, float | None, str]] = {
    "front": (bool, None, "True or False"),
    "at": (datetime, None, "a datetime"),
    "timeout_s": ((int, float), 1e-3, "a number of seconds above 0"),
    "retries": (int, 0, "an integer of at least 0"),
}


def _id(job: Job | str) -> str:
    return job.id if isinstance(job, Job) else job


def _words(value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return None if value is None else (value,) if isinstance(value, str) else tuple(value)


def _queueing(
    *,
    tags: Sequence[str],
    after: Job | str | None = None,
    needs: Mapping[str, str] | None,
    **others: Any,
) -> Queueing:
    for name, value in others.items():
        kinds, least, words = _QUEUEING.get(name, (object, None, ""))
        is_wrong = not isinstance(value, kinds) or (kinds is not bool and isinstance(value, bool))
        if value is not None and (is_wrong or not (least is None or least <= value < math.inf)):
            raise SpecError(name, f"must be {words}, got {value!r}")
    job_id = None if after is None else _id(after)
    return Queueing(tags=tuple(tags), after=job_id, needs=_needs(needs), **others)


def _needs(given: Mapping[str, str] | None) -> dict[str, str]:
    try:
        return read_labels("needs", given)
    except ConfigError as error:
        raise SpecError(error.field, error.problem) from None
