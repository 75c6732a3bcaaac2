"""How the gateway finds the completions of a step in a large file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from warmd.daemon.gateway.core import kept_completions
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.errors import NotFound
from warmd.jobs.grpo.completions import FILE

MOST = 10_000


def line(step: int, number: int, length: int) -> bytes:
    found = {"step": step, "row": number, "completion": f"{number} " + "x" * length}
    return orjson.dumps(found) + b"\n"


def write(folder: Path, content: bytes) -> RunDir:
    (folder / FILE).write_bytes(content)
    return RunDir(folder)


def found(rundir: RunDir, step: int | None) -> dict[str, Any]:
    return kept_completions.find(rundir, step=step, row=None, text="", limit=MOST)


def numbers(answer: dict[str, Any]) -> list[int]:
    return [one["row"] for one in answer["samples"]]


@pytest.mark.parametrize("seed", range(8))
def test_each_step_is_found_whatever_the_sizes_of_steps_and_lines(tmp_path, seed):
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(1000), draw.choice([1, 2, 40])))
    longest = draw.choice([10, 3000, 200_000])
    most = min(200, 2 + 10**6 // longest)  # lines of a step
    rows = {step: list(range(draw.choice([1, 3, most]))) for step in steps}
    lines = [line(s, n, draw.randrange(longest)) for s in steps for n in rows[s]]
    rundir = write(tmp_path, b"".join(lines))
    for step in steps:
        answer = found(rundir, step)
        assert answer["steps"] == steps
        assert numbers(answer) == rows[step]
    assert numbers(found(rundir, None)) == rows[steps[-1]]
    with pytest.raises(NotFound, match="has no completions of step 1000"):
        found(rundir, 1000)


def test_most_of_a_large_file_is_not_read(tmp_path, monkeypatch):
    rundir = write(tmp_path, b"".join(line(s, n, 2000) for s in (1, 2) for n in range(2000)))
    looked_at: list[bytes] = []
    step_of = kept_completions._step_of

    def noted(line: bytes, *, least: int) -> int:
        looked_at.append(line)
        return step_of(line, least=least)

    monkeypatch.setattr(kept_completions, "_step_of", noted)
    with (rundir.path / FILE).open("rb") as file:
        assert list(kept_completions._sections(file)) == [1, 2]
    assert len(looked_at) < 100


def test_steps_in_another_order_and_an_unfinished_line_are_found_line_by_line(tmp_path):
    unordered = b"".join(line(step, number, 900) for step in (5, 3, 5) for number in range(200))
    answer = found(write(tmp_path, unordered), 5)
    assert answer["steps"] == [5, 3]
    assert len(answer["samples"]) == 400
    unfinished = b"".join(line(step, number, 900) for step in (3, 4) for number in range(200))
    answer = found(write(tmp_path, unfinished + b'{"step":9,"row":0,"comp'), None)
    assert (answer["step"], len(answer["samples"])) == (4, 200)


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(tmp_path, monkeypatch):
    rundir = write(tmp_path, b"".join(line(s, n, 900) for s in range(20) for n in range(20)))
    sections = kept_completions._sections

    def replaced(file: Any) -> dict[int, int]:
        found = sections(file)
        (tmp_path / "new").write_bytes(line(19, 0, 10))
        (tmp_path / "new").replace(tmp_path / FILE)
        return found

    monkeypatch.setattr(kept_completions, "_sections", replaced)
    answer = found(rundir, None)
    assert (answer["step"], numbers(answer)) == (19, list(range(20)))


def test_an_empty_file_has_no_steps(tmp_path):
    answer = found(write(tmp_path, b""), None)
    assert (answer["step"], answer["steps"], answer["samples"]) == (None, [], [])
