"""The optional processes: gateway, notifier, uploader, sweeps and curricula, command server.

Jobs do not need them, so one that keeps dying is restarted forever and never ends the daemon.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable

from ...configs.config import DaemonConfig
from ..groups import folder as groups
from ..host.home import Home
from ..host.messages import (
    GatewaySettings,
    GroupSettings,
    Message,
    NotifierSettings,
    StartCommands,
    UploaderSettings,
)
from .children import GatewayChild, OptionalChild


class Services:
    """Starts the processes that the settings enable, and restarts them with growing delays."""

    def __init__(
        self,
        config: DaemonConfig,
        home: Home,
        url: str,
        selector: selectors.BaseSelector,
        on_restart: Callable[[], None],
    ) -> None:
        """`url`: of Redis. `on_restart` is called before each restart of the gateway."""
        self.gateway = GatewayChild()
        self._notifier = OptionalChild("notify")
        self._uploader = OptionalChild("store")
        self._groups = OptionalChild("groups")
        self._commands = OptionalChild("commands")
        self.wants_commands = False  # a client has asked for the command server
        self._config = config
        self._home = home
        self._url = url
        self._selector = selector
        self._on_restart = on_restart

    def start_gateway_if_due(self) -> None:
        """Start the HTTP API and the dashboard."""
        if self._config.http_port is not None and self.gateway.must_start():
            if self.gateway.started:
                self._on_restart()
            settings = GatewaySettings(self._config.to_json(), self._url)
            self._start(self.gateway, "daemon.gateway", settings, self.gateway.handle)

    def start_notifier_if_due(self) -> None:
        """Start the process that sends notifications about jobs."""
        if self._config.notify is not None and self._notifier.must_start():
            settings = NotifierSettings(self._config.notify, list(self._config.notify_on))
            self._start(self._notifier, "daemon.notify", settings)

    def start_uploader_if_due(self) -> None:
        """Start the process that copies run directories to the bucket."""
        if self._config.run_store is not None and self._uploader.must_start():
            self._start(self._uploader, "daemon.store", UploaderSettings(self._config.run_store))

    def start_groups_if_due(self) -> None:
        """Start the process that advances sweeps and curricula; it ends when none is left."""
        if self._groups.must_start() and groups.active(self._home):
            settings = GroupSettings(self._url, self._config.run_store)
            self._start(self._groups, "daemon.groups", settings)

    def start_commands_if_due(self) -> None:
        """Start the command server, which ends by itself when no command came for a while.

        It belongs to the command line, which this package must not import.
        """
        if not self.wants_commands:
            return
        if self._commands.must_start():
            self._start(self._commands, "cli.command_server", StartCommands())
        self.wants_commands = self._commands.process is None  # it waits after a quick death

    def kill(self) -> None:
        """Kill all of them, and wait until they have ended."""
        every = (self.gateway, self._notifier, self._groups, self._uploader, self._commands)
        for child in every:
            child.kill()

    def _start(
        self,
        child: OptionalChild,
        module: str,
        settings: Message,
        on_message: Callable[[Message], None] = lambda _: None,
    ) -> None:
        child.start(self._selector, f"warmd.{module}", self._home, settings, on_message=on_message)
