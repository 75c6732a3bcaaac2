"""An answer as `warmd chat` shows it: thinking, text and calls, on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import sys

import orjson
import pytest
from desks import Desk

from warmd.cli.commands.answer import Answer, show
from warmd.cli.commands.chat import message_of
from warmd.daemon.runs.events import EventLog
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.infer import chat_messages

CALLS = [{"id": "call_1", "name": "add", "arguments": '{"a":1}'}]


@pytest.fixture
def job_id(desk: Desk) -> str:
    """A finished answer: two pieces of thinking, two of text, and a call."""
    rundir = RunDir.create(desk.home.runs, "infer", {"spec": {"prompt": "?"}, "origin": "cli"})
    with EventLog(rundir.events, execution=1) as log:
        log.emit("started")
        log.emit("begin", prompt_tokens=4)
        log.emit("text", index=0, text="", tokens=1, reasoning="hm, ")
        log.emit("text", index=0, text="It ", tokens=2, reasoning="well")
        log.emit("text", index=0, text="is", tokens=2, calls=CALLS)
        log.emit("finished", result={})
    rundir.write_result({}, revision=1)
    return rundir.path.name


def test_elsewhere_than_on_a_terminal_thinking_is_on_stderr(desk, job_id, capsys):
    assert show(desk.client, job_id) == (Answer("It is", CALLS), 0)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ('It is\nadd {"a":1}\n', "hm, well\n")


def test_on_a_terminal_thinking_is_dimmed_and_a_call_is_a_line(desk, job_id, monkeypatch):
    terminal, ours = pty.openpty()
    with os.fdopen(ours, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        show(desk.client, job_id)
        seen = os.read(terminal, 4096).decode().replace("\r\n", "\n")
        monkeypatch.undo()
    os.close(terminal)
    thought, *lines = seen.splitlines()
    assert thought.replace("\x1b[2m", "").replace("\x1b[0m", "") == "hm, well"
    assert thought.startswith("\x1b[2m")
    assert thought.endswith("\x1b[0m")
    assert lines == ["It is", 'add {"a":1}']


def test_an_answer_with_a_call_is_a_message_of_the_chat():
    messages = [{"role": "user", "content": "?"}, message_of(Answer("It is", CALLS))]
    chat_messages.parse(orjson.dumps(messages).decode(), "messages")
    assert messages[1]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    ]
    assert "tool_calls" not in message_of(Answer("It is"))
