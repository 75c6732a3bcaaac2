"""Sweeps as users see them: one id, one line, a table of scores, and actions on all jobs."""

from __future__ import annotations

from typing import Any

import pytest
from worked_sweeps import advance, play_to, queued

import warmd
from warmd.daemon.groups.members import document_of
from warmd.daemon.groups.sweep import SweepFolder
from warmd.daemon.queue import keys
from warmd.jobs.context import RULES

AXIS = ("--sweep", "learning_rate=1e-6,1e-5,1e-4")


def submit(desk, *arguments: str) -> str:
    done = desk.warmd(*desk.grpo[:-1], "9", "--num-generations", "2", *arguments)
    assert done.code == 0, done.err
    return str(done.out).strip()


def test_a_sweep_is_one_line_of_queue_and_jobs_and_its_tag_lists_its_jobs(desk):
    single = desk.submit()
    sweep_id = submit(desk, *AXIS, "--seeds", "2", "--name", "rates", "--tag", "try")
    [first, line] = desk.rows("queue")
    assert first["id"] == single
    assert (line["id"], line["jobs"], line["status"]) == (sweep_id, 6, "queued")
    assert (line["step"], line["steps_total"], line["position"]) == (0, 54, 2)
    assert [row["id"] for row in desk.rows("jobs")] == [sweep_id, single]
    members = desk.rows("jobs", "--tag", sweep_id)
    assert {row["sweep"] for row in members} == {sweep_id}
    assert [row["name"] for row in reversed(members)] == [f"rates/{n}" for n in range(1, 7)]
    assert sweep_id in desk.warmd("queue").out
    assert queued(desk) == [single, *desk.client.groups.sweep_members(sweep_id)]


def test_each_job_has_the_options_of_its_point_and_a_seed_of_its_own(desk):
    sweep_id = submit(desk, *AXIS, "--seeds", "2", "--seed", "7")
    found = []
    for job_id in desk.client.groups.sweep_members(sweep_id):
        spec = desk.client.rundir(job_id).read_spec()["spec"]
        found.append((spec["learning_rate"], spec["seed"]))
    assert found == [(rate, seed) for rate in (1e-6, 1e-5, 1e-4) for seed in (7, 8)]


def test_a_sweep_shows_what_its_jobs_wait_for(desk):
    submit(desk, *AXIS, "--needs", "gpu=h200")
    for _ in range(3):
        popped: Any = desk.client.connection.lmove(
            "rq:queue:train", keys.taken("w"), "LEFT", "RIGHT"
        )
        assert desk.client.store.set_aside(popped, "train", "w", {"gpu": "h200"})
    assert "gpu=h200" in desk.warmd("queue").out


def test_an_array_replaces_the_index_in_text_options(desk, tmp_path):
    for index in range(3):
        rows = (f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(9))
        (tmp_path / f"part-{index}.jsonl").write_text("".join(rows))
    data = str(tmp_path / "part-{index}.jsonl")
    sweep_id = submit(desk, "--array", "3", "--dataset", data)
    specs = [
        desk.client.rundir(job_id).read_spec()["spec"]
        for job_id in desk.client.groups.sweep_members(sweep_id)
    ]
    assert [spec["dataset"] for spec in specs] == [
        str(tmp_path / f"part-{index}.jsonl") for index in range(3)
    ]
    assert [spec["seed"] for spec in specs] == [42, 43, 44]


