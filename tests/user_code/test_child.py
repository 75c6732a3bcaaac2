"""A process that answers as JSON lines: its limits, its output, its death and its end."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest
from breadth import mostly_slow

from warmd.jobs.user_code.child import SpawnedChild

SERVER = """
import os, sys, time
import numpy as np
from warmd.jobs.user_code.child_server import parent, serve

def answer(request):
    match request["do"]:
        case "print":
            print("not an answer", flush=True)
            os.write(1, b"{}")
        case "hang":
            time.sleep(60)
        case "leave":
            os.system("sleep 30 &")
            os._exit(3)
        case "die":
            os._exit(3)
        case "half":
            connection.sendall(b'{"half":')
            time.sleep(60)
    return {"pid": os.getpid(), "length": len(request.get("text", "")), "array": np.ones(2)}

connection = parent()
if "deaf" in sys.argv[0]:
    time.sleep(60)
serve(answer, connection)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    for name in ("answering", "deaf"):
        (tmp_path / f"{name}.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return SpawnedChild


def test_requests_are_answered_in_order_whatever_the_process_prints(start, capfd):
    with closing(start("answering")) as child:
        half = "\ud83d" + "a" * (3 << 20)
        first, second = child.ask({"do": "print"}), child.ask({"do": "", "text": half}, 60.0)
    assert first["pid"] == second["pid"] != os.getpid()
    assert (second["length"], second["array"]) == (len(half), [1.0, 1.0])
    assert "not an answer" in capfd.readouterr().err
    assert not Path(f"/proc/{first['pid']}").exists()


@pytest.mark.parametrize("what", mostly_slow(["hang", "half"], but=["half"]))
def test_a_process_that_does_not_answer_in_time_is_killed_by_its_parent(start, what):
    child = start("answering")
    pid = child.ask({"do": ""}, 60.0)["pid"]
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        child.ask({"do": what}, 0.2)
    child.kill()
    assert time.monotonic() - begun < 10
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_reads_nothing_does_not_hold_its_parent(start):
    child = start("deaf")
    with pytest.raises(TimeoutError):
        child.send({"text": "a" * (8 << 20)}, 0.2)
    child.kill()


# leave: with a program that outlives it
@pytest.mark.parametrize("how", mostly_slow(["die", "leave"], but=["die"]))
def test_the_death_of_a_process_is_reported_with_its_exit_code(start, how):
    child = start("answering")
    child.send({"do": how})
    begun = time.monotonic()
    with pytest.raises(EOFError, match="exit code 3"):
        child.receive(60.0)
    assert time.monotonic() - begun < 20
    with pytest.raises(EOFError, match="exit code 3"):
        child.ask({"do": ""}, 60.0)
    child.close()
