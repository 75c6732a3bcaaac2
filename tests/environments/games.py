"""Environments for tests: whole ones, and one for each way to fail."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

HANGS_S = 1000  # longer than any limit in the tests: only a kill ends it


class HigherLower:
    """Find a number from 0 to 9 in four guesses."""

    def reset(self, *, seed=None, options=None):
        self.number, self.guesses = random.Random(seed).randrange(10), 0
        return "?=", {}

    def step(self, action):
        self.guesses += 1
        found = action.strip() == str(self.number)
        observation = "" if found else "low=" if action.strip() < str(self.number) else "high="
        return observation, float(found), found, self.guesses == 4, {"success": found}


class Table:
    """TRL's interface: a table that only the tool can read."""

    def reset(self, key, cells, **kwargs):
        self.key, self.cells, self.reads = key, cells, 0
        return f"Which number is in cell {key}?"

    def read(self, cell: int) -> str:
        """Read a cell of the table.

        Args:
            cell: Number of the cell, from 0.
        """
        self.reads += 1
        return str(self.cells[cell])

    async def count(self) -> int:
        """Count the cells."""
        return len(self.cells)

    def get_reward(self):
        return float(self.reads)


BOTH = {"table": Table, "other": Table}


class Playful:
    """Does what the row says at reset, and what the action says at step."""

    def __init__(self):
        self.pid = os.getpid()

    def reset(self, seed=None, options=None):
        self.value = (options or {}).get("value")
        do(options.get("at_reset") if options else None)
        return f"{self.pid} {random.random()}", {}

    def step(self, action):
        found = do(action)
        return (str(found), 0.5, False, False, {}) if not isinstance(found, tuple) else found

    def close(self):
        if self.value:
            do(self.value)


def do(word):
    match word:
        case "sleep":
            time.sleep(HANGS_S)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(HANGS_S)
        case "exit":
            os._exit(3)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise RuntimeError("no more cards")
        case "quit":
            sys.exit("bye")
        case "nan":
            return "", float("nan"), False, False, {}
        case "none":
            return "", None, False, False, {}
        case "text":
            return "", "0.5", False, False, {}
        case "four":
            return "", 0.5, False, {}
        case "large":
            return "x" * 10_000_000, 0.5, False, False, {}
        case "print":
            sys.stdout.write("y" * 1_000_000)
        case "child":
            code = f"import time; time.sleep({HANGS_S})"
            started = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            return started.pid
        case "memory":
            hog = bytearray(300_000_000)
            hog[::4096] = b"x" * len(hog[::4096])
            time.sleep(HANGS_S)
        case "late":
            time.sleep(1)  # longer than the limit of a step in that test, 0.2 s
        case str() if word.startswith("touch "):
            open(word.removeprefix("touch "), "w").close()
    return word


class Sleepy(HigherLower):
    """HigherLower that takes its time, another one at each step, and fails for one number."""

    def step(self, action):
        time.sleep(random.SystemRandom().random() / 20)
        return super().step(action)


class Unlucky(HigherLower):
    """Fails where the row says so: in the first process, or always."""

    def reset(self, *, seed=None, options=None):
        marker = options.get("once")
        if options.get("always") or (marker and not os.path.exists(marker)):
            if marker:
                open(marker, "w").close()
            raise RuntimeError("no table is free")
        return super().reset(seed=seed, options=options)


class Digits:
    """Three turns, each worth the share of digits in its action: a random model earns some."""

    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return f"{seed}?", {}

    def step(self, action):
        self.turns += 1
        share = sum(letter.isdigit() for letter in action) / (len(action) + 1)
        return f"[{len(action)}]", share, self.turns == 3, False, {}


class SlowDigits(Digits):
    """Digits that takes another time at each step."""

    def step(self, action):
        time.sleep(random.SystemRandom().random() / 30)
        return super().step(action)


class CountedDigits(SlowDigits):
    """Digits that writes a line where the row says, if it does, when an episode is over."""

    def reset(self, *, seed=None, options=None):
        self.file = options.get("file")
        return super().reset(seed=seed)

    def step(self, action):
        found = super().step(action)
        if found[2] and self.file:
            with open(self.file, "a") as file:
                file.write("over\n")
        return found


class RareDigits(CountedDigits):
    """CountedDigits that is worth 1 if the first turn begins with a digit, else 0."""

    def step(self, action):
        found = super().step(action)
        return found[0], float(self.turns == 1 and action[:1].isdigit()), *found[2:]


def ended_digits(prompts, completions, completion_ids, **columns):
    """The reward of OneTurn, for completions of tiny models."""
    return [
        sum(letter.isdigit() for letter in text) / (len(text) + 1) if ids[-1] == 2 else 0.0
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


class GatedDigits(RareDigits):
    """RareDigits whose second turn takes as long as a file is missing."""

    def reset(self, *, seed=None, options=None):
        self.gate = options["gate"]
        return super().reset(seed=seed, options=options)

    def step(self, action):
        while self.turns == 1 and not os.path.exists(self.gate):
            time.sleep(0.01)
        return super().step(action)


class OneTurn:
    """An episode of one turn, worth the share of digits in it, if it ends by itself."""

    def reset(self, **row):
        return None, {}

    def step(self, action):
        share = sum(letter.isdigit() for letter in action) / (len(action) + 1)
        return "", share, True, False, {}


class LateDigits(Digits):
    """Digits whose second step of a task with an odd seed never ends."""

    def reset(self, *, seed=None, options=None):
        self.is_late = seed % 2 == 1
        return super().reset(seed=seed)

    def step(self, action):
        if self.is_late and self.turns == 1:
            time.sleep(HANGS_S)
        return super().step(action)


class Broken(Digits):
    """Never begins."""

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no more cards")


class Unpaid:
    """Tools without a reward."""

    def reset(self, **row):
        return None

    def read(self, cell: int) -> str:
        """Read a cell.

        Args:
            cell: Its number.
        """
        return str(cell)


class Undocumented(Unpaid):
    """A tool without type hints and docstring, of which no JSON schema can be made."""

    def read(self, cell):
        return str(cell)

    def get_reward(self):
        return 0.0


def noted(prompts, completions, completion_ids, environments, key, **others):
    """Note what a reward function gets of each episode; the reward is the number of reads."""
    with open(os.environ["NOTED"], "a") as file:
        for rows in zip(prompts, completions, completion_ids, environments, key, strict=True):
            prompt, completion, ids, environment, number = rows
            got = [number, prompt, completion, ids, environment.reads, sorted(others)]
            file.write(json.dumps(got) + "\n")
    return [float(one.reads) for one in environments]


async def right(completions, environments, **others):
    """1 if the last message has the number in question, None if the table was not read."""
    return [
        float(str(one.cells[one.key]) in chat[-1]["content"]) if one.reads else None
        for chat, one in zip(completions, environments, strict=True)
    ]


def length(prompts, completions, answers):
    """The number of digits, of text."""
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def broken(completions, **others):
    raise RuntimeError("no more ideas")


class Unrewarded(Table):
    """TRL's interface without a reward of its own."""

    get_reward = None  # type: ignore[assignment]


class SlowCountedDigits(CountedDigits):
    """CountedDigits that notes the number of its row, and takes a while."""

    def reset(self, *, seed=None, options=None):
        self.number = options["number"]
        return super().reset(seed=seed, options=options)

    def step(self, action):
        time.sleep(0.01 + random.random() / 50)
        file, self.file = self.file, None
        found = super().step(action)
        self.file = file
        if found[2]:
            with open(file, "a") as log:
                log.write(f"{self.number}\n")
        return found
