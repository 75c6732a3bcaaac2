"""Servers of OpenEnv as environments: played as Gymnasium's interface or by tools; faults named."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import openenv_server
import pytest
import tiny
from episode_pools import answers, pool
from ports import free_port
from running import running
from web_pages import TlsProxy

from warmd.jobs.environments import openenv
from warmd.jobs.environments.interface import EnvironmentFault
from warmd.jobs.environments.pool import Answer, Pool, described
from warmd.jobs.errors import SpecError
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec


@contextmanager
def serving(game: str, port: int = 0, most: int = 8) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its URL."""
    words = [sys.executable, openenv_server.__file__, game, str(port), str(most)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"ws://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def sessions(url: str) -> dict[str, int]:
    with urllib.request.urlopen(url.replace("ws:", "http:") + "/sessions") as answer:
        found: dict[str, int] = json.load(answer)
    return found


def act(made: Pool, action: Any) -> Answer:
    made.act("a", action)
    return answers(made)["a"]


def test_a_game_of_text_is_played_as_gymnasiums_interface():
    with serving("text") as (_, url):
        assert described(url, [], 60.0).interface == "gymnasium"
        with pool(url, size=1) as made:
            for episode in range(2):
                made.reset("a", seed=7, row={"prompt": "ignored"})
                assert answers(made)["a"].found == {"observation": "?=", "info": {}}
                found = [act(made, f" {guess}\n").found for guess in (0, 1, 9, 5)]
                assert [one["reward"] for one in found] == [0.0, 0.0, 0.0, 1.0], episode
                assert [one["observation"] for one in found] == ["low=", "low=", "high=", ""]
                assert [one["terminated"] for one in found] == [False, False, False, True]
                assert found[-1]["info"] == {"success": True}
                made.release("a")
            assert sessions(url) == {"open": 1, "ever": 1}  # one after another in one session
        assert sessions(url)["open"] == 0


def test_an_observation_of_several_fields_is_their_json():
    with serving("text") as (_, url), pool(url, size=1) as made:
        made.reset("a", seed=7, row={})
        answers(made)
        found = act(made, "fields").found
        assert found["observation"] == '{"left": 2, "name": "é"}'
        assert found["reward"] == 0.0


def test_a_game_of_tools_is_played_by_its_tools():
    with serving("tools") as (_, url):
        found = described(url, [], 60.0)
        assert found.tools is not None
        assert [one["function"]["name"] for one in found.tools[None]] == ["read", "answer"]
        assert found.tools[None][0]["function"]["parameters"] == openenv_server.Tools.number
        with pool(url, size=1) as made:
            made.reset("a", seed=7, row={"cells": [5, 6]})
            assert answers(made)["a"].found == {"observation": None, "info": {}}
            calls = [
                {"name": "read", "arguments": {"number": 1}},
                {"name": "write", "arguments": {}},
            ]
            done = act(made, calls).found
            assert [one["content"] for one in done["observation"]] == [
                "6",
                "{'error': 'no write of {}'}",
            ]
            assert (done["failures"], done["terminated"]) == (1, False)
            last = act(made, [{"name": "answer", "arguments": {"number": 6}}, calls[0]]).found
            assert [one["content"] for one in last["observation"]] == ['{"right": true}']
            assert (last["terminated"], last["info"]) == (True, {"success": True})
            made.rewards("a", {})
            assert answers(made)["a"].found == {"reward": 1.25, "parts": {}}
            made.release("a")
            made.reset("a", seed=7, row={})
            answers(made)
            made.rewards("a", {})
            assert answers(made)["a"].found == {"reward": 0.0, "parts": {}}  # of this episode


@pytest.mark.parametrize(
    ("action", "reason", "words"),
    [
        ("hang", "timeout", "act took longer than 3 s"),
        ("raise", "environment_error", "refuses step: no more cards"),
        ("nan", "environment_error", "the reward of step must be a finite number"),
        ("garbage", "environment_error", "must answer with JSON"),
        ("shapeless", "environment_error", "must answer step with an observation, got"),
        ("leave", "environment_error", "has closed the session"),
        ("die", "environment_error", "has closed the session"),
    ],
)
def test_an_episode_that_fails_is_named_and_its_session_ends(action, reason, words):
    with serving("text") as (_, url):
        with pool(url, size=2, step_s=3) as made:
            for episode in "ab":
                made.reset(episode, seed=7, row={})
                answers(made)
            failure = act(made, action).failure
            assert failure is not None
            assert failure.reason == reason
            assert words in failure.words
            if action == "die":
                return
            made.act("b", "5")
            assert answers(made)["b"].found["terminated"]
        deadline = time.monotonic() + 10
        while action != "hang" and sessions(url)["open"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sessions(url)["open"] == (action == "hang")  # the server's own step hangs


def test_a_server_that_restarts_is_reached_again():
    port = free_port()
    with ExitStack() as stack:
        with serving("text", port) as (_, url):
            made = stack.enter_context(pool(url, size=1))
            made.reset("a", seed=7, row={})
            answers(made)
            made.release("a")
        made.reset("a", seed=7, row={})
        assert made.poll(0.5) == []
        with serving("text", port):
            assert answers(made)["a"].found["observation"] == "?="


def test_a_session_waits_for_its_place():
    with serving("text", most=1) as (_, url), pool(url, size=2) as made:
        for episode in "ab":
            made.reset(episode, seed=7, row={})
        (first,) = answers(made)
        assert made.poll(0.5) == []
        made.act(first, "leave")
        found = answers(made, 2)
        assert found.pop(first).failure is not None
        (other,) = found.values()
        assert other.found["observation"] == "?="


@pytest.mark.slow
def test_a_server_without_a_place_says_what_to_do():
    with serving("text", most=0) as (_, url), pool(url, size=1) as made:
        made.reset("a", seed=7, row={})
        failure = answers(made)["a"].failure
        assert failure is not None
        assert failure.words == f"{url} takes no more sessions (see --concurrency): most is 0"


def test_a_server_that_closes_before_the_first_message_is_heard(monkeypatch):
    connection = openenv._connection

    def late(url: str) -> Any:
        made = connection(url)
        time.sleep(0.2)  # until the server has closed
        return made

    monkeypatch.setattr(openenv, "_connection", late)
    monkeypatch.setattr(openenv, "_CONNECT_S", 0.0)
    full = pytest.raises(EnvironmentFault, match=r"takes no more sessions .* most is 0$")
    with serving("text", most=0) as (_, url), full:
        openenv.OpenEnv(url, "guess").reset(7, {})


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ws://127.0.0.1:1", "must be an OpenEnv server that tells its schema, got"),
        ("ftp://localhost:1", "must be module:Class or ws://HOST:PORT (OpenEnv), got 'ftp:"),
        ("ws://", "must be module:Class or ws://HOST:PORT (OpenEnv), got 'ws://'"),
        ("ws://me:secret@localhost:1", "a URL must have no user and no password, got one"),
        ("ws://localhost:1/?a=b", "a URL must end with its path"),
    ],
)
def test_what_is_no_server_is_refused_at_submission(url, words):
    with pytest.raises(SpecError) as caught:
        described(url, [], 60.0)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("game", "words"),
    [("several", "got text, other"), ("array", "got moves"), ("nothing", "got none")],
)
def test_actions_that_text_cannot_be_are_refused(game, words):
    with serving(game) as (_, url), pytest.raises(SpecError, match=words):
        described(url, [], 60.0)


