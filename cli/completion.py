"""Shell completion, and the JOB argument that completes from the names of the run directories.

Completion runs at every Tab: it asks no server, so that it is quick and works when all is down.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ..configs.values import ConfigError
from . import render
from .app import App, common_options

_INSTALL = {
    "bash": 'eval "$(warmd completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(warmd completion zsh)" in ~/.zshrc',
    "fish": "warmd completion fish > ~/.config/fish/completions/warmd.fish",
}


def complete_job(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of this home's jobs that begin so, the newest first."""
    from ..daemon.home import Home
    from ..daemon.rundir import is_job_id

    try:
        names = [path.name for path in Home(ctx.ensure_object(App).config().home).runs.iterdir()]
    except (ConfigError, OSError):
        return []
    found = [name for name in names if is_job_id(name) and name.startswith(incomplete)]
    # In an id the time follows the kind.
    return sorted(found, key=lambda name: name.partition("-")[2], reverse=True)


# A job id, an unambiguous prefix of one, or nothing or `-` for the latest job.
job_argument = click.argument("job", required=False, metavar="[JOB]", shell_complete=complete_job)


@click.command(epilog="\b\n" + "\n".join(f"{shell}: {how}" for shell, how in _INSTALL.items()))
@click.argument("shell", type=click.Choice(list(_INSTALL)))
@common_options
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands and job ids."""
    script_class = get_completion_class(shell)
    assert script_class is not None
    script = script_class(ctx.find_root().command, {}, "warmd", "_WARMD_COMPLETE").source()
    if ctx.ensure_object(App).as_json:
        render.json_line({"shell": shell, "script": script, "install": _INSTALL[shell]})
    else:
        click.echo(script)
