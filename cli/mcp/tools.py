"""The tools of `warmd mcp`. Their docstrings are what an agent reads about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from inspect import cleandoc
from typing import Annotated, Any
from urllib.parse import quote

import orjson
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from ... import __version__
from ...daemon.lifecycle import statuses
from ...jobs.errors import WarmdError
from .gateway import Gateway

_INSTRUCTIONS = """\
Training, evaluation and inference jobs on warm models. A usual experiment: `kinds` lists what can \
be trained and its options, `models` what it can start from; `upload` data, or use the built-in \
one; `submit`, then `wait` until the status is finished; look at `metrics` and `samples`; \
`evaluate` the job's model against an earlier evaluation and read the verdict; `diff` shows in \
what two jobs differ. Jobs survive crashes and restarts; a job that was stopped continues from its \
last step with `resume`. Names of code and paths of files are refused."""

_DIGITS = 6  # of a metric
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # between two looks at a job
_SHOWN = (
    "id", "kind", "name", "status", "model", "step", "steps_total", "rows_done", "rows_total",
    "position", "error", "problem", "alert", "result",
)  # fmt: skip

_Tool = Callable[..., Awaitable[str]]
_Job = Annotated[str, Field(description="The id or the name of a job; -: the latest.")]
_NewName = Annotated[str | None, Field(description="What the job is called by later.")]
_Options = Annotated[dict[str, Any], Field(description="Options by name; see `kinds`.")]


def serve(gateway: Gateway) -> None:
    """Serve the tools on stdin and stdout until stdin is closed."""
    tools = Tools(gateway)
    server = MCPServer(
        "warmd", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING"
    )
    looks: list[_Tool] = [tools.kinds, tools.models, tools.files, tools.jobs, tools.job]
    looks += [tools.wait, tools.metrics, tools.samples, tools.diff]
    adds: list[_Tool] = [tools.upload, tools.submit, tools.evaluate, tools.resume]
    for tool in looks:
        _add(server, tool, ToolAnnotations(read_only_hint=True))
    for tool in adds:
        _add(server, tool, ToolAnnotations(destructive_hint=False))
    _add(server, tools.cancel, ToolAnnotations(destructive_hint=True, idempotent_hint=True))
    server.run()


def _add(server: MCPServer, tool: _Tool, annotations: ToolAnnotations) -> None:
    server.add_tool(
        tool,
        description=cleandoc(tool.__doc__ or ""),
        annotations=annotations,
        structured_output=False,  # its schema would be "anything"
    )


