"""The processes of environments and agents: each plays one episode after another, within limits.

An episode has a process to itself from its reset to its end. A process that has failed, or whose
time or memory has run out, is ended with all that it started; the others do not notice. Deadlines
are by the monotonic clock, which stands still while the machine sleeps.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from ..errors import JobFailed, SpecError
from ..user_code.child import SpawnedChild
from ..user_code.child_server import encoded
from .interface import ENVIRONMENT, TOOLS

Reason = Literal["timeout", "environment_error", "agent_error", "process_died", "memory"]

_SERVER = "warmd.jobs.environments.server"
_MEMORY_S = 1.0  # between two looks at the memory of the processes
_MOST_BYTES = 32 << 20  # of an answer


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an environment; seconds, 0 for none.

    `memory_bytes`: resident memory of a process with all that it has started; 0 for none.
    """

    reset_s: float = 120.0
    step_s: float = 60.0
    episode_s: float = 1800.0
    close_s: float = 5.0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Failure:
    """Why an episode has no end of its own: `words` for people, `trace` of the user's code."""

    reason: Reason
    words: str
    trace: str | None = None


@dataclass(frozen=True)
class Answer:
    """What an environment has answered to the latest request of an episode, or why it has not."""

    episode: Hashable
    request: str  # "reset", "act", "rewards" or "run"
    found: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None


