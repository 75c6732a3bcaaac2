"""`warmd jobs --since` has sweeps and curricula of the jobs that it shows."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
def test_the_digest_has_the_best_of_a_sweep_and_the_decisions_of_a_curriculum(desk, tmp_path):
    sweep = ("--sweep", "learning_rate=1e-4,1e-3", "--name", "rates")
    sweep_id = desk.warmd(*desk.grpo, *sweep).out.strip()
    (tmp_path / "job.yaml").write_text("stages: [{samples: 4, name: only}]")
    words = (*desk.grpo[:-2], "--config", str(tmp_path / "job.yaml"))
    curriculum_id = desk.warmd(*words).out.strip()
    for reward in (0.25, 0.5, 0.5):
        run = desk.begin()
        run.log.emit("step", step=4, steps_total=4, reward=reward)
        run.finish({"steps": 4})
    assert desk.warmd("show", curriculum_id).code == 0
    found: dict[str, Any]
    [found] = desk.rows("jobs", "--since", "12h")
    assert [group["id"] for group in found["groups"]] == [sweep_id, curriculum_id]
    assert found["groups"][0]["best"]["values"] == {"learning_rate": 1e-3}
    text = desk.warmd("jobs", "--since", "12h").out
    best = "best learning_rate 0.001  reward 0.5"
    assert f"Sweeps and curricula\n  {sweep_id}  rates  finished  {best}\n" in text
    assert f"  {curriculum_id}  started\n" in text
    assert (
        f"- `{sweep_id}` rates, finished, best"
        in desk.warmd("jobs", "--since", "12h", "--markdown").out
    )
    [found] = desk.rows("jobs", "--since", "0.001s")
    assert found["groups"] == []
