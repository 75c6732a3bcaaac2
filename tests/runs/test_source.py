"""The source of a job in its run directory."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from warmd.daemon.runs import source
from warmd.daemon.runs.git import begin_state_of, state_of
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.user_code.modules import own_modules


def git(folder, *arguments):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout.decode()


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "mine_kept.py").write_text("FACTOR = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.fixture
def rundir(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    return RunDir.create(runs, "grpo", {"spec": {}})


def test_the_commit_and_the_uncommitted_changes_of_the_folder_are_kept(project, rundir):
    (project / "mine_kept.py").write_text("FACTOR = 2\n")
    (project / "new name.py").write_text("")
    data = project / "rows.jsonl"
    data.write_text("{}\n")
    source.record_submission(rundir, {"dataset": str(data), "reward": ["mine:f"]}, project)
    found = source.read(rundir)
    assert found.folder == str(project)
    assert found.git is not None
    assert found.git["commit"] == git(project, "rev-parse", "HEAD").strip()
    assert found.git["branch"] == "main"
    assert found.git["changed"] == ["mine_kept.py", "new name.py", "rows.jsonl"]
    assert b"+FACTOR = 2" in source.diff_file(rundir).read_bytes()
    assert found.data["dataset"]["bytes"] == 3
    assert found.data["dataset"]["digest"]


def test_a_renamed_file_and_one_with_a_space_are_listed_by_their_new_paths(project):
    git(project, "mv", "mine_kept.py", "an other.py")
    state = state_of(project)
    assert state is not None
    assert state.changed == ["an other.py"]


def test_no_program_that_the_repository_names_is_run(project, tmp_path):
    trace = tmp_path / "ran"
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {trace}\n")
    script.chmod(0o755)
    for name in ("core.fsmonitor", "diff.external", "diff.x.textconv"):
        git(project, "config", name, str(script))
    (project / ".git" / "info" / "attributes").write_text("* diff=x\n")
    (project / "mine_kept.py").write_text("FACTOR = 3\n")
    state = state_of(project)
    assert state is not None
    assert b"FACTOR = 3" in state.diff
    assert not trace.exists()


def test_a_state_that_was_begun_before_is_kept(project, rundir):
    source.record_submission(rundir, {}, project, begin_state_of(project))
    found = source.read(rundir)
    assert found.git is not None
    assert found.git["branch"] == "main"


def test_a_folder_without_git_has_no_commit(tmp_path, rundir):
    source.record_submission(rundir, {}, tmp_path)
    assert source.read(rundir).git is None


def test_each_execution_keeps_the_modules_it_imported_by_content(project, rundir):
    source.record_submission(rundir, {}, project)
    for number, text in ((1, "FACTOR = 1\n"), (2, "FACTOR = 2\n")):
        (project / "mine_kept.py").write_text(text)
        with own_modules([str(project)]):
            import_module("mine_kept")
            source.record_execution(rundir, number)
    found = source.read(rundir)
    path = str(project / "mine_kept.py")
    copies = [source.kept_file(rundir, e.files[path]).read_text() for e in found.executions]
    assert copies == ["FACTOR = 1\n", "FACTOR = 2\n"]
    assert found.changes() == {2: [path]}
    assert found.executions[0].versions["python"] == sys.version.split()[0]


def test_a_damaged_record_counts_as_none_and_is_replaced(rundir):
    (rundir.path / "source").mkdir()
    for damage in ("", "[]", '{"executions": [{}]}', '{"executions": 3, "data": 1}'):
        (rundir.path / "source" / "source.json").write_text(damage)
        assert source.read(rundir) == source.Source()
        source.record_execution(rundir, 1)
        assert [e.number for e in source.read(rundir).executions] == [1]


def test_a_job_of_the_daemon_keeps_the_module_of_its_reward(shared_daemon):
    job_id = shared_daemon.submit(samples=2, save_every=2)
    assert shared_daemon.wait(job_id)["status"] == "finished"
    rundir = shared_daemon.client.rundir(job_id)
    [execution] = source.read(rundir).executions
    (path,) = (path for path in execution.files if path.endswith("/behaviours.py"))
    kept = source.kept_file(rundir, execution.files[path])
    assert kept.read_bytes() == Path(path).read_bytes()
    assert {"python", "warmd", "torch", "trl"} <= execution.versions.keys()
