"""`warmd completion`: the script that completes commands and job ids in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ..shared.app import App, common_options
from ..view import render

_INSTALL = {
    "bash": 'eval "$(warmd completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(warmd completion zsh)" in ~/.zshrc',
    "fish": "warmd completion fish > ~/.config/fish/completions/warmd.fish",
}


@click.command(epilog="\b\n" + "\n".join(f"{shell}: {how}" for shell, how in _INSTALL.items()))
@click.argument("shell", type=click.Choice(list(_INSTALL)))
@common_options
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the shell script that completes commands and job ids."""
    script_class = get_completion_class(shell)
    assert script_class is not None
    script = script_class(ctx.find_root().command, {}, "warmd", "_WARMD_COMPLETE").source()
    if ctx.ensure_object(App).as_json:
        render.json_line({"shell": shell, "script": script, "install": _INSTALL[shell]})
    else:
        click.echo(script)
