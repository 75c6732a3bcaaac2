"""The fence: a late writer commits neither a checkpoint nor a result."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.daemon.runs.fence import Fence, Superseded
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.context import MANIFEST


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "grpo", {"spec": {}})


def commit(rundir: RunDir, fence: Fence, step: int) -> None:
    with Checkpoints(rundir.checkpoints, fence=fence).commit(step) as staging:
        (staging.path / "weights").write_bytes(b"w")


def test_a_late_writer_commits_neither_a_checkpoint_nor_a_result(rundir):
    first, second = Fence(rundir.path, 1), Fence(rundir.path, 2)
    first.claim()
    commit(rundir, first, 1)
    second.claim()
    with pytest.raises(Superseded, match=r"execution 1 of .* superseded by execution 2"):
        commit(rundir, first, 2)
    with pytest.raises(Superseded):
        rundir.write_result({"steps": 2}, revision=1, fence=first)
    with pytest.raises(Superseded):
        first.claim()
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["checkpoint-1"]
    assert rundir.read_result() is None
    commit(rundir, second, 2)
    rundir.write_result({"steps": 2}, revision=1, fence=second)
    manifest = orjson.loads((rundir.checkpoints / "checkpoint-2" / MANIFEST).read_bytes())
    assert manifest["manifest"]["execution"] == 2
    assert orjson.loads((rundir.path / "result.json").read_bytes())["execution"] == 2


def test_a_writer_that_is_superseded_while_it_writes_leaves_no_checkpoint(rundir):
    def commit_late() -> None:
        with Checkpoints(rundir.checkpoints, fence=Fence(rundir.path, 1)).commit(4) as staging:
            (staging.path / "weights").write_bytes(b"w")
            Fence(rundir.path, 2).claim()

    with pytest.raises(Superseded):
        commit_late()
    assert list(rundir.checkpoints.iterdir()) == []


def test_a_superseded_save_raises_in_the_calling_thread(rundir):
    checkpoints = Checkpoints(rundir.checkpoints, fence=Fence(rundir.path, 1))
    Fence(rundir.path, 2).claim()
    with pytest.raises(Superseded):
        checkpoints.save(4, lambda staging: lambda: None, about={})


def test_a_first_execution_writes_no_file(rundir):
    before = sorted(rundir.path.iterdir())
    Fence(rundir.path, 1).claim()
    assert sorted(rundir.path.iterdir()) == before
