"""The parts of the nightly tests: which of them CI runs after a change, and why."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".ci" / "nightly.py"
SCRIPT = runpy.run_path(str(PROGRAM))
MARK = 'nightly(part="{}", catches="this")'.format("slurm")  # no mark of this file
# A test of the project that is made here, not of this one: the script runs it.
PASSES = f"import pytest\n\n\n@pytest.mark.{MARK}\ndef test_it():\n    assert True\n"


# Plugins that the tests of the project do not use take most of the time of a start.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "CI_FULL"},
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "xdist.plugin",
}


class Project:
    """A repository with the script and one nightly test, of the part `slurm`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in ("deploy/slurm/run.sh", "daemon/host/home.py", "daemon/supervise/a.py"):
            self.write(path, "1\n")
        self.write("tests/test_it.py", PASSES)
        self.write("pytest.ini", "[pytest]\nmarkers =\n  nightly(part, catches): slow\n")
        self.write(".gitignore", "__pycache__\n.pytest_cache\n")
        (folder / ".ci").mkdir()
        shutil.copy(PROGRAM, folder / ".ci")
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, *words: str, **environ: str) -> tuple[int, str]:
        """Run the script; return its exit code and the last line of its output."""
        done = subprocess.run(
            [sys.executable, ".ci/nightly.py", *words],
            cwd=self.folder,
            env={**ENVIRONMENT, **environ},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout.splitlines()[-1] if done.stdout else done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_every_nightly_test_belongs_to_a_part_and_every_part_has_tests():
    marks = [
        mark
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__)
        for mark in SCRIPT["_marks"](str(path.relative_to(ROOT)))
    ]
    uses = sum(path.read_text().count("mark.nightly(") for path in (ROOT / "tests").rglob("*.py"))
    assert len(marks) == uses - Path(__file__).read_text().count("mark.nightly(")
    parts = {name for name, part in SCRIPT["PARTS"].items() if not part.command}
    assert {part for part, _, _ in marks} == parts


def test_every_part_covers_files_that_exist():
    for part in SCRIPT["PARTS"].values():
        assert [path for path in part.sources if not (ROOT / path).exists()] == []


@pytest.mark.slow
def test_a_part_that_has_passed_runs_again_only_after_a_change(project: Project):
    code, line = project.run("--changed", "slurm")
    assert (code, line.split()[-1]) == (0, "passed")
    code, line = project.run("--changed", "slurm")
    assert (code, line.split()[-3:]) == (0, ["up", "to", "date"])
    assert project.run("--changed", "slurm", CI_FULL="1")[1].endswith("passed")
    project.write("daemon/supervise/new.py", "2\n")
    assert project.run("--list", "slurm")[1].endswith("changed: daemon/supervise")
    assert project.run("--changed", "slurm")[1].endswith("passed")


@pytest.mark.slow
def test_a_changed_test_runs_again_and_a_failure_is_not_remembered(project: Project):
    assert project.run("slurm")[0] == 0
    before = json.loads((project.folder / ".ci" / "nightly.json").read_text())
    project.write("tests/test_it.py", PASSES.replace("True", "False"))
    code, line = project.run("--changed", "slurm")
    assert code == 1
    assert line.endswith("failed: exit code 1")
    assert json.loads((project.folder / ".ci" / "nightly.json").read_text()) == before
    assert project.run("--list", "slurm")[1].endswith("changed: its tests")


def test_an_unknown_part_is_refused_by_name(project: Project):
    code, line = project.run("strom")
    assert code == 2
    assert "PART: must be of storms, power, shortages" in line
    assert "got strom" in line


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that run in a folder, which no other test has; zombies have none."""

    def is_there(process: psutil.Process) -> bool:
        try:
            return Path(process.cwd()).is_relative_to(folder)
        except (psutil.Error, OSError):
            return False

    return [process for process in psutil.process_iter() if is_there(process)]


def terminated_when(project: Project, is_time: Callable[[psutil.Process], object]) -> None:
    """Start the script, send SIGTERM when it is time, and check that no process is left."""
    command = [sys.executable, ".ci/nightly.py", "slurm"]
    with subprocess.Popen(
        command, cwd=project.folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    ) as script:
        wait_until(lambda: is_time(psutil.Process(script.pid)))
        script.terminate()
        assert script.wait(20) == 128 + signal.SIGTERM
    wait_until(lambda: not processes_of(project.folder))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["fork", "session", "test"])
def test_a_part_that_is_terminated_leaves_no_process(project: Project, moment: str):
    sleeps = "__import__('subprocess').run(['sleep', '600'], start_new_session=True)"
    project.write("tests/test_it.py", PASSES.replace("assert True", sleeps))

    def is_time(script: psutil.Process) -> bool:
        for child in script.children(recursive=True):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):  # git, which lists the files
                is_part = os.getsid(child.pid) == child.pid and child.ppid() == script.pid
                if {"fork": True, "session": is_part, "test": child.name() == "sleep"}[moment]:
                    return True
        return False

    terminated_when(project, is_time)
