"""The JOB argument and its completion in a shell.

Completion lists the run directories. It runs at every Tab, so it is fast and needs no daemon.
"""

from __future__ import annotations

import click

from ...configs.values import ConfigError
from .app import App


def complete_job(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the job ids of this home with that prefix, newest first."""
    from ...daemon.host.home import Home
    from ...jobs.ids import is_job_id

    try:
        names = [path.name for path in Home(ctx.ensure_object(App).config().home).runs.iterdir()]
    except (ConfigError, OSError):
        return []
    found = [name for name in names if is_job_id(name) and name.startswith(incomplete)]
    # In an id the time follows the kind.
    return sorted(found, key=lambda name: name.partition("-")[2], reverse=True)


# A job id, an unambiguous prefix of one, or nothing or `-` for the latest job.
job_argument = click.argument("job", required=False, metavar="[JOB]", shell_complete=complete_job)
