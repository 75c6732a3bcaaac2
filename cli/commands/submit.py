"""`warmd submit KIND`: options from the kind's spec, checked here, queued as one job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...configs.labels import line_of, num_nodes, read_labels, with_ranks
from ...jobs import spec_class
from ...jobs.durations import parse_duration
from ...jobs.errors import SpecError
from ...jobs.ids import kind_of
from ...jobs.training.options import TrainingSpec
from ..shared.app import App, common_options, note
from ..shared.grouped import GroupedCommand, GroupedOption, label_options
from ..shared.job_argument import complete_job
from ..shared.kind_group import LIKE, KindGroup
from ..shared.option_values import described
from ..shared.spec_options import (
    ARGUMENT,
    argument_of,
    origin_options,
    spec_option,
    take_argument,
)
from ..view import render
from ..view.times import parse_time
from .curriculum import submit_curriculum
from .sweep import submit_sweep, sweep_options

if TYPE_CHECKING:
    from ...daemon.client.client import Client
    from ...jobs.spec import Spec


class _SubmitGroup(KindGroup):
    def kind_command(self, kind: str) -> click.Command:
        return _kind_command(kind)

    def like_command(self) -> click.Command:
        return _like_command()


@click.command(cls=_SubmitGroup, subcommand_metavar="KIND [OPTIONS]...")
@common_options
def submit() -> None:
    """Queue a job of KIND and print its id, or only estimate it.

    With --dry-run nothing is queued: all options are checked, and time, memory and disk space are
    estimated. The estimate is based on similar jobs that ran in this home; if there are none, on
    the compute and memory bandwidth of this machine, which are measured once, in a few seconds.
    """


@dataclass(frozen=True, kw_only=True)
class _Request:
    """How to queue the job, apart from its spec."""

    config_file: Path | None
    settings: tuple[str, ...]
    front: bool
    after: str | None
    at: str | None
    in_: str | None
    retries: int
    timeout: str | None
    wait: bool
    dry_run: bool
    measure: bool
    like: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    init_from: str | None = None
    needs: str | None = None
    sweep: tuple[str, ...] = ()
    seeds: str | None = None
    array: str | None = None
    halving: str | None = None
    search: str | None = None
    trials: str | None = None
    parallel: str | None = None
    metric: str | None = None


_JOB = "Job"  # the heading of what is set most often, which comes first


def _job_options() -> list[click.Option]:
    return [
        *label_options(_JOB),
        GroupedOption(
            ["--wait"],
            heading=_JOB,
            is_flag=True,
            help="Follow the job until it ends. Exit code: 0 finished, 1 failed, 4 stopped.",
        ),
        GroupedOption(
            ["--dry-run"],
            heading=_JOB,
            is_flag=True,
            help="Check all options and estimate time, memory and disk space, here and on other "
            "hardware, without queueing the job.",
        ),
        GroupedOption(
            ["--measure"],
            heading=_JOB,
            is_flag=True,
            help="With --dry-run: measure the speed of this machine again; the better values are "
            "kept.",
        ),
    ]


def _request_options() -> list[click.Option]:
    return [
        GroupedOption(["--front"], is_flag=True, help="Put the job at the front of its queue."),
        GroupedOption(
            ["--after"],
            metavar="JOB",
            shell_complete=complete_job,
            help="Job that must finish before this one starts.",
        ),
        GroupedOption(
            ["--at"],
            metavar="TIME",
            help="Local time at which the job is queued: 18:30 or 2026-11-21 18:30.",
        ),
        GroupedOption(
            ["--in", "in_"],
            metavar="DURATION",
            help="Delay before the job is queued: 90s, 15m, 1h30m or 2d.",
        ),
        GroupedOption(
            ["--needs"],
            metavar="LABELS",
            help="Labels that a machine must have to run the job, such as gpu=h200,memory=40G (of "
            "an amount: at least as much).  [default: none]",
        ),
        GroupedOption(
            ["--retries"],
            metavar="N",
            type=click.IntRange(min=0, max=1000),
            default=0,
            show_default=True,
            help="Number of retries if the job fails.",
        ),
        GroupedOption(
            ["--timeout"],
            metavar="DURATION",
            help="Maximum running time; a job that takes longer fails.  [default: none]",
        ),
    ]


def _kind_command(kind: str) -> click.Command:
    options = spec_class(kind).options()
    requests = [*origin_options(kind), *_request_options()]
    if issubclass(spec_class(kind), TrainingSpec):
        requests = [*sweep_options(), *requests]
    argument = spec_class(kind).argument
    arguments = [] if argument is None else [argument_of(options[argument])]

    def callback(**parameters: Any) -> int:
        given = {name: parameters.pop(name) for name in options}
        if argument is not None:
            take_argument(argument, given, parameters.pop(ARGUMENT))
        app = click.get_current_context().ensure_object(App)
        return _submit(app, kind, given, _Request(**parameters))

    return click.command(
        kind,
        cls=GroupedCommand,
        not_supported=spec_class(kind).not_supported,
        params=[*arguments, *_job_options(), *map(spec_option, options.values()), *requests],
        help=spec_class(kind).__doc__,
    )(common_options(callback))


def _like_command() -> click.Command:
    def callback(**parameters: Any) -> int:
        app = click.get_current_context().ensure_object(App)
        request = _Request(**parameters)
        assert request.like is not None
        return _submit(app, kind_of(app.client().find(request.like)), {}, request)

    return click.command(
        LIKE,
        cls=GroupedCommand,
        params=[*_job_options(), *sweep_options(), *origin_options("grpo"), *_request_options()],
        help="Queue a job with the options and the kind of another job.",
    )(common_options(callback))


def _submit(app: App, kind: str, given: Mapping[str, Any], request: _Request) -> int:
    from ...daemon.lifecycle.queueing import Queueing

    needs = read_labels("needs", request.needs)
    at, delay_s = _start(request)
    client = app.client()
    values, init = described(
        app,
        client,
        kind,
        given,
        config_file=request.config_file,
        settings=request.settings,
        like=request.like,
        init_from=request.init_from,
    )
    varied = _varied(values, request, spec_class(kind))
    queueing = Queueing(
        name=request.name,
        tags=request.tags,
        front=request.front,
        after=None if request.after is None else client.find(request.after),
        at=at,
        delay_s=delay_s,
        needs=needs,
        retries=request.retries,
        timeout_s=None if request.timeout is None else parse_duration("timeout", request.timeout),
    )
    if request.measure and not request.dry_run:
        raise SpecError("measure", "must go with dry_run")
    staged: dict[str, Any] = {n: values.pop(n) for n in ("stages", "gate") if n in values}
    if staged or varied:
        submit_group = submit_curriculum if staged else submit_sweep
        given = {**varied, **staged}
        return submit_group(
            app, kind, values, given, queueing, init, dry_run=request.dry_run, wait=request.wait
        )
    spec = spec_class(kind).parse(values)
    if request.dry_run:
        checked = client.jobs.check(spec, init=init)
        return _dry_run(app, client, spec, checked, again=request.measure)
    job_id = client.jobs.submit(spec, queueing, init=init)
    if app.as_json:
        render.json_line(client.jobs.get(job_id))
    else:
        click.echo(job_id)
    if needs := with_ranks(needs, spec.to_json()):
        _note_unmet(app, client, needs)
    if not request.wait:
        if sys.stderr.isatty():
            note(f"Follow it with: {app.command(f'tail {job_id}')}")
        return 0
    from .watch import follow

    return follow(app, client, job_id, sys.stderr)


def _note_unmet(app: App, client: Client, needs: Mapping[str, str]) -> None:
    """Print a note if no machine has the labels that a job needs."""
    missing = client.nodes.unmet_needs(needs)
    if missing:
        note(
            f"No machine has {line_of(missing)} now: the job waits for one. "
            f"See: {app.command('nodes')}"
        )
    elif (wanted := num_nodes(needs)) > 1 and (there := client.nodes.num_suitable(needs)) < wanted:
        note(
            f"{there} of {wanted} nodes are there that have a gang_address: the job waits for "
            f"more. See: {app.command('nodes')}"
        )


def _varied(values: dict[str, Any], request: _Request, spec: type[Spec]) -> dict[str, Any]:
    """Remove the description of a sweep from the options of a job file; options take precedence."""
    from ...daemon.groups.grid import KEYS

    found = {name: values.pop(name) for name in KEYS if name in values}
    given = {name: getattr(request, name) for name in KEYS}
    found |= {name: value for name, value in given.items() if value not in (None, ())}
    if found and not issubclass(spec, TrainingSpec):
        raise SpecError(next(iter(found)), f"must be of a kind that trains, got {spec.kind}")
    return found


def _dry_run(app: App, client: Client, spec: Spec, checked: dict[str, Any], *, again: bool) -> int:
    """Print the estimate of the job, and the options that are not the defaults."""
    from ...daemon.reports.estimate import estimate

    found = estimate(
        client,
        spec,
        checked,
        measure=lambda: note("measuring the speed of this machine, once: takes some seconds"),
        again=again,
    )
    prompt = client.jobs.first_prompt(spec.kind, checked)
    if app.as_json:
        about = {"first_prompt": prompt, "estimate": asdict(found)}
        render.json_line({"kind": spec.kind, **checked, **about})
        return 0
    import yaml

    from ..view import plan

    back = "--config"
    if "init_from" in checked:
        back += f" with --init-from {checked['init_from']}"
    click.echo(f"# {spec.kind}: this would be queued; {back} reads it back")
    for name, text in plan.lines(spec.kind, checked["spec"], found):
        click.echo(f"# {name}: {text}")
    if prompt is not None:
        click.echo(f"# first prompt: {render.quoted(prompt)}")
    home_defaults = app.config().defaults.get(spec.kind, {})
    options = spec.options()
    shown = {
        name: value
        for name, value in checked["spec"].items()
        if (name in home_defaults or value != _plain(options[name].default) or name == "model")
        and not (name == "model" and "init_from" in checked)
    }
    click.echo(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip())
    if found.hardware:
        click.echo("# on other hardware, computed from published rates and not measured:")
        for line in render.table(*plan.hardware(found), width=render.columns(sys.stdout) - 2):
            click.echo(f"# {line}")
    return 0


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def _start(request: _Request) -> tuple[datetime | None, float | None]:
    """Return when to queue the job: at a time, or after some seconds."""
    if request.at is not None and request.in_ is not None:
        raise SpecError("at", "must not be given together with --in")
    if request.in_ is not None:
        return None, parse_duration("in", request.in_)
    now = datetime.now().astimezone()
    if request.at is None:
        return None, None
    at = parse_time("at", request.at, now=now)
    note(f"Starts at {at:%Y-%m-%d %H:%M %Z}, {at.astimezone(UTC):%Y-%m-%d %H:%M} UTC")
    return at, None
