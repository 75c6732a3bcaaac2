"""The entry point: the group of commands, and what an error looks like.

A command's module is imported when the command is used (or listed), and imports the daemon's
client in its function: `warmd --help` must not pay for Redis, and nothing here for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from .. import __version__
from ..configs.values import ConfigError
from ..jobs.errors import WarmdError
from .shared.app import EXIT_INTERRUPTED, App, common_options
from .view.render import one_line

# Each command's module and its help in one line, in the order of a first day with warmd. The line
# stands here too, so that the list of commands is shown without importing them all (15 ms).
COMMANDS = {
    "start": ("control", "Start the daemon and return when its workers are warm."),
    "stop": ("control", "Stop the daemon; its jobs go on after the next start."),
    "status": ("control", "Show the daemon with its workers, models and queues."),
    "load": ("models", "Make a model warm without disturbing the running jobs."),
    "unload": ("models", "Forget a warm model."),
    "models": ("models", "List the warm models."),
    "run": ("run", "Have a model go on from PROMPT, and show the text as it comes."),
    "chat": ("chat", "Talk with MODEL."),
    "compare": ("compare", "Ask the model before and after a training the same PROMPTs."),
    "submit": ("submit", "Queue a job of KIND and print its id."),
    "tail": ("watch", "Show what JOB did and does, until it ends."),
    "plot": ("plot", "Draw the curves of JOB, or of several to compare them."),
    "queue": ("jobs", "Show the jobs that run and wait, in their order."),
    "jobs": ("jobs", "List all jobs, the newest first."),
    "show": ("jobs", "Show all that is known of JOB."),
    "result": ("jobs", "Print the result of JOB."),
    "cancel": ("steer", "Take JOB out of its queue, or let it save and stop."),
    "kill": ("steer", "End JOB now, losing what it did since its last checkpoint."),
    "pause": ("steer", "Hold JOB at its next step's end until `unpause`."),
    "unpause": ("steer", "Let paused JOB go on."),
    "resume": ("steer", "Queue JOB again after cancel, kill or failure."),
    "rm": ("remove", "Remove ended JOBs: run directories and records."),
    "clean": ("remove", "Remove ended jobs of a certain age."),
    "checkpoints": ("checkpoints", "List, verify, prune or export the checkpoints of JOB."),
    "verify-resume": ("verify", "Prove on the first steps of JOB that its resume is exact."),
    "bench": ("bench", "Measure KIND beside the stock library, or project a long job."),
    "logs": ("logs", "Show the log of the daemon, or of JOB (`-` for the latest)."),
    "doctor": ("doctor", "Check this machine and say what to do."),
    "completion": ("completion", "Print the script that completes commands and job ids."),
}

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
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # `warmd jobs | head`: the reader has enough. What Python would still flush at its end
            # goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 the job failed, 2 bad usage, 3 no daemon or server, "
    "4 the job was stopped.",
)
@click.version_option(__version__, message="%(version)s", help="Show the version.")
@common_options
def warmd() -> None:
    """Keep models warm, and run training and inference jobs from a queue."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Errors become one line on stderr."""
    app = App(color=False if os.environ.get("NO_COLOR") else None)
    try:
        code = warmd.main(
            arguments, prog_name="warmd", standalone_mode=False, obj=app, color=app.color
        )
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
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
        # A mistake of ours. Its traceback helps who mends it, not who met it.
        text = f"{type(error).__name__}: {error} (a bug in warmd; --debug shows where)"
        return _failed(app, text, EXIT_FAILED)
    return code if isinstance(code, int) else 0


def _failed(app: App, message: str, code: int) -> int:
    if app.debug:
        import traceback

        traceback.print_exc()
    click.echo(f"Error: {one_line(message)}", err=True)
    return code
