"""Shared by all commands: the options --home, --json and --debug, and the daemon's client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from .given import GivenPath, refusing_empty

if TYPE_CHECKING:
    from ...configs.config import DaemonConfig
    from ...daemon.client.client import Client

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_OFFLINE = "no daemon runs: read from the run directories, where unfinished jobs count as queued"

EXIT_INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended


@dataclass
class App:
    """The common options of this command line; click passes it to every command as `app`."""

    home: Path | None = None  # None: WARMD_HOME, else the default
    as_json: bool = False
    debug: bool = False
    color: bool | None = None  # None: only on a terminal
    # In the command server: leaves the command to the client's own process, which the end of the
    # daemon does not end. Must be called before any output.
    decline: Callable[[], NoReturn] | None = None

    def config(
        self, *, file: Path | None = None, overrides: Mapping[str, object] | None = None
    ) -> DaemonConfig:
        """Read the daemon's settings. Raises ConfigError."""
        from ...configs.config import load

        return load(home=self.home, config_file=file, overrides=overrides or {})

    def config_of_home(self) -> DaemonConfig:
        """Return the settings, without those of a file in the home that is broken, which is noted.

        For commands that need only the path of the home. Raises ConfigError.
        """
        from ...configs.config import ConfigError, load

        try:
            return self.config()
        except ConfigError as error:
            found = load(home=self.home, reads_home=False)  # raises a mistake from elsewhere
            note(f"not read: {error}")
            return found

    def client(self) -> Client:
        """Return a client of the daemon of this home; it connects at its first call."""
        from ...daemon.client.client import Client
        from ..view.fetching import FetchProgress

        client = Client(self.config(), on_outdated=note)
        client.fetch_report = FetchProgress()
        client.on_note = cache(note)  # once for all jobs of a sweep
        return client

    def reader(self) -> Client:
        """Return a client that reads run directories, after a note, where no daemon runs."""
        from ...daemon.client.client import Client

        return Client(self.config(), on_offline=lambda: note(_OFFLINE), on_outdated=note)

    def command(self, text: str) -> str:
        """Return a command to type next, with this home."""
        if self.home is None:
            return f"warmd {text}"
        import shlex

        return f"warmd {text} --home {shlex.quote(str(self.home))}"


def common_options(function: AnyFunction) -> AnyFunction:
    """Add the options that every command takes; their values are stored in the App."""
    options = (
        click.option(
            "--home",
            type=GivenPath(file_okay=False, path_type=Path),
            expose_value=False,
            callback=_store("home"),
            help="The folder that holds all state of the daemon.  [env: WARMD_HOME]",
        ),
        click.option(
            "--json",
            is_flag=True,
            expose_value=False,
            callback=_store("as_json"),
            help="Print JSON, one object a line.",
        ),
        click.option(
            "--debug",
            is_flag=True,
            envvar="WARMD_DEBUG",
            expose_value=False,
            callback=_store("debug"),
            help="Show the traceback of an error.  [env: WARMD_DEBUG]",
        ),
    )
    if not isinstance(function, click.Command):
        function = refusing_empty(function)  # type: ignore[assignment]
    elif function.callback is not None:
        function.callback = refusing_empty(function.callback)
    for option in reversed(options):
        function = option(function)
    return function


def _store(attribute: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        # `warmd --json jobs` is `warmd jobs --json`: an option that is not given changes nothing.
        if value:
            setattr(ctx.ensure_object(App), attribute, value)

    return callback


def note(text: str) -> None:
    """Print a message that is not a result, on stderr."""
    click.echo(text, err=True)
