"""The pool of environments: episodes in processes, and every way in which one can fail."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from episode_pools import GAMES, answers, pool
from running import running

from warmd.jobs.environments.pool import described
from warmd.jobs.errors import JobFailed, SpecError


def test_episodes_are_played_by_gymnasiums_interface():
    with pool("games:HigherLower", size=3) as made:
        for seed in range(6):  # more than there are processes
            made.reset(seed, seed=seed % 2, row={"prompt": "ignored"})
        ends: dict[Any, list[Any]] = {}
        low, high = dict.fromkeys(range(6), 0), dict.fromkeys(range(6), 9)
        guess: dict[Any, int] = {}
        while len(ends) < 6:
            for one in made.poll(10.0):
                assert one.failure is None, one.failure
                seed, found = int(str(one.episode)), one.found
                if found.get("terminated") or found.get("truncated"):
                    ends[seed] = [found["reward"], found["info"]]
                    made.release(seed)
                    continue
                if found["observation"] == "low=":
                    low[seed] = guess[seed] + 1
                elif found["observation"] == "high=":
                    high[seed] = guess[seed] - 1
                guess[seed] = (low[seed] + high[seed]) // 2
                made.act(seed, str(guess[seed]))
    assert all(end == [1.0, {"success": True}] for end in ends.values())
    assert guess[0] == guess[2] == guess[4]  # the members of a group have one task


def test_episodes_are_played_by_trls_interface():
    with pool("games:Table") as made:
        made.reset("a", seed=1, row={"key": 1, "cells": [5, 6], "more": 0})
        first = answers(made, 1)["a"]
        assert first.found["observation"] == "Which number is in cell 1?"
        calls = [
            {"name": "read", "arguments": {"cell": 1}},
            {"name": "read", "arguments": {"cell": 9}},
            {"name": "count", "arguments": {}},
            {"name": "reset", "arguments": {}},
        ]
        made.act("a", calls)
        found = answers(made, 1)["a"].found
        assert [one["content"] for one in found["observation"]] == [
            "6",
            "{'error': 'list index out of range'}",
            "2",
            "{'error': 'Tool reset not found.'}",
        ]
        assert found["failures"] == 2
        made.rewards("a", {})
        assert answers(made, 1)["a"].found == {"reward": 2.0, "parts": {}}
        made.release("a")


def test_a_row_chooses_among_several_environments():
    row = {"key": 0, "cells": [7]}
    with pool("games:BOTH", size=1) as made:
        made.reset("a", seed=1, row={**row, "environment": "other"})
        assert answers(made, 1)["a"].failure is None
        made.release("a")
        made.reset("b", seed=1, row={**row, "environment": "third"})
        failure = answers(made, 1)["b"].failure
        assert failure is not None
        assert failure.words == ("the column environment must be one of table, other, got 'third'")


@pytest.mark.parametrize(
    ("action", "reason", "words"),
    [
        ("sleep", "timeout", "act took longer than 3 s"),
        ("deaf", "timeout", "act took longer than 3 s"),
        ("exit", "process_died", "its process ended with exit code 3"),
        ("segv", "process_died", "its process ended with signal SIGSEGV"),
        ("raise", "environment_error", "RuntimeError: no more cards"),
        ("quit", "environment_error", "SystemExit: bye"),
        ("nan", "environment_error", "the reward of step must be a finite number, got float nan"),
        ("none", "environment_error", "the reward of step must be a number, got NoneType None"),
        ("text", "environment_error", "must be a finite number, got str '0.5'"),
        ("four", "environment_error", "step must return (observation, reward, terminated, trunc"),
        ("large", "environment_error", "must have at most 4,000,000 characters, got 10,000,000"),
        ("memory", "memory", "GB of memory, more than 0.2 GB"),
    ],
)
def test_a_failed_episode_is_named_and_the_others_do_not_notice(action, reason, words):
    with pool(
        "games:Playful", step_s=3.0 if reason == "timeout" else 60, memory_bytes=200_000_000
    ) as made:
        for name in ("failing", "other"):
            made.reset(name, seed=1, row={})
        assert all(one.failure is None for one in answers(made, 2).values())
        made.act("failing", action)
        failure = answers(made, 1)["failing"].failure
        assert failure is not None
        assert failure.reason == reason
        assert words in failure.words
        made.act("other", "print")
        assert answers(made, 1)["other"].found["observation"] == "print"
        made.reset("next", seed=1, row={})  # in a fresh process
        assert answers(made, 1)["next"].failure is None


def test_what_a_failed_environment_has_started_ends_with_it():
    with pool("games:Playful", size=1, step_s=5.0) as made:
        made.reset("a", seed=1, row={})
        answers(made, 1)
        made.act("a", "child")
        started = psutil.Process(int(answers(made, 1)["a"].found["observation"]))
        made.act("a", "raise")
        assert answers(made, 1)["a"].failure is not None
        psutil.wait_procs([started], timeout=5)
        assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE


def test_a_process_plays_one_episode_after_another_and_seeds_each():
    with pool("games:Playful", size=1) as made:
        seen = []
        for number, seed in enumerate((1, 2, 1)):
            made.reset(number, seed=seed, row={})
            seen.append(answers(made, 1)[number].found["observation"])
            made.release(number)
    assert seen[0] == seen[2] != seen[1]
    assert len({text.split()[0] for text in seen}) == 1


def test_a_late_answer_never_reaches_the_next_episode():
    with pool("games:Playful", size=1, step_s=0.2) as made:
        made.reset("a", seed=1, row={})
        answers(made, 1)
        made.act("a", "late")
        failure = answers(made, 1)["a"].failure
        assert failure is not None
        made.reset("b", seed=1, row={})
        assert "late" not in answers(made, 1)["b"].found["observation"]


def test_environments_are_closed_at_the_end_and_one_that_hangs_is_ended(tmp_path):
    closed = tmp_path / "closed"
    began = time.monotonic()
    with pool("games:Playful", close_s=2.0) as made:
        made.reset("a", seed=1, row={"value": f"touch {closed}"})
        made.reset("b", seed=1, row={"value": "sleep"})
        answers(made, 2)
        made.release("a")
        made.release("b")
    assert closed.exists()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("games:Nothing", "games:Nothing must be a class, or a dict of classes, got no such name"),
        ("nowhere:Class", "nowhere:Class must import, got ModuleNotFoundError"),
        ("gym:games:Table", "games:Table: must have a method step (gym:), got none"),
        ("games:FOLDER", "games:FOLDER must be a class"),
        ("games", "must be module:Class, got 'games'"),
        ("demo:chess", "must be module:Class, or demo:higher-lower, got 'demo:chess'"),
    ],
)
def test_an_environment_that_is_none_is_named(environment, words):
    with pytest.raises(SpecError, match=f"environment: .*{re.escape(words)}"):
        described(environment, [GAMES], 60.0)
    with pytest.raises(JobFailed, match=re.escape(words)), pool(environment, size=1):
        pass


def test_its_processes_import_no_torch_and_are_small():
    with pool("games:HigherLower", size=1) as made:
        made.reset("a", seed=1, row={})
        answers(made, 1)
        (process,) = running("warmd.jobs.environments.server")
        assert process.memory_info().rss < 60_000_000
        maps = {Path(one.path).name for one in process.memory_maps()}
        assert not any("torch" in name or "numpy" in name for name in maps)
