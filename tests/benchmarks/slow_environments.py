"""A rollout of 16 episodes of 4 turns in an environment that waits: TRL's trainer and warmd.

    PYTHONPATH=tests/support python tests/benchmarks/slow_environments.py --pairs 3

What the policy writes is given, so that only environments and what drives them are measured. Both
sides play the same class with one tool. Imports torch and TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import click
from scripted_policy import Script, StockRollouts
from tool_chats import source_of, tokenizer

from warmd.jobs.environments.calls import CallReader
from warmd.jobs.environments.environment_player import EnvironmentPlayer
from warmd.jobs.environments.episodes import Rules
from warmd.jobs.environments.pool import Limits, Pool, described
from warmd.jobs.environments.tasks import Task
from warmd.jobs.environments.turns import ChatTurns

EPISODES, CALLS = 16, 3
WAIT = "WARMD_BENCH_WAIT_MS"
CALL = "<tool_call>\n" + json.dumps({"name": "look", "arguments": {"place": 1}}) + "\n</tool_call>"
TURNS = [[CALL] * CALLS + ["The number is 7."]] * EPISODES


class Slow:
    """An environment whose tool takes a while."""

    def reset(self, **row: Any) -> str:
        return f"Look for number {row['key']}."

    def look(self, place: int) -> str:
        """Look at a place.

        Args:
            place: Its number.
        """
        time.sleep(float(os.environ[WAIT]) / 1000)
        return f"nothing at {place}"

    def get_reward(self) -> float:
        return 1.0


def rows() -> list[dict[str, Any]]:
    return [{"key": key} for key in range(EPISODES)]


def main() -> None:
    """Print the seconds of both sides for each wait."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--waits", default="0,20,100", help="milliseconds, with commas between")
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    tokens = tokenizer(source_of("qwen3"))
    folder = str(Path(__file__).parent)
    name = f"{Path(__file__).stem}:Slow"
    sys.path.insert(0, folder)
    tools = described(name, [folder], 60.0).tools
    assert tools is not None
    click.echo(f"{'WAIT':>6} {'TRL':>8} {'WARMD':>8} {'TIMES':>6}")
    for wait in args.waits.split(","):
        os.environ[WAIT] = wait
        found: dict[str, list[float]] = {"trl": [], "warmd": []}
        with (
            tempfile.TemporaryDirectory() as output,
            Pool(name, [folder], size=EPISODES, limits=Limits()) as pool,
        ):
            stock = StockRollouts(tokens, rows(), Slow, Path(output), most_turns=CALLS + 1)

            def trl(stock: StockRollouts = stock) -> None:
                stock.play(TURNS)

            def warmd(pool: Pool = pool) -> None:
                player = EnvironmentPlayer(
                    pool,
                    Script(tokens, TURNS),
                    ChatTurns(tokens, ends={tokens.eos_token_id}, tools=tools),
                    Rules(max_turn_tokens=1000, max_tokens=10_000),
                    numbers=lambda key, turn: [0.5] * 1000,
                    calls=CallReader(tokens, tools).of,
                )
                tasks = [Task(number, row) for number, row in enumerate(rows())]
                player.play(tasks, [(number, range(1)) for number in range(len(tasks))])

            warmd()  # starts the processes, which serve all steps of a job
            for _ in range(args.pairs):
                for side, play in (("trl", trl), ("warmd", warmd)):
                    began = time.perf_counter()
                    play()
                    found[side].append(time.perf_counter() - began)
        theirs, ours = (statistics.median(found[side]) for side in ("trl", "warmd"))
        click.echo(f"{wait:>3} ms {theirs:>6.2f} s {ours:>6.2f} s {theirs / ours:>6.1f}")


if __name__ == "__main__":
    main()
