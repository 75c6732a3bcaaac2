"""Flipped bits in the files of sweeps and curricula: noticed, or without effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from breadth import mostly_slow
from desks import Desk
from flips import flipped

from warmd.daemon.groups.curriculum import CurriculumFolder
from warmd.jobs.errors import Conflict


@pytest.fixture
def sweep(desk: Desk) -> tuple[Path, Callable[[], Any]]:
    sweep_id = desk.warmd(*desk.grpo, "--sweep", "learning_rate=1e-4,1e-3").out.strip()
    return desk.home.sweeps / sweep_id, lambda: desk.client.groups.sweep(sweep_id)


@pytest.fixture
def curriculum(desk: Desk, tmp_path: Path) -> tuple[Path, Callable[[], Any]]:
    (tmp_path / "job.yaml").write_text("stages: [{samples: 4}, {samples: 5}]")
    words = (*desk.grpo[:-2], "--config", str(tmp_path / "job.yaml"))
    curriculum_id = desk.warmd(*words).out.strip()

    def read() -> Any:
        folder = CurriculumFolder.open(desk.home, curriculum_id)
        return folder.read(), folder.state()

    return desk.home.curricula / curriculum_id, read


@pytest.mark.parametrize("name", ["plan.json", "state.json"])
@pytest.mark.parametrize("group", mostly_slow(["sweep", "curriculum"], but=["sweep"]))
def test_a_group_with_a_flipped_bit_is_refused_or_unchanged(group, name, request):
    folder, read = request.getfixturevalue(group)
    whole, refused = read(), list[str]()
    for _ in flipped(folder / name, step=7):
        try:
            assert read() == whole
        except Conflict as error:
            refused.append(str(error))
    assert refused
    assert not any("\n" in text for text in refused)
    assert read() == whole


def test_a_damaged_curriculum_is_named_in_one_line(desk, curriculum):
    folder, _ = curriculum
    plan = (folder / "plan.json").read_bytes()
    (folder / "plan.json").write_bytes(plan.replace(b'"samples": 5', b'"samples": 7'))
    done = desk.warmd("show", folder.name)
    assert done.code == 2
    assert done.err == (
        f"Error: {folder}/plan.json: damaged, or changed by hand: then remove its digest\n"
    )