def test_a_server_behind_tls_is_reached(tmp_path, monkeypatch):
    proxy = TlsProxy(tmp_path, "localhost")
    try:
        with serving("text") as (_, url):
            proxy.target_port = int(url.rpartition(":")[2])
            secure = proxy.origin.replace("https:", "wss:")
            with pytest.raises(SpecError, match="CERTIFICATE_VERIFY_FAILED"):
                described(secure, [], 60.0)
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "localhost.crt"))
            with pool(secure, size=1) as made:
                made.reset("a", seed=7, row={})
                begun = answers(made)["a"]
                assert (begun.failure, begun.found.get("observation")) == (None, "?=")
                assert act(made, "5").found["terminated"]
    finally:
        proxy.close()


def test_its_processes_are_small():
    with serving("text") as (_, url), pool(url, size=1) as made:
        made.reset("a", seed=7, row={})
        answers(made)
        (process,) = running("warmd.jobs.environments.server")
        assert process.memory_info().rss < 60_000_000


@pytest.mark.usefixtures("like_a_work_horse")
def test_a_job_trains_on_its_episodes(tmp_path):
    made = tiny.surroundings(tmp_path / "run")
    with serving("text", most=4) as (_, url):
        job = {
            "environment": url,
            "samples": 4,
            "prompts_per_step": 2,
            "num_generations": 4,
            "concurrency": 4,
            "max_turns": 3,
            "max_turn_length": 6,
            "stop": list("abcdefghijklmnopqrstuvwxyz "),  # a random model ends most of its turns
        }
        run(GrpoSpec.parse(job), made.ctx)
        assert sessions(url) == {"open": 0, "ever": 4}
    (begin,) = made.of_type("begin")
    assert (begin["environment"], begin["interface"]) == (url, "gymnasium")
    found = made.of_type("step")
    assert len(found) == 2
    assert all(set(one["ends"]) <= {"terminated", "max_turns", "length"} for one in found)
    assert all(one["episodes"] == 8 and one["turns"] > 1 for one in found)
