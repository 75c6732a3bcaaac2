"""Control characters in names, texts, logs and messages do not reach the user's terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from desks import Desk
from terminal import seen_on_a_terminal

# Move the cursor up, clear the screen, change the title, answer for the user, reverse the text.
ATTACK = "a\x1b[5A\x1b[2J\x1b]0;title\x07\x1b[6n\x9b2J\rb\u202ec"
OURS = re.compile(r"\x1b\[[0-9]{1,2}m|\x1b\[K|\r")


def assert_harmless(seen: str) -> None:
    rest = OURS.sub("", seen)
    assert "title" in rest  # the text was shown
    assert "\rb" not in seen
    assert [c for c in rest if c in "\x1b\x07\x9b\u202e" or (c < " " and c not in "\n\t")] == []


@pytest.fixture
def job(desk: Desk) -> str:
    return desk.submit()


def test_names_of_columns(tmp_path: Path):
    rows = tmp_path / "rows.csv"
    rows.write_bytes(f'question,answer,"{ATTACK}"\nq,a,x\n'.encode())
    assert_harmless(seen_on_a_terminal("data", "show", str(rows), WARMD_HOME=str(tmp_path)))


@pytest.mark.slow
def test_the_log_of_a_job(desk: Desk, job: str):
    log = desk.client.rundir(job).log
    log.write_text(f"{ATTACK}\n")
    assert_harmless(seen_on_a_terminal("logs", job, **desk.environ))
    assert "\x1b]0;title" in desk.warmd("logs", job).out  # not on a terminal


@pytest.mark.slow
def test_messages_of_errors(tmp_path: Path):
    seen = seen_on_a_terminal("data", "show", f"/{ATTACK}.jsonl", WARMD_HOME=str(tmp_path))
    assert_harmless(seen)


def test_results_and_events(desk: Desk, job: str):
    run = desk.begin()
    run.log.emit("warning", message=ATTACK)
    desk.client.rundir(job).write_result({"title": ATTACK}, revision=1)
    run.finish({"title": ATTACK})
    assert_harmless(seen_on_a_terminal("result", job, **desk.environ))
    assert_harmless(seen_on_a_terminal("tail", job, **desk.environ))