class Tools:
    """One method for each tool. An error of warmd is the tool's error, in its words."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def kinds(self, kind: str | None = None) -> str:
        """List the kinds of training; with a kind, its options: what each takes, and its default.

        `builtin_data` needs no file. `judged_by`: the metrics that compare jobs of the kind.
        """
        listed = (await self._get("/v1/warmd/kinds"))["data"]
        if kind is None:
            kept = ("kind", "help", "builtin_data", "judged_by")
            return _text([{name: one[name] for name in kept} for one in listed])
        return _text([_option(option) for option in _of_kind(listed, kind)["options"]])

    async def models(self) -> str:
        """List the models that jobs can start from: warm ones, and those of finished jobs."""
        return _text([model["id"] for model in (await self._get("/v1/models"))["data"]])

    async def files(self) -> str:
        """List the uploaded data files, newest first."""
        kept = ("id", "filename", "bytes")
        listed = (await self._get("/v1/files"))["data"]
        return _text([{name: file[name] for name in kept} for file in listed])

    async def upload(
        self,
        filename: Annotated[str, Field(description="With its ending, such as train.jsonl.")],
        text: Annotated[str, Field(description="Its content: for JSON Lines, one row a line.")],
    ) -> str:
        """Upload a data file for trainings and evaluations; return its id."""
        done = await _as_tool(self._gateway.upload(filename, text.encode()))
        return _text({"id": done["id"], "bytes": done["bytes"]})

    async def submit(
        self,
        kind: Annotated[str, Field(description="A kind of `kinds`.")],
        model: Annotated[
            str, Field(description="Of `models`; a job by id or name; JOB@STEP; or a sweep.")
        ],
        data: Annotated[str, Field(description="A file id of `upload`, or the built-in data.")],
        options: _Options = {},  # noqa: B006 (pydantic copies it)
        validation: Annotated[str | None, Field(description="A file id.")] = None,
        seed: int | None = None,
        name: _NewName = None,
        check_only: Annotated[bool, Field(description="Queue nothing; show all options.")] = False,
    ) -> str:
        """Queue a training job; return it at once. A wrong option is named, and nothing is queued.

        `options` has what differs from the defaults, for example {"learning_rate": 1e-5}.
        """
        method = _of_kind((await self._get("/v1/warmd/kinds"))["data"], kind)["method"]
        body = {
            "model": model,
            "training_file": data,
            "validation_file": validation,
            "seed": seed,
            "suffix": name,
            "method": {"type": method, method: {"hyperparameters": options}},
        }
        if check_only:
            return _text(await self._post("/v1/warmd/check", body))
        queued = await self._post("/v1/fine_tuning/jobs", body)
        return await self.job(queued["id"])

    async def evaluate(
        self,
        model: Annotated[
            str, Field(description="Of `models`; a job by id or name; JOB@STEP; or a sweep.")
        ],
        data: Annotated[
            str | None, Field(description="A file id of `upload`; else the built-in data.")
        ] = None,
        against: Annotated[
            str | None, Field(description="An earlier evaluation on the same questions.")
        ] = None,
        options: Annotated[dict[str, Any], Field(description="Such as samples and seed.")] = {},  # noqa: B006
        name: _NewName = None,
    ) -> str:
        """Queue an evaluation of a model; return it at once.

        When it has finished its result has each metric with a 95 % interval and, with `against`,
        the comparison question by question and its verdict in words.
        """
        given = options if data is None else {**options, "dataset": data}
        body = {"model": model, "against": against, "options": given, "name": name}
        return _text(_shown(await self._post("/v1/warmd/evaluations", body)))

    async def jobs(
        self,
        status: Annotated[str | None, Field(description="Such as started or finished.")] = None,
        kind: str | None = None,
        limit: Annotated[int, Field(ge=1, le=200)] = 20,
    ) -> str:
        """List jobs, newest first."""
        found = await self._get("/v1/warmd/jobs", status=status, kind=kind, limit=limit)
        return _text([_shown(job, without=("result",)) for job in found["data"]])

    async def job(self, job: _Job) -> str:
        """Show a job: its status, step, error and result."""
        return _text(await self._job(job))

    async def wait(
        self,
        job: _Job,
        context: Context,
        timeout_s: Annotated[float, Field(ge=0, le=3600)] = 45,
    ) -> str:
        """Wait until a job has ended, for at most `timeout_s` seconds; return it.

        A job that is still pending then goes on: call `wait` again.
        """
        until, pause, seen = time.monotonic() + timeout_s, _FIRST_PAUSE_S, -1
        while True:
            found = await self._job(job)
            step = found.get("step", 0)
            if step != seen:
                await context.report_progress(step, found.get("steps_total"), found["status"])
            left = until - time.monotonic()
            if found["status"] not in statuses.PENDING or left <= 0:
                return _text(found)
            pause = _FIRST_PAUSE_S if step != seen else min(2 * pause, _LONGEST_PAUSE_S)
            seen = step
            await asyncio.sleep(min(pause, left))

    async def metrics(
        self,
        job: _Job,
        names: Annotated[list[str] | None, Field(description="Default: all metrics.")] = None,
        points: Annotated[int, Field(ge=10, le=200, description="At most so many.")] = 20,
    ) -> str:
        """Show the metrics of a job; each point is the mean of the steps up to the one named."""
        found = await self._get(f"/v1/warmd/jobs/{_name(job)}/curves", points=points)
        curves = found["metrics"]
        for name in names or ():
            if name not in curves:
                known = ", ".join(curves) or "none yet"
                raise ToolError(f"names: must be of {known}, got {name[:80]!r}")
        means = {name: _rounded(curves[name]["mean"]) for name in names or curves}
        return _text({"total": found["total"], "steps": found["steps"], "metrics": means})

    async def samples(
        self,
        job: _Job,
        step: Annotated[int | None, Field(ge=0, description="Default: the latest.")] = None,
        limit: Annotated[int, Field(ge=1, le=200)] = 8,
    ) -> str:
        """Show completions on which a job was trained in a step, with their rewards."""
        found = await self._get(f"/v1/warmd/jobs/{_name(job)}/completions", step=step)
        samples = found["samples"]
        shown = {"samples": samples[:limit], "left_out": max(0, len(samples) - limit)}
        return _text({**found, **shown})

    async def diff(self, job: _Job, other: _Job) -> str:
        """Show in what two jobs differ: options, model, data, code, versions and results."""
        found = await self._get(f"/v1/warmd/jobs/{_name(job)}/diff/{_name(other)}")
        return _text(found["data"])

    async def cancel(self, job: _Job) -> str:
        """Remove a waiting job from its queue, or save and stop a running one."""
        return _text(await self._post(f"/v1/warmd/jobs/{_name(job)}/cancel", {}))

    async def resume(
        self,
        job: _Job,
        changes: Annotated[dict[str, Any], Field(description="Such as {'steps': 200}.")] = {},  # noqa: B006
    ) -> str:
        """Queue an ended job again: it continues from its last checkpoint."""
        path = f"/v1/warmd/jobs/{_name(job)}/resume"
        return _text(await self._post(path, {"changes": changes}))

    async def _job(self, job: str) -> dict[str, Any]:
        return _shown((await self._get(f"/v1/warmd/jobs/{_name(job)}"))["job"])

    async def _get(self, path: str, **query: Any) -> Any:
        return await _as_tool(self._gateway.get(path, **query))

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await _as_tool(self._gateway.post(path, body))


async def _as_tool(request: Awaitable[Any]) -> Any:
    """Wait for a request; an error of warmd becomes the tool's error."""
    try:
        return await request
    except WarmdError as error:
        raise ToolError(str(error)) from error


def _of_kind(listed: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    for one in listed:
        if one["kind"] == kind:
            return one
    known = ", ".join(one["kind"] for one in listed)
    raise ToolError(f"kind: must be one of {known}, got {kind[:80]!r}")


def _option(option: Mapping[str, Any]) -> dict[str, Any]:
    default = option["default_text"] if option["default"] is None else option["default"]
    return {
        "name": option["name"],
        "takes": option["takes"],
        "default": default,
        "help": option["help"],
        **({"relations": option["relations"]} if option["relations"] else {}),
    }


def _shown(job: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    kept = {name: job[name] for name in _SHOWN if name not in without}
    kept["status"] = statuses.shown(job)
    return {name: value for name, value in kept.items() if value is not None}


def _rounded(values: list[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in values]


def _text(value: Any) -> str:
    """A result as one JSON text: the library makes a part of each item of a list."""
    return orjson.dumps(value).decode()


def _name(job: str) -> str:
    """The id or the name of a job as a part of a path."""
    if not job.strip("."):  # it would name another path
        raise ToolError(f"job: must be the id or the name of a job, got {job[:80]!r}")
    return quote(job, safe="")
