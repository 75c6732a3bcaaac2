"""The command that checks a GPU: its parts that need no GPU, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parent / "check.py"


def check(folder: Path, *arguments: str) -> tuple[int, str, list[dict[str, object]]]:
    """Run it; return its exit code, its output and its facts."""
    facts = folder / "facts.json"
    done = subprocess.run(
        [sys.executable, str(CHECK), "--json", str(facts), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout + done.stderr, json.loads(facts.read_text())


@pytest.mark.nightly(
    part="levels", catches="GPU checks that fail for another reason than a missing GPU"
)
@pytest.mark.parametrize("half", [0, 1])
def test_every_check_runs_without_a_gpu_and_passes(tmp_path, monkeypatch, half):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = sorted(path.stem for path in _checks())[half::2]
    code, output, facts = check(tmp_path, "--limit", "270", "--only", ",".join(names))
    assert code == 0, output
    assert {fact["check"] for fact in facts} == set(names)
    assert not [fact for fact in facts if fact["name"] == "started"], output  # all had time


@pytest.mark.slow
def test_a_check_that_does_not_end_is_killed_and_fails(tmp_path):
    code, output, [fact] = check(tmp_path, "--only", "environment", "--limit", "0.2")
    assert code == 1
    assert (fact["name"], fact["ok"]) == ("ended", False)
    assert "BAD  ended: killed after 0 s  (expected: exit code 0)" in output


def _checks() -> list[Path]:
    return [path for path in (CHECK.parent / "checks").glob("*.py") if path.stem != "__init__"]
