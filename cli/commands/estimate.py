"""`warmd estimate KIND`: time, memory and disk of a job, here and on other hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ...jobs import spec_class
from ...jobs.ids import kind_of
from ..shared.app import App, common_options, note
from ..shared.grouped import GroupedCommand
from ..shared.kind_group import LIKE, KindGroup
from ..shared.option_values import described
from ..shared.spec_options import ARGUMENT, argument_of, origin_options, spec_option, take_argument
from ..view import render

_UNKNOWN = "not known: no job like this has run in this home, and the model's sizes are not known"


class EstimateGroup(KindGroup):
    """One subcommand per job kind, with the options of `submit` that describe the job."""

    def kind_command(self, kind: str) -> click.Command:
        options = spec_class(kind).options()
        argument = spec_class(kind).argument
        arguments = [] if argument is None else [argument_of(options[argument])]

        def callback(**parameters: Any) -> None:
            given = {name: parameters.pop(name) for name in options}
            if argument is not None:
                take_argument(argument, given, parameters.pop(ARGUMENT))
            _estimate(kind, given, **parameters)

        return click.command(
            kind,
            cls=GroupedCommand,
            params=[*arguments, *map(spec_option, options.values()), *origin_options(kind)],
            help=f"Estimate a job of kind {kind}. Its options are those of `submit {kind}`.",
        )(common_options(callback))

    def like_command(self) -> click.Command:
        def callback(like: str, **parameters: Any) -> None:
            app = click.get_current_context().ensure_object(App)
            job_id = app.client().find(like)
            _estimate(kind_of(job_id), {}, like=job_id, **parameters)

        return click.command(
            LIKE,
            cls=GroupedCommand,
            params=list(origin_options("grpo")),
            help="Estimate a job with the options and the kind of another job.",
        )(common_options(callback))


@click.command(cls=EstimateGroup, subcommand_metavar="KIND [OPTIONS]...")
@common_options
def estimate() -> None:
    """Estimate the time, memory and disk space that a job of KIND needs.

    The estimate is based on similar jobs that ran in this home. If there are none, it is based on
    the compute and memory bandwidth of this machine, which are measured once, in a few seconds. The
    table of other hardware is computed from published rates. Nothing is queued.
    """


def _estimate(
    kind: str,
    given: Mapping[str, Any],
    *,
    config_file: Path | None,
    settings: tuple[str, ...],
    like: str | None = None,
    init_from: str | None = None,
) -> None:
    from ...daemon.reports.estimate import estimate as estimate_of
    from ..view import plan

    app = click.get_current_context().ensure_object(App)
    client = app.client()
    values, init = described(
        app,
        client,
        kind,
        given,
        config_file=config_file,
        settings=settings,
        like=like,
        init_from=init_from,
    )
    spec = spec_class(kind).parse(values)
    checked = client.check(spec, init=init)
    found = estimate_of(
        client,
        spec,
        checked,
        measure=lambda: note("measuring the speed of this machine, once: takes some seconds"),
    )
    if app.as_json:
        render.json_line(asdict(found))
        return
    for name, text in plan.lines(kind, checked["spec"], found, unknown=_UNKNOWN):
        click.echo(f"{name + ':':<10} {text}")
    if found.hardware:
        click.echo("\nOn other hardware, computed from published rates and not measured:")
        render.print_table(*plan.hardware(found))
