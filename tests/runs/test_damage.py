"""Damaged checkpoints: whatever file is damaged, no resume gives wrong results."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from flips import flip

from warmd.daemon.runs.checkpoints import Checkpoints, verify
from warmd.jobs.context import MANIFEST
from warmd.jobs.errors import CheckpointDamaged, JobFailed
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.training.compare import compare_checkpoints
from warmd.jobs.training.snapshot import STATE_FILES

FILES = (
    "config.json",
    "generation_config.json",
    "job_state.pt",
    MANIFEST,
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
)
SPEC = GrpoSpec.parse(
    {
        "samples": 6,
        "num_generations": 2,
        "max_completion_length": 4,
        "reward": ["tiny:digit_share"],
        "learning_rate": 1e-2,
        "save_every": 2,
        "keep": 100,
    }
)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(path: Path) -> None:
    path.unlink()


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = (truncate, flip, remove, make_folder, empty)


pytestmark = pytest.mark.usefixtures("like_a_work_horse")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an undamaged job of 6 steps."""
    folder = tmp_path_factory.mktemp("whole")
    run(SPEC, tiny.surroundings(folder).ctx)
    return folder


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """The same, as it was after step 4."""
    for step in (2, 4):
        name = f"checkpoint-{step}"
        shutil.copytree(whole / "checkpoints" / name, tmp_path / "checkpoints" / name)
    return tmp_path


def resume(folder: Path) -> tiny.Surroundings:
    again = tiny.surroundings(folder)
    run(SPEC, again.ctx)
    return again


def test_the_damage_test_covers_every_file(whole):
    found = (whole / "checkpoints" / "checkpoint-4").iterdir()
    assert sorted(path.name for path in found) == sorted(FILES)
    assert set(STATE_FILES) < set(FILES)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_its_checkpoint_skipped(stopped, name, damage):
    checkpoint = stopped / "checkpoints" / "checkpoint-4"
    damage(checkpoint / name)
    with pytest.raises(CheckpointDamaged) as problem:
        verify(checkpoint)
    assert str(problem.value).startswith(f"checkpoint-4: {name}")
    assert "\n" not in str(problem.value)
    warnings: list[str] = []
    latest = Checkpoints(stopped / "checkpoints", on_warning=warnings.append).latest()
    assert latest == stopped / "checkpoints" / "checkpoint-2"
    assert warnings == [str(problem.value)]


def check_resume(whole: Path, folder: Path, *, resumed_from: int | None) -> list[dict[str, Any]]:
    """Resume, and compare all results with those of the undamaged run."""
    again = resume(folder)
    assert again.of_type("begin")[0]["resumed_from"] == resumed_from
    assert again.last_step == 6
    found = compare_checkpoints(
        whole / "checkpoints" / "checkpoint-6", folder / "checkpoints" / "checkpoint-6"
    )
    assert {name: problem for name, problem in found.items() if problem} == {}
    for file in (whole / "model").iterdir():
        assert (folder / "model" / file.name).read_bytes() == file.read_bytes()
    return again.of_type("warning")


# Whatever the damage is, the checkpoint is skipped, as the test above proves: one for each file.
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(name, damage, marks=() if name == "optimizer.pt" else pytest.mark.slow)
        for name, damage in zip(FILES, itertools.cycle(DAMAGES), strict=False)
    ],
)
def test_a_resume_from_the_previous_checkpoint_ends_with_the_same_bits(
    whole, stopped, name, damage
):
    damage(stopped / "checkpoints" / "checkpoint-4" / name)
    [warning] = check_resume(whole, stopped, resumed_from=2)
    assert warning["message"].startswith(f"checkpoint-4: {name}")


def test_with_every_checkpoint_damaged_the_job_starts_over(whole, stopped):
    flip(stopped / "checkpoints" / "checkpoint-2" / "model.safetensors")
    remove(stopped / "checkpoints" / "checkpoint-4" / "rng_state.pth")
    warnings = check_resume(whole, stopped, resumed_from=None)
    assert len(warnings) == 2


def manifest_again(folder: Path, change: Callable[[Path], None]) -> None:
    """Commit the newest checkpoint once more with a change: whole, by its manifest."""
    checkpoints = Checkpoints(folder / "checkpoints")
    newest = checkpoints.list()[-1]
    about = checkpoints.about(newest)
    copy = shutil.copytree(newest, folder / "copy", ignore=shutil.ignore_patterns(MANIFEST))
    change(copy)
    with checkpoints.commit(4, about) as staging:
        shutil.copytree(copy, staging.path, dirs_exist_ok=True)
    verify(newest)


@pytest.mark.parametrize("name", STATE_FILES)
def test_a_missing_state_is_an_error_and_not_a_restart(stopped, name):
    manifest_again(stopped, lambda copy: (copy / name).unlink())
    with pytest.raises(JobFailed, match=rf"^checkpoint-4: {name} is missing") as problem:
        resume(stopped)
    assert "\n" not in str(problem.value)


# Nothing that a training computes with is read from config.json: its model is the warm one.
@pytest.mark.parametrize("name", [*STATE_FILES, "model.safetensors"])
def test_training_never_continues_from_a_truncated_file(stopped, name):
    manifest_again(stopped, lambda copy: truncate(copy / name))
    again = tiny.surroundings(stopped)
    with pytest.raises(Exception, match=r".+"):  # any error of its reader
        run(SPEC, again.ctx)
    assert again.of_type("step") == []
