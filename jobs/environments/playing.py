"""An environment or agent as a job uses it: its processes, and how a model plays in it.

The same for trainings and evaluations. Imports transformers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..context import Context, WarmModel
from ..errors import JobFailed, SpecError
from ..models.architectures import positions_in
from ..rewards.problems import columns_of
from .agent_keys import URL_FILE
from .agent_player import AgentPlayer
from .agent_replies import AgentTurns
from .calls import CallReader
from .endpoint import Endpoint
from .environment_player import EnvironmentPlayer
from .episodes import Player, Rules
from .interface import TOOLS
from .options import EnvironmentSpec
from .pool import Pool, described
from .tasks import Task
from .turns import ChatTurns, RawTurns, Turns

GATEWAY_S = 60.0  # for a gateway to listen, which starts beside the jobs that a restart resumes


@dataclass(frozen=True, kw_only=True)
class Playing:
    """An environment or agent, and how a model plays.

    `player` makes the Player of a step, by its policy; with `numbers` and the arguments of Player.
    """

    pool: Pool
    rules: Rules
    tasks: Sequence[Task]
    player: Callable[..., Player]


@contextmanager
def playing(
    spec: EnvironmentSpec,
    ctx: Context,
    warm: WarmModel,
    *,
    ends: Collection[int],
    tasks: Sequence[Task],
    sampling: Mapping[str, Any],
    most_tokens: int,
    episodes: int,
) -> Iterator[Playing]:
    """Yield the environment or agent of a job; its processes end with this block.

    `ends`: tokens that end a turn. `sampling`: what turns are sampled with, by name. `most_tokens`:
    after the prompt of an episode. `episodes`: that are played together, by all ranks. Raises
    JobFailed.
    """
    rules = spec.rules(most_tokens, positions_in(warm.model.config))
    columns = columns_of(task.row for task in tasks)
    with (
        spec.pool(ctx.code_folders, episodes, ctx.ranks.size, columns) as pool,
        ExitStack() as stack,
    ):
        if spec.agent is None:
            player = _in_environment(spec, ctx, warm, pool, rules, ends, columns)
        else:
            player = _for_agent(spec, ctx, warm, pool, rules, ends, sampling, stack)
        yield Playing(pool=pool, rules=rules, tasks=tasks, player=player)


def _in_environment(
    spec: EnvironmentSpec,
    ctx: Context,
    warm: WarmModel,
    pool: Pool,
    rules: Rules,
    ends: Collection[int],
    columns: Sequence[str],
) -> Callable[..., Player]:
    tokenizer, calls = warm.tokenizer, None
    is_chat = bool(tokenizer.chat_template)
    if is_chat:
        _check_stop(spec, warm)
    tools = None
    if pool.interface == TOOLS:
        if not is_chat:
            raise JobFailed(
                f"environment: tools need a model with a chat template, and {warm.name} has none"
            )
        tools = _tools(spec, ctx.code_folders, columns)
        calls = CallReader(tokenizer, tools, warm.response_template)
    turns: Turns = RawTurns(tokenizer)
    if is_chat:
        turns = ChatTurns(tokenizer, ends=ends, tools=tools)
    reader = None if calls is None else calls.of

    def player(policy: Any, **others: Any) -> Player:
        return EnvironmentPlayer(
            pool, policy, turns, rules, calls=reader, weights=spec.episode_rewards, **others
        )

    return player


def _for_agent(
    spec: EnvironmentSpec,
    ctx: Context,
    warm: WarmModel,
    pool: Pool,
    rules: Rules,
    ends: Collection[int],
    sampling: Mapping[str, Any],
    stack: ExitStack,
) -> Callable[..., Player]:
    """Open the endpoint of a job until the stack ends it. Raises JobFailed."""
    if not warm.tokenizer.chat_template:
        raise JobFailed(f"agent: needs a model with a chat template, and {warm.name} has none")
    _check_stop(spec, warm)
    turns = AgentTurns(warm.tokenizer, ends=ends, given=warm.response_template)
    url = _gateway_url(ctx)
    try:
        folder = ctx.sockets_dir.resolve(strict=True)
        endpoint = stack.enter_context(Endpoint(folder, ctx.job_id, ctx.ranks.rank))
    except OSError as error:
        raise JobFailed(f"agent: its socket cannot be created: {error}") from error
    stack.enter_context(pool.watching(endpoint))
    warned: set[str] = set()
    names: set[frozenset[str]] = set()

    def warn(words: str) -> None:
        if words not in warned:
            warned.add(words)
            ctx.emit("warning", message=words)

    def player(policy: Any, **others: Any) -> Player:
        return AgentPlayer(
            *(pool, policy, turns, rules),
            endpoint=endpoint,
            url=url,
            sampling=sampling,
            warn=warn,
            names=names,
            **others,
        )

    return player


def _gateway_url(ctx: Context) -> str:
    """Return the URL of the gateway, which may be starting. Raises JobFailed and Stopped."""
    until = time.monotonic() + GATEWAY_S
    while True:
        ctx.check_stop()
        with suppress(OSError):
            url = (ctx.sockets_dir / URL_FILE).read_text()
            at = urlsplit(url)
            with socket.create_connection((at.hostname, at.port), timeout=1):
                return url
        if time.monotonic() >= until:
            raise JobFailed(
                "agent: needs the HTTP API of the daemon, which does not listen: set http_port, "
                "and see `warmd status`"
            )
        time.sleep(0.1)


def _check_stop(spec: EnvironmentSpec, warm: WarmModel) -> None:
    """Refuse texts that end turns, which no end token would close. Raises JobFailed."""
    if spec.stop:
        raise JobFailed(
            f"stop: must be unset for {warm.name}, whose chat template ends turns, got "
            f"{spec.stop[0]!r}"
        )


def _tools(
    spec: EnvironmentSpec, folders: Sequence[str], columns: Sequence[str]
) -> dict[str | None, list[dict[str, Any]]]:
    """Return the JSON schemas of the tools of each class. Raises JobFailed."""
    try:
        found = described(
            str(spec.environment),
            folders,
            spec.environment_reset_timeout,
            rewards=list(spec.episode_rewards),
            columns=columns,
        )
    except SpecError as error:
        raise JobFailed(str(error)) from error
    return found.tools or {}
