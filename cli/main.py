"""The entry point: the command group and the format of errors.

A command's module is imported when the command is used, and imports the daemon's client inside its
functions: `warmd --help` must import neither Redis nor torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

import click

from .. import __version__
from ..configs.values import ConfigError
from ..jobs.errors import WarmdError
from .shared import former, suggest
from .shared.app import EXIT_INTERRUPTED, App, common_options
from .view import terminal
from .view.render import one_line

# Each command's module and its one-line help, by task. The line is repeated here, so that the list
# of commands is shown without importing them all (15 ms).
SECTIONS = {
    "Run the daemon": {
        "start": ("control", "Start the daemon and return when its workers are ready."),
        "stop": ("control", "Stop the daemon; unfinished jobs resume at the next start."),
        "reload": (
            "reload",
            "Use upgraded libraries in new processes, without interrupting jobs.",
        ),
        "status": ("control", "Show the daemon, its workers, models and queues."),
        "probe": ("probe", "Check whether the daemon is live or ready, for containers."),
        "ui": ("ui", "Open the dashboard in the browser."),
        "logs": ("logs", "Show the log of the daemon or of JOB (`-`: the latest job)."),
        "doctor": ("doctor", "Check this machine and suggest fixes, or test notifications."),
    },
    "Use several machines": {
        "node": ("nodes", "Run jobs of a shared Redis on this machine, in the foreground."),
        "gateway": ("nodes", "Run only the HTTP API of a shared Redis, in the foreground."),
        "nodes": ("nodes", "List the machines that share this Redis, or drain one."),
    },
    "Ask a model": {
        "run": ("run", "Complete PROMPT and stream the text."),
        "chat": ("chat", "Chat with MODEL."),
        "compare": (
            "compare",
            "Compare the answers to PROMPTs before and after a training, or of two models.",
        ),
        "eval": ("evaluate", "Evaluate MODELs on a data set and compare them."),
    },
    "Keep models loaded": {
        "load": ("models", "Load models and keep them in memory."),
        "models": ("models", "List the loaded models, or unload one."),
    },
    "Train and process files": {
        "data": ("data", "Inspect a data set, or clear the token cache."),
        "submit": ("submit", "Queue a job of KIND and print its id, or only estimate it."),
        "queue": ("jobs", "Show running and waiting jobs, in queue order."),
        "cancel": ("steer", "Remove waiting JOB from its queue, or save and stop running JOB."),
        "pause": ("steer", "Pause JOB at the end of its current step."),
        "resume": ("steer", "Continue paused JOB, or queue JOB again after it was stopped."),
    },
    "Look at jobs": {
        "tail": ("watch", "Follow JOB until it ends."),
        "jobs": ("jobs", "List training jobs and evaluations, or summarize a period."),
        "show": ("show", "Show everything about JOB."),
        "result": ("show", "Print the result of JOB."),
        "samples": (
            "samples",
            "Show completions or episodes on which GRPO JOB was trained, with their rewards.",
        ),
        "diff": ("diff", "Compare two jobs: options, data, code and results."),
        "plot": ("plot", "Plot the curves of JOB, or compare several."),
    },
    "Keep the disk in order": {
        "checkpoints": ("checkpoints", "List, verify, prune or export the checkpoints of JOB."),
        "rm": ("remove", "Remove ended JOBs, or those that ended some time ago."),
    },
    "Measure and set up": {
        "bench": ("bench", "Compare KIND with the stock library, or project a long job."),
        "mcp": ("mcp", "Serve jobs as tools for agents, by the Model Context Protocol."),
        "token": ("token", "Add, remove or list named tokens of the HTTP API."),
        "completion": ("completion", "Print the shell script that completes commands and job ids."),
    },
}
COMMANDS = {name: about for section in SECTIONS.values() for name, about in section.items()}

_WIDEST = 11  # columns of a command's name in the help

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE ended


class CommandGroup(click.Group):
    """The commands of warmd, each imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = import_module(f".commands.{COMMANDS[name][0]}", __package__)
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{name:<{_WIDEST}}", line) for name, (_, line) in section.items()]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in former.COMMANDS:
            raise former.Replaced(ctx.ensure_object(App), name, args[1:])
        if name not in COMMANDS and not name.startswith("-"):
            known = [*COMMANDS, "--help", "--version"]
            hint = suggest.sentence([f"warmd {n}" for n in suggest.commands(name, known)])
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # `warmd jobs | head` closes the pipe. Output that Python would flush at exit is
            # dropped.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='First steps: `warmd start`, then `warmd run "12+7="` or `warmd submit grpo`. '
    "Exit codes: 0 done, 1 the job failed, 2 bad usage, 3 no daemon or Redis, "
    "4 the job was stopped.",
)
@click.version_option(__version__, message="%(version)s", help="Show the version.")
@common_options
def warmd() -> None:
    """Keep models warm, and run training and inference jobs from a queue."""


def main(
    arguments: Sequence[str] | None = None, *, decline: Callable[[], NoReturn] | None = None
) -> int:
    """Run one command and return the exit code. Errors become one line on stderr.

    `decline`: see App.
    """
    _open_closed_streams()
    terminal.make_safe()
    app = App(color=False if os.environ.get("NO_COLOR") else None, decline=decline)
    try:
        code = warmd.main(
            arguments, prog_name="warmd", standalone_mode=False, obj=app, color=app.color
        )
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.NoSuchOption as error:
        path = error.ctx.command_path if error.ctx else "warmd"
        message = f"No such option {error.option_name!r}{_instead(error)}"
        return _failed(app, f"{message} See: {path} --help", error.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "warmd"
        return _failed(app, f"{error.format_message()} See: {path} --help", error.exit_code)
    except click.ClickException as error:
        return _failed(app, error.format_message(), error.exit_code)
    except (WarmdError, ConfigError) as error:
        return _failed(app, str(error), error.exit_code)
    except OSError as error:
        return _failed(app, str(error), EXIT_FAILED)
    except Exception as error:
        # A bug in warmd. Its traceback helps those who fix it, not the user.
        text = f"{type(error).__name__}: {error} (a bug in warmd; --debug shows where)"
        return _failed(app, text, EXIT_FAILED)
    return code if isinstance(code, int) else 0


def _open_closed_streams() -> None:
    """Open /dev/null for streams that the shell closed (`>&-`), for which sys.stdout is None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _instead(error: click.NoSuchOption) -> str:
    """Return the rest of the sentence: a reason, or what to type instead."""
    if error.ctx is None:
        return "."
    command = error.ctx.command
    refused = getattr(command, "not_supported", {})
    if reason := refused.get(error.option_name.lstrip("-").replace("-", "_")):
        return f": {reason}."
    for parameter in command.params:
        if isinstance(parameter, click.Argument) and error.option_name == f"--{parameter.name}":
            metavar = parameter.make_metavar(error.ctx)
            return f". It is an argument: {error.ctx.command_path} {metavar}."
    flags = [flag for parameter in command.params for flag in parameter.opts]
    return f".{suggest.sentence(suggest.options(error.option_name, flags))}"


def _failed(app: App, message: str, code: int) -> int:
    if app.debug:
        import traceback

        traceback.print_exc()
    from ..jobs.user_code.tracebacks import MOST_REASON, cut

    # A message may quote a long value, whether warmd, click or the system raised it.
    click.echo(f"Error: {cut(one_line(message), MOST_REASON)}", err=True)
    return code
