"""Commands of earlier versions: each is answered with what to type instead, which exists."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from shell import warmd

from warmd.cli.main import COMMANDS, main
from warmd.cli.shared import former

JOB = "grpo-20261121-184200-x7f2"

# As they are in units, crontabs, preStop hooks and scripts of the earlier version.
TYPED = {
    "notify test": "doctor --notify",
    'drain "$HOSTNAME" --wait': "nodes --drain '$HOSTNAME' --wait",
    "drain gpu7 --json": "nodes --drain gpu7 --json",
    "clean --older-than 30d --keep-models": "rm --older-than 30d --keep-models",
    "clean --older-than 30d --status failed,canceled --dry-run": (
        "rm --older-than 30d --status failed,canceled --dry-run"
    ),
    "digest": "jobs --since 12h",
    "digest --since 18:00 --markdown": "jobs --since 18:00 --markdown",
    "digest --since=1d": "jobs --since=1d",
    f"kill {JOB}": f"cancel --now {JOB}",
    "unpause": "resume",
    f"unpause {JOB}": f"resume {JOB}",
    "sweep": "jobs --kind sweep",
    "sweep list --limit 3": "jobs --kind sweep --limit 3",
    "sweep show": "jobs --kind sweep",
    "sweep show rates --json": "show rates --json",
    "curriculum show first": "show first",
    "curriculum list --json": "jobs --kind curriculum --json",
    "estimate": "submit KIND --dry-run",
    "estimate grpo --samples 80": "submit grpo --samples 80 --dry-run",
    f"estimate --like {JOB} --json": f"submit --like {JOB} --json --dry-run",
    "leaderboard 'my data.jsonl'": "jobs --kind eval --best 'my data.jsonl'",
    f"note {JOB} 'half the rate'": f"show {JOB} --note 'half the rate'",
    f"note {JOB}": f"show {JOB}",
    "unload qwen": "models --unload qwen",
    f"verify-resume {JOB} --steps 6": f"checkpoints verify --resume {JOB} --steps 6",
}


def test_there_are_at_most_36_commands():
    assert len(COMMANDS) <= 36
    assert COMMANDS.keys() & former.COMMANDS.keys() == set()
    assert {typed.split()[0] for typed in TYPED} == set(former.COMMANDS)


@pytest.mark.parametrize("typed", TYPED)
def test_a_former_command_is_answered_with_the_new_one(typed, capsys: pytest.CaptureFixture[str]):
    words = shlex.split(typed)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said == f"Error: {words[0]!r} is no longer a command; type: warmd {TYPED[typed]}\n"
    instead = [*shlex.split(TYPED[typed].replace("KIND", "grpo")), "--help"]
    assert main(instead) == 0, "an option or a command of it does not exist"


def test_the_new_command_has_the_home_that_was_given(tmp_path: Path):
    done = warmd("--home", str(tmp_path), "drain", "gpu7", home=tmp_path / "another")
    assert done.is_refusal(2)
    assert done.err.endswith(f"type: warmd nodes --drain gpu7 --home {tmp_path}\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("jobs --since 1h --limit 3", "limit: must not go with since"),
        ("jobs --since 1h --tag a", "tag: must not go with since"),
        ("jobs --markdown", "markdown: must go with since"),
        ("jobs --best arithmetic", "best: must go with kind eval"),
        ("jobs --kind eval --kind sft --best arithmetic", "best: must go with kind eval"),
        ("jobs --kind eval --best arithmetic --limit 2", "limit: must not go with best"),
        ("jobs --kind sweep --status failed", "status: must not go with kind sweep"),
        ("jobs --kind sweep --kind grpo", "kind: must be given once with sweep"),
        ("nodes --wait", "wait: must go with drain"),
        ("checkpoints verify --trl --resume", "resume: must not go with trl"),
        ("checkpoints verify --resume --step 3", "step: must not go with resume"),
        ("checkpoints verify --trl --steps 10001", "steps: must be at most 10000 with trl"),
        ("checkpoints verify --steps 3", "steps: must go with trl or resume"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(tmp_path: Path, words: str, problem: str):
    done = warmd(*words.split(), home=tmp_path)
    assert done.is_refusal(2)
    assert done.err.startswith(f"Error: {problem}")
    assert list(tmp_path.iterdir()) == []
