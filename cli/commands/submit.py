"""`warmd submit KIND`: options from the kind's spec, checked here, queued as one job.

Values reach `Spec.parse` as they were typed, so that an option, `--set` and a file are read by the
same rules and fail with the same words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click

from ...jobs import KINDS, spec_class
from ...jobs.errors import SpecError
from ...jobs.spec import GROUPS, OptionInfo
from ...jobs.training.options import TrainingSpec
from ..shared.app import App, common_options, note
from ..shared.job_argument import complete_job
from ..view import render
from ..view.times import parse_duration, parse_time


class GroupedOption(click.Option):
    """An option that `--help` lists under the heading of its group."""

    def __init__(self, *args: Any, heading: str = "Queueing", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose `--help` lists its options by group, in the order of its parameters."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = getattr(parameter, "heading", "Other options")
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class KindGroup(click.Group):
    """One subcommand per job kind, made from its spec when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(KINDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return _kind_command(name) if name in KINDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in KINDS and not args[0].startswith("-"):
            spec_class(args[0])  # raises NotFound with the kinds there are
        return super().resolve_command(ctx, args)


@click.command(cls=KindGroup, subcommand_metavar="KIND [OPTIONS]...")
@common_options
def submit() -> None:
    """Queue a job of KIND and print its id."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """How to queue the job, apart from what it is to do."""

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
    init_from: str | None = None


def file_options() -> list[click.Option]:
    """The options that name options."""
    return [
        GroupedOption(
            ["--config", "config_file"],
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="YAML file with options; options on the command line take precedence.",
        ),
        GroupedOption(
            ["--set", "settings"],
            multiple=True,
            metavar="KEY=VALUE",
            help="One option; takes precedence over --config. May be repeated.",
        ),
    ]


def _request_options() -> list[click.Option]:
    return [
        *file_options(),
        GroupedOption(["--front"], is_flag=True, help="Queue the job before all waiting jobs."),
        GroupedOption(
            ["--after"],
            metavar="JOB",
            shell_complete=complete_job,
            help="Start only after that job has finished.",
        ),
        GroupedOption(
            ["--at"],
            metavar="TIME",
            help="Local time to queue the job at: 18:30 or 2026-11-21 18:30.",
        ),
        GroupedOption(
            ["--in", "in_"],
            metavar="DURATION",
            help="Delay before the job is queued: 90s, 15m, 1h30m or 2d.",
        ),
        GroupedOption(
            ["--retries"],
            metavar="N",
            type=click.IntRange(min=0, max=1000),
            default=0,
            show_default=True,
            help="Number of retries when the job fails.",
        ),
        GroupedOption(
            ["--timeout"],
            metavar="DURATION",
            help="Maximum running time; a job that takes longer fails.  [default: none]",
        ),
        GroupedOption(
            ["--wait"],
            is_flag=True,
            help="Follow the job to its end; exit code 0: finished, 1: failed, 4: stopped.",
        ),
        GroupedOption(
            ["--dry-run"], is_flag=True, help="Check the options, print the spec and queue nothing."
        ),
    ]


_INIT_FROM = GroupedOption(
    ["--init-from"],
    heading=GROUPS["model"],
    metavar="JOB[@STEP]",
    shell_complete=complete_job,
    help="Initial weights: the final model of a job, or its checkpoint at STEP.",
)


def _kind_command(kind: str) -> click.Command:
    options = spec_class(kind).options()
    requests = _request_options()
    if issubclass(spec_class(kind), TrainingSpec):
        requests.insert(0, _INIT_FROM)

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
        params=[*arguments, *map(spec_option, options.values()), *requests],
        help=spec_class(kind).__doc__,
    )(common_options(callback))


ARGUMENT = "argument"


def argument_of(info: OptionInfo) -> click.Argument:
    """The argument that may stand for an option."""
    return click.Argument([ARGUMENT], required=False, metavar=f"[{info.name.upper()}]")


def take_argument(name: str, given: dict[str, Any], argument: str | None) -> None:
    """Take the argument for the option that it stands for. Raises SpecError when both are given."""
    if argument is not None:
        if given[name] is not None:
            raise SpecError(name, "must be given once, got it as argument and as option")
        given[name] = argument


def spec_option(info: OptionInfo) -> click.Option:
    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        return [choice for choice in info.choices or () if choice.startswith(incomplete)]

    flag = "--" + info.name.replace("_", "-")
    heading = GROUPS[info.group]
    if info.type is bool:
        flag += "/--no-" + info.name.replace("_", "-")
        return GroupedOption([flag, info.name], heading=heading, default=None, help=_help(info))
    return GroupedOption(
        [flag, info.name],
        type=str,  # whatever it is: `Spec.parse` knows best
        multiple=info.many,
        shell_complete=complete,
        metavar={int: "N", float: "X", str: "TEXT"}[info.type],
        help=_help(info),
        heading=heading,
    )


def _help(info: OptionInfo) -> str:
    """Help, what the option takes where that says more than its type, and the default."""
    notes = []
    if info.choices or info.minimum is not None or info.above is not None:
        notes.append(info.takes)
    if info.many:
        notes.append("may be repeated")
    notes.append(f"default: {info.default_text or _shown(info.default)}")
    return f"{info.help}  [{'; '.join(notes)}]"


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(default) or "none"
    if isinstance(default, bool) or default is None:
        return str(default).lower()
    return repr(default) if "\n" in str(default) else str(default)


def _submit(app: App, kind: str, given: Mapping[str, Any], request: _Request) -> int:
    values = gathered(app, kind, given, request.config_file, request.settings)
    client = app.client()
    init = None
    if request.init_from is not None:
        if given.get("model") is not None:
            raise SpecError("init_from", "must not be given together with --model")
        init = client.weights(request.init_from)
        values["model"] = init.name
    spec = spec_class(kind).parse(values)
    if request.dry_run:
        return _dry_run(app, spec.kind, client.check(spec, init=init))
    job_id = client.submit(
        spec,
        front=request.front,
        after=request.after,
        at=_start(request),
        retries=request.retries,
        timeout_s=None if request.timeout is None else parse_duration("timeout", request.timeout),
        init=init,
    )
    if app.as_json:
        render.json_line(client.job(job_id))
    else:
        click.echo(job_id)
    if not request.wait:
        if sys.stderr.isatty():
            note(f"Follow it with: {app.command(f'tail {job_id}')}")
        return 0
    from .watch import follow

    return follow(app, client, job_id, sys.stderr)


def gathered(
    app: App,
    kind: str,
    given: Mapping[str, Any],
    config_file: Path | None,
    settings: Iterable[str],
) -> dict[str, Any]:
    """Return the options of a spec, raw, from all that was said of them; the later source wins."""
    return {
        **app.config().defaults.get(kind, {}),
        **_from_file(config_file),
        **from_settings(settings, spec_class(kind).options()),
        # click gives None for what was not given, and () for what may be repeated.
        **{name: value for name, value in given.items() if value is not None and value != ()},
    }


def _dry_run(app: App, kind: str, checked: dict[str, Any]) -> int:
    if app.as_json:
        render.json_line({"kind": kind, **checked})
    else:
        import yaml

        spec, back = dict(checked["spec"]), "--config"
        if "init_from" in checked:
            back += f" with --init-from {checked['init_from']}"
            del spec["model"]
        click.echo(f"# {kind}: this would be queued; {back} reads it back")
        click.echo(yaml.safe_dump(spec, sort_keys=False, allow_unicode=True).rstrip())
    return 0


def _start(request: _Request) -> datetime | None:
    now = datetime.now().astimezone()
    if request.at is not None and request.in_ is not None:
        raise SpecError("at", "must not be given together with --in")
    if request.in_ is not None:
        return now + timedelta(seconds=parse_duration("in", request.in_))
    return None if request.at is None else parse_time("at", request.at, now=now)


def _from_file(path: Path | None) -> dict[str, Any]:
    """Read options from a YAML file. Raises ConfigError with the file and line."""
    if path is None:
        return {}
    from ...configs.yamlfile import read_mapping

    return {_field(name): value for name, value in read_mapping(path).items()}


def from_settings(
    settings: Iterable[str], options: Mapping[str, OptionInfo]
) -> dict[str, str | tuple[str, ...]]:
    """Read `KEY=VALUE`, as text. A key that takes a list may be repeated, another one may not."""
    values: dict[str, str | tuple[str, ...]] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise SpecError("set", f"must be KEY=VALUE, got {setting!r}")
        name = _field(key)
        if name in options and options[name].many:
            values[name] = (*values.get(name, ()), value)
        elif name in values:
            raise SpecError(name, "must be set once, got --set twice")
        else:
            values[name] = value
    return values


def _field(name: object) -> str:
    return str(name).strip().replace("-", "_")
