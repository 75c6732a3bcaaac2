"""Games as servers that OpenEnv itself makes: `python openenv_games.py GAME PORT`.

Runs in an environment that has OpenEnv, and not warmd.
"""
# mypy: ignore-errors

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_app,
)


class Guess(Action):
    guess: str


class Seen(Observation):
    text: str


class HigherLower(Environment):
    """Find a number from 0 to 9 in four guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self.number, self.guesses = random.Random(seed).randrange(10), 0
        return Seen(text="?=")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Seen:
        self.guesses += 1
        found = action.guess.strip() == str(self.number)
        text = "" if found else "low=" if action.guess.strip() < str(self.number) else "high="
        success = {"success": found}
        done = found or self.guesses == 4
        return Seen(text=text, reward=float(found), done=done, metadata=success)


class Table(MCPEnvironment):
    """A table that only the tool can read."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self) -> None:
        tools = FastMCP("table")

        @tools.tool
        def read(cell: int) -> str:
            """Read a cell of the table."""
            return str(self.cells[cell])

        super().__init__(tools)

    def reset(self, cells: list[int] | None = None, **_: Any) -> Observation:
        self.cells = cells or []
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("no such action")


if __name__ == "__main__":
    if sys.argv[1] == "text":
        app = create_app(HigherLower, Guess, Seen, max_concurrent_envs=4)
    else:
        app = create_app(Table, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
