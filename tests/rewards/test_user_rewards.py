"""User rewards: how they are called, imported and identified, and their error messages."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.rewards.user_rewards import KeywordReward, PositionalReward, imported
from warmd.jobs.user_code import tracebacks
from warmd.jobs.user_code.modules import changed, digests, load, own_modules

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a module into a folder and returns the folder."""

    def write(code: str, *, name: str = "mine", folder: str = "submitted") -> str:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / f"{name}.py").write_text(code)
        return str(place)

    return write


def reward_of(folder: str, *columns: str, name: str = "mine:f") -> PositionalReward | KeywordReward:
    with own_modules([folder]):
        return imported(name, columns)


# Calling conventions.


@pytest.mark.parametrize(
    "parameters",
    [
        "prompts, completions, answers",
        "p, c, a",
        "p, c, a, **anything",
        "p, c, a, /, **kwargs",
        "prompts, completions, answer",  # without **kwargs TRL could not call it
        "prompts, completions, answers, strict=True",
        "*args",
        "*args, **kwargs",
    ],
)
def test_a_positional_function_gets_three_lists(write, parameters):
    reward = reward_of(write(f"def f({parameters}): return [0]"), "answer")
    assert isinstance(reward, PositionalReward)
    assert reward(["p"], ["c"], ["a"]) == [0.0]


@pytest.mark.parametrize(
    "parameters",
    [
        "prompts, completions, answer, **kwargs",
        "completions, **kwargs",
        "completions, tests, **kwargs",
        "completions, *, tests, trainer_state, **kwargs",
        "prompts, completions, answer=None, **kwargs",
        "completion_ids, missing=None, **kwargs",
        "**kwargs",
    ],
)
def test_a_function_as_trl_calls_it_is_called_by_keywords(write, parameters):
    reward = reward_of(write(f"def f({parameters}): return [0]"), "answer", "tests")
    assert isinstance(reward, KeywordReward)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def f(completions): pass",
            "reward: mine:f must take (prompts, completions, answers), or TRL's keywords with "
            "**kwargs, got (completions)",
        ),
        (
            "def f(completions, solution, **kwargs): pass",
            "reward: mine:f: the parameter solution must be a column of the data (answer, tests) "
            "or one of prompts, completions, completion_ids, trainer_state, log_extra, "
            "log_metric, got neither",
        ),
        (
            "async def f(p, c, a): pass",
            "reward: mine:f must take (prompts, completions, answers), or TRL's keywords with "
            "**kwargs, got an async function of (p, c, a)",
        ),
    ],
)
def test_an_unsupported_signature_is_refused_by_name(write, code, message):
    with pytest.raises(SpecError) as caught:
        reward_of(write(code), "answer", "tests")
    assert str(caught.value) == message


def test_a_trl_reward_may_return_none_as_a_score(write):
    reward = reward_of(write("def f(completions, **kwargs): return [None, 2]"))
    assert isinstance(reward, KeywordReward)
    assert reward(completions=["a", "b"]) == [None, 2.0]
    with pytest.raises(JobFailed, match=r"a list of 1 finite numbers or None, got 2$"):
        reward(completions=["a"])


def test_an_async_function_is_awaited(write):
    reward = reward_of(write("async def f(completions, **kwargs): return [1] * len(completions)"))
    assert isinstance(reward, KeywordReward)
    assert reward.is_async
    assert asyncio.run(reward.asynchronously(completions=["a", "b"])) == [1.0, 1.0]


# Faults.

