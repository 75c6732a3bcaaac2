"""What is done with a group as a whole, while the process of groups drives it."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from desks import Desk
from waiting import wait_until

from warmd.daemon.groups import actions
from warmd.daemon.groups.curriculum import CONTINUE, Attempt, CurriculumFolder, Round
from warmd.daemon.groups.folder import CANCELED, PAUSED, clean
from warmd.jobs.ids import fresh_id


@pytest.fixture
def folder(desk: Desk) -> CurriculumFolder:
    values = {"model": desk.grpo[3], "num_generations": 2, "learning_rate": 1e-4}
    given = {"stages": [{"samples": 4}, {"samples": 8}]}
    return CurriculumFolder(desk.home, desk.client.groups.submit_curriculum("grpo", values, given))


def waits_for_a_lock() -> bool:
    """Whether a thread of this process does."""
    lines = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any("->" in words and str(os.getpid()) in words for words in lines)


@pytest.mark.parametrize("phase", [CANCELED, PAUSED])
def test_a_stage_that_begins_while_a_curriculum_is_steered_is_not_forgotten(folder, desk, phase):
    def act() -> None:
        if phase == CANCELED:
            actions.close(desk.home, folder.id)
        else:
            actions.steer(desk.client.places, folder.id, phase, lambda job_id: "paused")

    thread = threading.Thread(target=act)
    with folder.changing():
        thread.start()
        wait_until(waits_for_a_lock)
        [first] = folder.state().attempts
        second = Attempt(1, 0, fresh_id("grpo"))
        folder.update(attempts=[replace(first, decision=CONTINUE), second])
    thread.join()
    assert folder.state().attempts[-1] == second
    assert folder.state().phase == phase


def test_evaluations_at_gates_are_no_lines_of_the_list_of_jobs(folder, desk):
    gate = desk.warmd("submit", "eval", "--model", desk.grpo[3], "--samples", "4").out.strip()
    other = desk.warmd("submit", "eval", "--model", desk.grpo[3], "--samples", "4").out.strip()
    [first] = folder.state().attempts
    folder.update(attempts=[replace(first, rounds=[Round(4, gate, gate)])])
    listed = [job["id"] for job in desk.rows("jobs")]
    assert other in listed
    assert gate not in listed
    assert gate in [job["id"] for job in desk.rows("jobs", "--kind", "eval")]


def test_what_killed_submissions_and_removals_have_left_is_removed(folder, desk):
    parent, group = folder.path.parent, folder.path.name
    for name in (f".new-{group}-1", f".new-{group}-2", f".removed-{group}"):
        shutil.copytree(folder.path, parent / name)
    os.utime(parent / f".new-{group}-1", (0, 0))  # the other one may be being written
    clean(desk.home)
    assert {path.name for path in parent.iterdir()} == {group, f".new-{group}-2"}