def test_a_job_file_describes_a_sweep(desk, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("sweep:\n  learning_rate: [1e-6, 1e-5]\nseeds: 2\nbeta: 0.1\n")
    sweep_id = submit(desk, "--config", str(file))
    assert desk.client.groups.sweep(sweep_id)["jobs"] == 4
    assert "learning_rate 1e-06" in submit(desk, "--config", str(file), "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--sweep", "learning_rate=1e-5,2"), "learning_rate: must be a number above 0"),
        pytest.param(("--sweep", "dataset=a.jsonl,b.jsonl"), "dataset: ", marks=pytest.mark.slow),
        pytest.param(
            ("--sweep", "samples=2,4", "--halving", "2"),
            "halving: must go with equal steps",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--seeds", "x"),
            "seeds: must be an integer from 1 to 1000, got 'x'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_sweep_is_refused_and_nothing_is_queued(desk, arguments, problem):
    done = desk.warmd(*desk.grpo[:-2], *arguments)
    assert done.is_refusal(2), done.err
    assert problem in done.err
    assert queued(desk) == []
    assert desk.client.groups.sweeps() == []


def test_the_best_combination_continues_and_the_table_shows_means_and_intervals(desk):
    sweep_id = submit(desk, *AXIS, "--seeds", "2", "--halving", "3")
    for reward in (0.1, 0.2, 0.5, 0.6, 0.3, 0.4):
        play_to(desk, 3, reward)
    advance(desk, sweep_id)
    members = desk.client.groups.sweep_members(sweep_id)
    assert queued(desk) == members[2:4]
    [found] = desk.rows("show", sweep_id)
    assert (found["metric"], found["rungs"], found["best"]) == ("reward", [3, 9], 1)
    assert [point["mean"] for point in found["points"]] == pytest.approx([0.15, 0.55, 0.35])
    assert [point["dropped_at"] for point in found["points"]] == [3, None, 3]
    point = found["points"][1]
    # Student's t with one degree of freedom: 12.706205 * 0.07071068 / sqrt(2)
    assert (point["low"], point["high"]) == pytest.approx((0.55 - 0.6353102, 0.55 + 0.6353102))
    shown = desk.warmd("show", sweep_id).out
    assert "not continued after step 3" in shown
    assert "best: learning_rate 1e-05  reward 0.55" in shown
    assert sweep_id in desk.warmd("jobs", "--kind", "sweep").out
    [listed] = desk.rows("jobs", "--kind", "sweep")
    assert (listed["id"], listed["jobs"]) == (sweep_id, 6)


@pytest.mark.slow
def test_combinations_with_different_numbers_of_steps_are_scored_at_their_ends(desk):
    sweep_id = submit(desk, "--sweep", "samples=4,8")
    for steps, reward in ((4, 0.6), (8, 0.4)):
        run = desk.begin()
        run.log.emit("begin", steps_total=steps)
        for number in range(1, steps + 1):
            run.log.emit("step", step=number, steps_total=steps, loss=0.5, reward=reward)
        run.finish({})
    found = desk.client.groups.sweep(sweep_id)
    assert [point["step"] for point in found["points"]] == [4, 8]
    assert [point["mean"] for point in found["points"]] == [0.6, 0.4]
    assert found["best"] == 0


@pytest.mark.slow
def test_jobs_of_an_earlier_versions_sweep_are_planned_as_that_version_did(desk):
    sweep_id = submit(desk, *AXIS)
    folder = SweepFolder.open(desk.client.home, sweep_id)
    sweep, (member, *_) = folder.read(), folder.state().members
    assert document_of(sweep, member)["rules"] == RULES
    del sweep.document["rules"]  # it had none
    assert "rules" not in document_of(sweep, member)


@pytest.mark.slow
def test_a_job_that_has_finished_before_a_rung_is_scored_at_its_end(desk):
    sweep_id = submit(desk, *AXIS, "--halving", "3")
    for steps, reward in ((2, 0.5), (3, 0.4), (3, 0.3)):
        if steps == 3:
            play_to(desk, 3, reward)
            continue
        run = desk.begin()
        for number in range(1, steps + 1):
            run.log.emit("step", step=number, steps_total=steps, loss=0.5, reward=reward)
        run.finish({})
    advance(desk, sweep_id)
    [found] = desk.rows("show", sweep_id)
    assert [point["mean"] for point in found["points"]] == [0.5, 0.4, 0.3]
    assert found["best"] == 0


@pytest.mark.slow
def test_a_point_with_a_failed_seed_ranks_behind_those_without(desk):
    sweep_id = submit(desk, *AXIS, "--seeds", "2", "--halving", "3")
    play_to(desk, 3, 0.9)
    desk.begin().fail("the loss is nan")
    for reward in (0.1, 0.1, 0.2, 0.2):
        play_to(desk, 3, reward)
    advance(desk, sweep_id)
    assert queued(desk) == desk.client.groups.sweep_members(sweep_id)[4:]


def test_cancel_resume_and_removal_act_on_all_jobs(desk):
    sweep_id = submit(desk, *AXIS, "--name", "rates")
    done = desk.warmd("cancel", "rates")
    assert done.out == f"{sweep_id} canceled 3 of 3 jobs\n"
    assert queued(desk) == []
    assert desk.client.groups.sweep(sweep_id)["status"] == "canceled"
    assert desk.warmd("cancel", sweep_id).code == 2
    assert desk.warmd("resume", sweep_id).out == f"{sweep_id} queued 3 of 3 jobs\n"
    assert queued(desk) == desk.client.groups.sweep_members(sweep_id)
    refused = desk.warmd("rm", sweep_id)
    assert refused.is_refusal(2)
    assert "is queued: cancel it first" in refused.err
    desk.warmd("cancel", sweep_id)
    assert desk.warmd("rm", sweep_id).code == 0
    assert desk.client.groups.sweeps() == []
    assert desk.rows("jobs") == []


@pytest.mark.slow
def test_a_job_of_a_sweep_is_removed_alone_and_the_others_continue(desk):
    sweep_id = submit(desk, *AXIS, "--halving", "3")
    first, second, third = desk.client.groups.sweep_members(sweep_id)
    play_to(desk, 3, 0.9)
    assert desk.warmd("rm", first).code == 0
    assert desk.warmd("rm", second).is_refusal(2)
    for reward in (0.1, 0.2):
        play_to(desk, 3, reward)
    advance(desk, sweep_id)
    assert queued(desk) == [third]
    assert desk.client.groups.sweep(sweep_id)["best"] == 2
    assert "1 removed" in desk.warmd("show", sweep_id).out
    desk.warmd("cancel", sweep_id)
    assert desk.warmd("rm", sweep_id).code == 0
    assert list(desk.home.runs.iterdir()) == []


def test_a_paused_sweep_decides_nothing_until_it_continues(desk):
    sweep_id = submit(desk, *AXIS, "--halving", "3")
    play_to(desk, 3, 0.1)
    assert desk.warmd("pause", sweep_id).out == f"{sweep_id} paused 2 of 3 jobs\n"
    assert queued(desk) == []
    advance(desk, sweep_id)
    assert desk.client.groups.sweep(sweep_id)["paused"]
    assert desk.warmd("resume", sweep_id).out == f"{sweep_id} queued 2 of 3 jobs\n"
    for reward in (0.3, 0.2):
        play_to(desk, 3, reward)
    advance(desk, sweep_id)
    assert len(queued(desk)) == 1


@pytest.mark.slow
def test_resume_leaves_jobs_alone_that_wait_for_a_decision_or_were_not_kept(desk):
    sweep_id = submit(desk, *AXIS, "--halving", "3")
    play_to(desk, 3, 0.2)
    desk.warmd("cancel", sweep_id)
    members = desk.client.groups.sweep_members(sweep_id)
    assert desk.warmd("resume", sweep_id).out == f"{sweep_id} queued 2 of 3 jobs\n"
    assert sorted(queued(desk)) == sorted(members[1:])
    for reward in (0.1, 0.1):
        play_to(desk, 3, reward)
    advance(desk, sweep_id)
    assert queued(desk) == [members[0]]
    desk.warmd("cancel", sweep_id)
    desk.warmd("resume", sweep_id)
    assert queued(desk) == [members[0]]


@pytest.mark.slow
def test_python_submits_a_sweep_and_reads_its_table(desk):
    with warmd.connect(desk.home.path) as session:
        options = {"model": desk.grpo[3], "samples": 9, "num_generations": 2}
        sweep = session.sweep("grpo", **options, over={"beta": [0, 0.1]}, seeds=2)
        assert (sweep.status, len(sweep.jobs())) == ("queued", 4)
        assert sweep.table()["beta"] == [0.0, 0.1]
        assert sweep.best() is None
        assert session.sweeps() == [sweep]
        assert sweep.cancel() == "canceled 4 of 4 jobs"
        assert sweep.wait() == "canceled"
        with pytest.raises(warmd.SpecError, match="over: must be given"):
            session.sweep("grpo", **options)