FAULTS = """
def g():
    raise {error}

def f(prompts, completions, answers):
    return g()
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ValueError('no\\n  number')", "ValueError: no number"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("SystemExit(3)", "SystemExit: 3"),
        ("type('Boom', (BaseException,), {})('x')", "Boom: x"),
    ],
)
def test_an_exception_of_a_reward_is_one_line_with_file_and_line(write, error, said):
    folder = write(FAULTS.replace("{error}", error))
    reward = reward_of(folder)
    assert isinstance(reward, PositionalReward)
    with pytest.raises(JobFailed) as caught:
        reward(["p"], ["c"], [None])
    assert str(caught.value) == f"reward mine:f failed at {folder}/mine.py:3: {said}"


def test_an_error_in_a_library_is_reported_at_the_line_of_the_reward_that_called_it(write):
    folder = write("import json\n\ndef f(p, c, a):\n    return json.loads('{')")
    reward = reward_of(folder)
    assert isinstance(reward, PositionalReward)
    with pytest.raises(JobFailed, match=rf"failed at {folder}/mine.py:4: JSONDecodeError"):
        reward(["p"], ["c"], [None])


def test_a_message_of_megabytes_is_truncated(write):
    reward = reward_of(write(FAULTS.replace("{error}", "ValueError('x' * 10_000_000)")))
    assert isinstance(reward, PositionalReward)
    with pytest.raises(JobFailed) as caught:
        reward(["p"], ["c"], [None])
    assert len(str(caught.value)) < 1500
    assert "characters left out" in str(caught.value)
    assert len(tracebacks.trace(caught.value)) < tracebacks.MOST_TRACE + 100


def test_a_forked_child_never_returns_from_a_reward(write, tmp_path, capfd):
    place = tmp_path / "child"
    code = f"""
import os
from pathlib import Path

def f(p, c, a):
    if child := os.fork():
        Path({str(place)!r}).write_text(str(child))
    return [0]
"""
    reward = reward_of(write(code))
    assert isinstance(reward, PositionalReward)
    assert reward(["p"], ["c"], [None]) == [0.0]
    (tmp_path / f"back-{os.getpid()}").touch()
    _, status = os.waitpid(int(place.read_text()), 0)
    assert os.waitstatus_to_exitcode(status) == 70
    assert [path.name for path in tmp_path.glob("back-*")] == [f"back-{os.getpid()}"]
    assert "forked by the job's code" in capfd.readouterr().err


# Imports.


def test_every_job_imports_the_current_code(write):
    for score in (1, 2):  # of the same size, in the same second
        write("x = 1", name="other")
        reward: Any = reward_of(write(f"import other\n\ndef f(p, c, a): return [{score}]"))
        assert reward(["p"], ["c"], [None]) == [float(score)]
    assert not {"mine", "other"} & sys.modules.keys()


def test_modules_of_the_same_name_in_two_folders_are_distinguished(write):
    folders = [
        write(f"from helper import x\n\ndef f(p, c, a): return [x + {n}]", folder=f"of{n}")
        for n in (1, 2)
    ]
    for n in (1, 2):
        write(f"x = {10 * n}", name="helper", folder=f"of{n}")
    scores = []
    for folder in folders:
        reward: Any = reward_of(folder)
        scores += reward(["p"], ["c"], [None])
    assert scores == [11.0, 22.0]


def test_a_user_module_with_the_name_of_a_library_does_not_replace_the_library(write):
    folder = write("def f(p, c, a): return [7]", name="json")
    with own_modules([folder]):
        reward: Any = imported("json:f", ())
        assert importlib.import_module("json").loads("1") == 1
        assert f"{folder}/json.py" in digests()
    assert reward(["p"], ["c"], [None]) == [7.0]
    assert not [name for name in sys.modules if folder in name]


def test_a_module_in_use_can_be_found_again_by_its_name(write):
    # As pickle does, for a pool of processes.
    with own_modules([write("def f(p, c, a): return [7]")]):
        assert load("mine") is importlib.import_module("mine")


def test_the_code_digests_of_a_job_are_of_its_own_files_only(write):
    folder = write("import json, helper\n\ndef f(p, c, a): return [0]")
    write("x = 1", name="helper")
    with own_modules([folder]):
        imported("mine:f", ())
        known = digests()
        mine = {file: digest for file, digest in known.items() if file.startswith(folder)}
        assert sorted(mine) == [f"{folder}/helper.py", f"{folder}/mine.py"]
        assert not [file for file in known if "site-packages" in file or file.endswith("json.py")]
        assert changed(mine) == []
        write("x = 2", name="helper")
        assert changed(mine) == [f"{folder}/helper.py"]
        assert digests(mine)[f"{folder}/helper.py"] == mine[f"{folder}/helper.py"]  # as loaded
