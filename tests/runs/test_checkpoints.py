"""Checkpoints: after any kill of the writer or damage, the latest complete one is found."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from killed import killed_at_call

from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.jobs.context import MANIFEST, Checkpoints as CheckpointsProtocol

FILES = {"model.bin": b"weights" * 100, "state.json": b"{}", "nested/rng.bin": b"\x00" * 64}


def commit(checkpoints: Checkpoints, step: int, files: dict[str, bytes] = FILES) -> None:
    with checkpoints.commit(step) as staging:
        for name, content in files.items():
            (staging.path / name).parent.mkdir(exist_ok=True)
            (staging.path / name).write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_commit_is_the_latest_and_only_the_newest_are_kept(tmp_path):
    checkpoints: CheckpointsProtocol = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest() is None
    for step in (5, 10, 100):
        commit(Checkpoints(tmp_path / "checkpoints", keep=2), step)
    assert checkpoints.latest() == tmp_path / "checkpoints" / "checkpoint-100"
    assert names(tmp_path / "checkpoints") == ["checkpoint-10", "checkpoint-100"]


def test_an_error_inside_the_block_leaves_no_trace(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    commit(checkpoints, 1)

    def fail_halfway() -> None:
        with checkpoints.commit(2) as staging:
            (staging.path / "model.bin").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        fail_halfway()
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_full_disk_leaves_no_trace(tmp_path):
    # A limit on the size of a file: the kernel refuses the write as it does on a full disk.
    code = """
import resource, signal, sys
from pathlib import Path
from warmd.daemon.runs.checkpoints import Checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(Path(sys.argv[1]))
with checkpoints.commit(1) as staging:
    (staging.path / "model.bin").write_bytes(b"a" * 1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
with checkpoints.commit(2) as staging:
    (staging.path / "model.bin").write_bytes(b"a" * 5000)
"""
    child = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=30
    )
    assert "OSError: [Errno 27] File too large" in child.stderr
    assert names(tmp_path) == ["checkpoint-1"]
    assert Checkpoints(tmp_path).latest() == tmp_path / "checkpoint-1"


def test_committing_a_step_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    commit(checkpoints, 3, {"old": b"old"})
    commit(checkpoints, 3, {"new": b"new"})
    assert names(tmp_path) == ["checkpoint-3"]
    assert names(tmp_path / "checkpoint-3") == [MANIFEST, "new"]
    assert checkpoints.latest() is not None


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(2, id="a new step", marks=pytest.mark.slow),
        pytest.param(
            1,
            id="the same step again",
            marks=pytest.mark.nightly(
                part="storms", catches="a checkpoint that is lost when its step is saved again"
            ),
        ),
    ],
)
def test_kill_9_at_any_instant_of_a_commit_leaves_a_whole_checkpoint(tmp_path, step):
    newer = {"model.bin": b"newer", "state.json": b"{}"}
    instant, killed = 0, True
    while killed:
        instant += 1
        folder = tmp_path / str(instant)
        problems: list[str] = []
        checkpoints = Checkpoints(folder, keep=1, on_warning=problems.append)
        commit(checkpoints, 1)
        killed = killed_at_call(instant, partial(commit, checkpoints, step, newer))
        latest = checkpoints.latest()
        assert latest is not None, f"nothing left after a kill at instant {instant}"
        assert (latest / "model.bin").read_bytes() in (FILES["model.bin"], b"newer")
        assert not [name for name in names(folder) if name.startswith(".")]
        commit(checkpoints, 3)
        assert checkpoints.latest() == folder / "checkpoint-3"
        assert names(folder) == ["checkpoint-3"]
    assert instant > 20


@pytest.mark.slow
def test_kill_9_of_a_busy_writer_never_loses_what_it_had_committed(tmp_path):
    code = """
import os, sys
from pathlib import Path
from warmd.daemon.runs.checkpoints import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
step = int(sys.argv[2])
while True:
    step += 1
    with checkpoints.commit(step) as staging:
        (staging.path / "model.bin").write_bytes(os.urandom(200_000))
    print(step, flush=True)
"""
    committed = 0
    for round_number in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", code, tmp_path, str(committed)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        for _ in range(1 + round_number):
            committed = int(child.stdout.readline())
        deadline = time.monotonic() + 0.0007 * round_number  # another instant in every round
        while time.monotonic() < deadline:
            pass
        child.kill()
        child.wait()
        for line in child.stdout:
            committed = int(line)
        child.stdout.close()
        latest = Checkpoints(tmp_path).latest()
        assert latest is not None
        assert int(latest.name.removeprefix("checkpoint-")) >= committed
        committed = int(latest.name.removeprefix("checkpoint-"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path, name, damage):
    problems: list[str] = []
    checkpoints = Checkpoints(tmp_path, on_warning=problems.append)
    commit(checkpoints, 1)
    commit(checkpoints, 2)
    damage(tmp_path / "checkpoint-2" / name)
    assert checkpoints.latest() == tmp_path / "checkpoint-1"
    assert len(problems) == 1
    assert problems[0].startswith("checkpoint-2: ")
    assert "\n" not in problems[0]


def test_every_flipped_bit_of_the_manifest_is_noticed(tmp_path):
    commit(Checkpoints(tmp_path), 1, {"model.bin": b"weights"})
    manifest = tmp_path / "checkpoint-1" / MANIFEST
    whole = manifest.read_bytes()
    for position in range(len(whole)):
        manifest.write_bytes(
            whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        )
        assert Checkpoints(tmp_path).latest() is None, f"byte {position} of {whole!r}"


def test_a_damaged_newer_checkpoint_never_replaces_an_undamaged_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    commit(checkpoints, 10)
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "checkpoint-30")
    assert checkpoints.latest() == tmp_path / "checkpoint-10"
    commit(checkpoints, 11)
    assert names(tmp_path) == ["checkpoint-11"]


def test_a_reader_does_not_disturb_a_writer_at_work(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.commit(1) as staging:
        (staging.path / "model.bin").write_bytes(b"weights")
        assert Checkpoints(tmp_path).latest() is None
    assert checkpoints.latest() == tmp_path / "checkpoint-1"


def test_a_checkpoint_that_cannot_be_removed_does_not_make_the_new_one_a_failure(tmp_path):
    problems: list[str] = []
    checkpoints = Checkpoints(tmp_path / "run", keep=1, on_warning=problems.append)
    commit(checkpoints, 1)
    (tmp_path / "run" / "checkpoint-1").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoint-1").symlink_to(tmp_path / "elsewhere")
    commit(checkpoints, 2)
    assert checkpoints.latest() == tmp_path / "run" / "checkpoint-2"
    (problem,) = problems
    assert problem.startswith("checkpoint-1: cannot be removed: ")