class _Process(SpawnedChild):
    """The process of an environment. Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        super().__init__(_SERVER)
        self._connection.setblocking(False)
        self._unsent = bytearray()
        self._received = bytearray()
        self.episode: Hashable | None = None
        self.request = "load"
        self.deadline: float | None = None  # of the request
        self.episode_deadline: float | None = None
        self.is_loaded = False
        self.has_played = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def begin(self, request: Mapping[str, Any], limit_s: float) -> None:
        """Begin to send a request."""
        self.request = request["do"]
        self.deadline = time.monotonic() + limit_s if limit_s else None
        self._unsent += encoded(request)
        self.flush()

    def load(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Import an environment or agent, and wait for it. Raises SpecError."""
        found = self.ask_whole(request, request["option"], request["name"], limit_s)
        self._connection.setblocking(False)
        self.is_loaded = True
        return found

    def ask_whole(
        self, request: Mapping[str, Any], option: str, name: str, limit_s: float
    ) -> dict[str, Any]:
        """Return the answer to a request about the value of an option. Raises SpecError."""
        try:
            found = self.ask(request, limit_s or None)
        except TimeoutError:
            raise SpecError(
                option, f"{name} must import within {limit_s:g} s, got no answer"
            ) from None
        except EOFError as error:
            raise SpecError(
                option, f"{name} must import, got a process that ended: {error}"
            ) from None
        if "error" in found:
            raise SpecError(str(found.get("field", option)), found["error"])
        return found

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def flush(self) -> None:
        """Send as much as the process takes now."""
        with suppress(BlockingIOError, ConnectionError):  # ended: `take` says so
            while self._unsent:
                sent = self._connection.send(self._unsent)
                del self._unsent[:sent]

    def take(self) -> dict[str, Any] | None:
        """Return an answer that has arrived; None if it is not whole yet.

        Raises EOFError if the process has ended, and ValueError for what is no answer.
        """
        try:
            part = self._connection.recv(1 << 20)
        except BlockingIOError:
            return None
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        self._received += part
        if len(self._received) > _MOST_BYTES:
            raise ValueError(f"its answer has more than {_MOST_BYTES >> 20} MiB")
        if not self._received.endswith(b"\n"):
            return None
        line, self._received = self._received, bytearray()
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("its answer is no object")
        self.deadline = None
        return found

    def end(self) -> int | None:
        """Kill the process with all that it has started; return its exit code."""
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.kill()
        return self._process.returncode

    def memory_bytes(self) -> int:
        """The resident memory of the process and all that it has started."""
        total = 0
        with suppress(psutil.NoSuchProcess):
            main = psutil.Process(self._process.pid)
            for one in [main, *main.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    total += one.memory_info().rss
        return total


@dataclass(frozen=True)
class Described:
    """The interface of an environment, and the JSON schemas of the tools of each of its classes.

    A single class has the name None. `tools`: None if actions are text, and for an agent.
    """

    interface: str
    tools: dict[str | None, list[dict[str, Any]]] | None


def described(
    name: str,
    folders: Sequence[str],
    limit_s: float,
    *,
    option: str = ENVIRONMENT,
    rewards: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> Described:
    """Import an environment or agent in a process of its own, and ask what it is.

    `option`: that names it. `limit_s`: 0 for none. `rewards`: names of reward functions, which may
    take `columns` of the data. Raises SpecError.
    """
    try:
        process = _Process()
    except OSError as error:
        raise SpecError(option, f"a process for it cannot be started: {error}") from error
    try:
        request = _to_load(option, name, folders, rewards, columns)
        interface = process.load(request, limit_s)["interface"]
        if interface != TOOLS:
            return Described(interface, None)
        found = process.ask_whole({"do": "tools"}, option, name, limit_s)
        return Described(interface, dict(found["tools"]))
    finally:
        process.end()


def _to_load(
    option: str, name: str, folders: Sequence[str], rewards: Sequence[str], columns: Sequence[str]
) -> dict[str, Any]:
    return {
        "do": "load",
        "option": option,
        "name": name,
        "folders": list(folders),
        "rewards": list(rewards),
        "columns": list(columns),
    }


class Pool:
    """At most `size` processes of an environment or agent. A context manager: it ends them.

    `name`: as `classes.resolve` or, with the `option` agent, `agents.resolve` takes it, of modules
    in `folders`. `rewards`: names of functions that score episodes, which may take `columns`.

    `interface`: of its classes; `sources`: the digests of its files, by path.

    An episode in an environment is begun with `reset`, continued with `act` and ended with
    `release`, each when `poll` has returned the answer to the one before; `rewards` asks for the
    environment's reward. That of an agent is `run`, and released.
    """

    def __init__(
        self,
        name: str,
        folders: Sequence[str],
        *,
        size: int,
        limits: Limits,
        option: str = ENVIRONMENT,
        rewards: Sequence[str] = (),
        columns: Sequence[str] = (),
    ) -> None:
        self._load = _to_load(option, name, folders, rewards, columns)
        self._option = option
        self._name = name
        self.size = size
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._idle: list[_Process] = []
        self._busy: dict[Hashable, _Process] = {}
        self._resets: dict[Hashable, dict[str, Any]] = {}  # of processes that still load
        self._waiting: deque[tuple[Hashable, dict[str, Any]]] = deque()
        self._next_look = 0.0
        self._is_woken = False  # by what it watches
        self.sources: dict[str, str] = {}
        self.interface = ""

    def __enter__(self) -> Pool:
        """Load the environment in a first process, for its sources. Raises JobFailed."""
        process = self._started()
        try:
            found = process.load(self._load, self._limits.reset_s)
        except SpecError as error:
            self._end(process)
            raise JobFailed(str(error)) from error
        self.sources, self.interface = found["sources"], found["interface"]
        self._idle.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Episodes.

    def reset(self, episode: Hashable, *, seed: int, row: Mapping[str, Any]) -> None:
        """Begin an episode, once a process is free."""
        self._waiting.append((episode, {"do": "reset", "seed": seed, "row": dict(row)}))
        self._fill()

    def run(
        self,
        episode: Hashable,
        *,
        seed: int,
        row: Mapping[str, Any],
        variables: Mapping[str, str],
    ) -> None:
        """Let an agent play an episode, once a process is free; `variables`: of its environment."""
        request = {"do": "run", "seed": seed, "row": dict(row), "variables": dict(variables)}
        self._waiting.append((episode, request))
        self._fill()

    @contextmanager
    def watching(self, other: Any) -> Iterator[None]:
        """Let `poll` return, in this block, when something can be read from a file or socket."""
        self._selector.register(other, selectors.EVENT_READ)
        try:
            yield
        finally:
            self._selector.unregister(other)

    def act(self, episode: Hashable, action: Any) -> None:
        """Let the environment answer to what the policy has done."""
        self._begin(self._busy[episode], {"do": "act", "action": action}, self._limits.step_s)

    def rewards(self, episode: Hashable, played: Mapping[str, Any]) -> None:
        """Ask for the reward that the environment itself gives, and for those of functions.

        `played`: the episode as `EpisodeRewards.score` takes it; {} without functions.
        """
        request = {"do": "rewards", "played": played}
        self._begin(self._busy[episode], request, self._limits.step_s)

    def release(self, episode: Hashable) -> None:
        """End an episode: its process begins another one."""
        process = self._busy.pop(episode)
        process.episode, process.has_played = None, True
        self._idle.append(process)
        self._fill()

    def poll(self, timeout_s: float | None) -> list[Answer]:
        """Return the answers that have arrived; wait for one, at most so long (None: no limit).

        Returns none if what it watches can be read. A failed episode is over: its process has
        ended, and it must not be released.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._is_woken = False
            found = [*self._arrived(until), *self._late(), *self._too_large()]
            self._fill()
            if found or self._is_woken or not self._busy:
                return found
            if until is not None and time.monotonic() >= until:
                return []

    def close(self) -> None:
        """End all processes; idle ones may close their environments first, within a limit."""
        closing = [process for process in self._idle if process.has_played]
        for process in closing:
            self._begin(process, {"do": "close"}, self._limits.close_s)
        until = time.monotonic() + self._limits.close_s
        while closing and (left_s := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                process = key.data
                if process not in closing:
                    self._selector.unregister(process)
                    continue
                try:
                    is_done = process.take() is not None
                except (EOFError, ValueError):
                    is_done = True
                if is_done:
                    closing.remove(process)
                    self._selector.unregister(process)
        for process in [*self._idle, *self._busy.values()]:
            process.end()
        self._idle.clear()
        self._busy.clear()
        self._waiting.clear()
        self._selector.close()

    # Processes.

    def _fill(self) -> None:
        """Give waiting episodes to idle or new processes."""
        while self._waiting and (self._idle or len(self._busy) < self.size):
            episode, request = self._waiting.popleft()
            process = self._idle.pop() if self._idle else self._started()
            process.episode = episode
            self._busy[episode] = process
            if process.is_loaded:
                self._begin_episode(process, request)
            else:
                self._resets[episode] = request
                self._begin(process, self._load, self._limits.reset_s)

    def _started(self) -> _Process:
        try:
            process = _Process()
        except OSError as error:
            raise JobFailed(
                f"{self._option}: a process of {self._name} cannot be started: {error}"
            ) from error
        self._selector.register(process, selectors.EVENT_READ, process)
        return process

    def _begin_episode(self, process: _Process, request: Mapping[str, Any]) -> None:
        limit_s = self._limits.episode_s
        process.episode_deadline = time.monotonic() + limit_s if limit_s else None
        self._begin(process, request, 0 if request["do"] == "run" else self._limits.reset_s)

    def _begin(self, process: _Process, request: Mapping[str, Any], limit_s: float) -> None:
        process.begin(request, limit_s)
        self._watch(process)

    def _watch(self, process: _Process) -> None:
        writes = selectors.EVENT_WRITE if process.is_sending else 0
        self._selector.modify(process, selectors.EVENT_READ | writes, process)

    def _arrived(self, until: float | None) -> Iterator[Answer]:
        for key, mask in self._selector.select(self._wait_s(until)):
            process: _Process | None = key.data
            if process is None:
                self._is_woken = True
                continue
            if mask & selectors.EVENT_WRITE:
                process.flush()
                self._watch(process)
            if mask & selectors.EVENT_READ:
                yield from self._answers_of(process)

    def _answers_of(self, process: _Process) -> Iterator[Answer]:
        try:
            found = process.take()
        except EOFError:
            code = self._end(process)
            if process.episode is not None:
                words = f"its process ended with {_exit_words(code)}"
                yield self._failed(process, Failure("process_died", words))
            return
        except ValueError as error:
            self._end(process)
            yield self._failed(process, Failure("environment_error", str(error)))
            return
        if found is None or process.episode is None:
            return
        if "error" in found:
            self._end(process)
            trace = found.get("trace")
            yield self._failed(process, Failure("environment_error", found["error"], trace))
        elif process.request == "load":
            process.is_loaded = True
            self._begin_episode(process, self._resets.pop(process.episode))
        else:
            yield Answer(process.episode, process.request, found)

    def _late(self) -> Iterator[Answer]:
        now = time.monotonic()
        for process in list(self._busy.values()):
            if process.deadline is not None and now >= process.deadline:
                limit_s = self._limits.step_s
                if process.request in ("load", "reset"):
                    limit_s = self._limits.reset_s
                words = f"{process.request} took longer than {limit_s:g} s"
            elif process.episode_deadline is not None and now >= process.episode_deadline:
                words = f"the episode took longer than {self._limits.episode_s:g} s"
            else:
                continue
            self._end(process)
            yield self._failed(process, Failure("timeout", words))

    def _too_large(self) -> Iterator[Answer]:
        most, now = self._limits.memory_bytes, time.monotonic()
        if not most or now < self._next_look:
            return
        self._next_look = now + _MEMORY_S
        for process in list(self._busy.values()):
            used = process.memory_bytes()
            if used > most:
                self._end(process)
                words = f"it uses {used / 1e9:.2f} GB of memory, more than {most / 1e9:g} GB"
                yield self._failed(process, Failure("memory", words))

    def _failed(self, process: _Process, failure: Failure) -> Answer:
        assert process.episode is not None
        request = "reset" if process.request == "load" else process.request
        self._resets.pop(process.episode, None)
        return Answer(process.episode, request, failure=failure)

    def _end(self, process: _Process) -> int | None:
        self._selector.unregister(process)
        if process in self._idle:
            self._idle.remove(process)
        self._busy.pop(process.episode, None)
        return process.end()

    def _wait_s(self, until: float | None) -> float | None:
        ends = [until] if until is not None else []
        for process in self._busy.values():
            ends += [end for end in (process.deadline, process.episode_deadline) if end is not None]
        if self._limits.memory_bytes:
            ends.append(self._next_look)
        return None if not ends else max(min(ends) - time.monotonic(), 0.0)


def _exit_words(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
