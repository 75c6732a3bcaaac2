"""Curricula from Python."""

from __future__ import annotations

import pytest

import warmd


def test_a_curriculum_is_submitted_read_and_steered_from_python(desk):
    with warmd.connect(desk.home.path) as session:
        curriculum = session.curriculum(
            "grpo",
            model=desk.grpo[3],
            num_generations=2,
            stages=[{"name": "easy", "samples": 4}, {"samples": 8, "gate": False}],
            gate={"samples": 40, "max_tokens": 4},
            name="first",
        )
        assert isinstance(curriculum, warmd.Curriculum)
        assert session.curricula() == [curriculum]
        assert (curriculum.status, curriculum.model()) == ("started", None)
        [job] = curriculum.jobs()
        table = curriculum.table()
        assert (table["stage"], table["job"], table["decision"]) == (["easy"], [job.id], [None])
        assert (table["metric"], table["p"]) == ([None], [None])
        curriculum.pause()
        assert curriculum.status == "paused"
        curriculum.unpause()
        curriculum.cancel()
        assert curriculum.wait(timeout_s=1) == "canceled"
        with pytest.raises(warmd.SpecError, match="stages: easy: learning_rate: must be"):
            session.curriculum(
                "grpo", model=desk.grpo[3], stages=[{"name": "easy", "learning_rate": 7}]
            )
        assert session.curricula() == [curriculum]
