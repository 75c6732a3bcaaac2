"""`warmd show --source`: the code and the versions that a job ran."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ...jobs.errors import NotFound
from ..shared.app import App
from ..view import render

if TYPE_CHECKING:
    from ...daemon.runs.rundir import RunDir


def show_source(app: App, rundir: RunDir) -> None:
    """Print folder, commit, versions and user modules; each module with the path of its copy."""
    from ...daemon.runs import source

    found = source.read(rundir)
    if found == source.Source():
        raise NotFound(f"source: {rundir.path.name} has none; jobs of earlier versions keep none")
    if app.as_json:
        render.json_line({"id": rundir.path.name, **asdict(found)})
        return
    fields = {"folder": render.one_line(found.folder or render.NOTHING)}
    if found.git is not None:
        fields["commit"] = f"{found.git['commit']} on {found.git['branch'] or 'no branch'}"
        if changed := found.git["changed"]:
            kept = source.diff_file(rundir)
            where = f"; diff: {kept}" if kept.is_file() else ""
            fields["uncommitted"] = render.one_line(", ".join(changed) + where)
    for name, about in found.data.items():
        digest = f", xxh128 {about['digest']}" if "digest" in about else ""
        fields[name] = render.one_line(f"{about['path']} ({render.size(about['bytes'])}{digest})")
    if found.executions:
        latest = found.executions[-1]
        fields["versions"] = ", ".join(f"{name} {v}" for name, v in latest.versions.items())
    for number, changes in found.changes().items():
        fields[f"changed in execution {number}"] = render.one_line("; ".join(changes))
    render.print_fields(fields)
    for path, digest in found.executions[-1].files.items() if found.executions else ():
        click.echo(f"{render.one_line(path)}  {source.kept_file(rundir, digest)}")
