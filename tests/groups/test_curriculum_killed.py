"""A curriculum whose process is killed: each job is queued once, each decision is made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlm_jobs
import orjson
import pytest
from desks import Desk
from worked_sweeps import ended_at

from warmd.configs.config import load
from warmd.daemon.client.client import Client
from warmd.daemon.groups import driver
from warmd.daemon.groups.curriculum import CurriculumFolder, State
from warmd.daemon.runs import events
from warmd.daemon.runs.events import EventLog
from warmd.jobs.intervals import compare

BETTER, WORSE, SAME = [1.0] * 40, [-1.0] * 40, [1.0, -1.0] * 20
MANY = pytest.mark.nightly(
    part="storms", catches="a line of the code of a curriculum at which a kill repeats a decision"
)
POINTS = [
    pytest.param(3, id="some-lines"),
    pytest.param(30, id="many-lines", marks=MANY),
]


def submit(desk: Desk) -> str:
    """A curriculum of two stages, whose first job is queued."""
    values = {"model": desk.grpo[3], "num_generations": 2, "learning_rate": 1e-4}
    given = {
        "stages": [{"samples": 4}, {"samples": 8}],
        "gate": {"samples": 40, "most_samples": 80, "max_tokens": 4},
    }
    return str(desk.client.groups.submit_curriculum("grpo", values, given))


def advance(desk: Desk, curriculum_id: str) -> None:
    folder = CurriculumFolder(desk.home, curriculum_id)
    driver.advance(desk.client.places, folder)


def advance_anew(home: Path, curriculum_id: str) -> None:
    client = Client(load(home=home, environ={}))  # with a connection of its own
    driver.advance(client.places, CurriculumFolder(client.home, curriculum_id))


def state(desk: Desk, curriculum_id: str) -> State:
    return CurriculumFolder(desk.home, curriculum_id).state()


def queued(desk: Desk, queue: str) -> list[str]:
    found: Any = desk.client.connection.lrange(f"rq:queue:{queue}", 0, -1)
    return [job_id.decode() for job_id in found]


def finish(desk: Desk, queue: str, result: dict[str, Any]) -> str:
    """Act as the worker of the next job."""
    popped: Any = desk.client.connection.lpop(f"rq:queue:{queue}")
    store = desk.client.store
    taken = store.begin(popped, queue, "w")
    assert taken is not None
    job, started = taken
    rundir = desk.client.rundir(job.id)
    with EventLog(rundir.events, execution=1) as log:
        log.emit("begin", learning_rate=rundir.read_spec()["spec"].get("learning_rate"))
        rundir.write_result(result, revision=rundir.read_spec()["revision"])
        log.emit("finished", result=result)
    store.finish(job, started.claim)
    return str(job.id)


def answer(desk: Desk, curriculum_id: str, differences: list[float]) -> None:
    """Complete both evaluations of a gate; the second one is compared, with these differences."""
    one = state(desk, curriculum_id).attempts[-1].rounds[-1]
    found = compare([0.0] * len(differences), differences)
    comparison = {"reward": {**found.__dict__, "words": found.words}}
    while (job := desk.client.store.fetch(one.after)) is None or job.get_status() != "finished":
        is_second = queued(desk, "infer") == [one.after]
        finish(desk, "infer", {"comparison": comparison if is_second else None})
        if not is_second:
            advance(desk, curriculum_id)


def remove(desk: Desk, curriculum_id: str) -> None:
    for job_id in state(desk, curriculum_id).jobs:
        desk.client.jobs.cancel_if_pending(job_id) if desk.client.store.fetch(job_id) else None
    desk.client.jobs.remove(curriculum_id)


def killed_everywhere(desk: Desk, points: int, prepare: Any, check: Any) -> None:
    """Kill the process at some of its lines, one per run; the next process finishes the work."""

    def begun() -> str:
        curriculum_id = submit(desk)
        prepare(curriculum_id)
        return curriculum_id

    first = begun()
    lines = ended_at(None, lambda: advance_anew(desk.home.path, first))
    check(first)
    remove(desk, first)
    assert lines > 50
    for line in sorted({1 + round(n * (lines - 1) / (points - 1)) for n in range(points)}):
        curriculum_id = begun()
        ended_at(line, lambda one=curriculum_id: advance_anew(desk.home.path, one))  # type: ignore[misc]
        for _ in range(2):  # the second time nothing is left to do
            advance(desk, curriculum_id)
            check(curriculum_id)
        remove(desk, curriculum_id)


@pytest.mark.parametrize("points", POINTS)
def test_the_evaluation_of_a_gate_is_queued_once_wherever_the_process_was_killed(desk, points):
    def check(curriculum_id: str) -> None:
        [attempt] = state(desk, curriculum_id).attempts
        [one] = attempt.rounds
        assert queued(desk, "infer") == [one.before]
        assert not (desk.home.runs / one.after).exists()

    killed_everywhere(desk, points, lambda _: finish(desk, "train", {"steps": 4}), check)


@pytest.mark.slow
@pytest.mark.parametrize("points", POINTS)
def test_a_worse_stage_is_rolled_back_once_wherever_the_process_was_killed(desk, points):
    def prepare(curriculum_id: str) -> None:
        finish(desk, "train", {"steps": 4})
        advance(desk, curriculum_id)
        answer(desk, curriculum_id, WORSE)

    def check(curriculum_id: str) -> None:
        first, second = state(desk, curriculum_id).attempts
        assert (first.decision, second.stage, second.number) == ("roll back", 0, 1)
        assert queued(desk, "train") == [second.job]
        assert desk.client.rundir(second.job).read_spec()["spec"]["learning_rate"] == 5e-5
        folder = CurriculumFolder(desk.home, curriculum_id)
        [event] = [e for e in events.read(folder.events) if e["type"] == "gate"]
        assert (event["decision"], event["verdict"]) == ("roll back", "worse")

    killed_everywhere(desk, points, prepare, check)


def test_an_undecided_gate_uses_more_questions_and_then_passes_the_stage(desk):
    curriculum_id = submit(desk)
    finish(desk, "train", {"steps": 4})
    for _ in range(2):
        advance(desk, curriculum_id)
        answer(desk, curriculum_id, SAME)
    advance(desk, curriculum_id)
    first, second = state(desk, curriculum_id).attempts
    assert [one.questions for one in first.rounds] == [40, 80]
    assert (first.decision, second.stage) == ("continue", 1)
    spec = desk.client.rundir(second.job).read_spec()
    assert spec["model"]["path"] == str(desk.home.runs / first.job / "model")
    assert spec["spec"]["samples"] == 8


# p 0.033: below the 5 % of a single comparison, above the 1.25 % of the first of two.
MAYBE_WORSE = [-1.0] * 9 + [1.0] * 2 + [0.0] * 29


def test_an_early_comparison_at_a_gate_needs_more_evidence_than_a_single_one(desk):
    assert compare([0.0] * 40, MAYBE_WORSE).verdict == "worse"
    curriculum_id = submit(desk)
    finish(desk, "train", {"steps": 4})
    advance(desk, curriculum_id)
    answer(desk, curriculum_id, MAYBE_WORSE)
    advance(desk, curriculum_id)
    [attempt] = state(desk, curriculum_id).attempts
    assert [one.questions for one in attempt.rounds] == [40, 80]
    answer(desk, curriculum_id, SAME)
    advance(desk, curriculum_id)
    [decided, _] = desk.client.groups.curriculum(curriculum_id)["attempts"]
    assert decided["decision"] == "continue"
    assert decided["comparison"]["level"] == pytest.approx(0.0375)


_NEW = ("gate_level", "digest")  # not in the plans of the version 0.1


def test_a_curriculum_that_an_earlier_version_began_decides_as_it_began(desk):
    curriculum_id = submit(desk)
    path = CurriculumFolder(desk.home, curriculum_id).path / "plan.json"
    plan = orjson.loads(path.read_bytes())
    for stage in plan["stages"]:
        del stage["document"]["rules"]
    path.write_bytes(orjson.dumps({k: v for k, v in plan.items() if k not in _NEW}))
    for _ in range(2):
        finish(desk, "train", {"steps": 4})
        advance(desk, curriculum_id)
        answer(desk, curriculum_id, MAYBE_WORSE)
        advance(desk, curriculum_id)
    first, second, _ = state(desk, curriculum_id).attempts
    assert first.decision == second.decision == "roll back"
    change = (
        "worse; from this gate (stage-1) on by Student's paired t test: "
        "the version that began the curriculum used McNemar's test or the bootstrap"
    )
    found = events.read(CurriculumFolder(desk.home, curriculum_id).events)
    assert [event["words"] for event in found] == [change, "worse"]
    assert change in desk.warmd("show", "--json", curriculum_id).out


def test_a_stage_that_is_worse_three_times_ends_the_curriculum(desk):
    curriculum_id = submit(desk)
    for _ in range(3):
        finish(desk, "train", {"steps": 4})
        advance(desk, curriculum_id)
        answer(desk, curriculum_id, WORSE)
        advance(desk, curriculum_id)
    found = desk.client.groups.curriculum(curriculum_id)
    assert (found["status"], found["problem"]) == (
        "failed",
        "stage-1: worse than before it, 3 times",
    )
    assert [attempt["decision"] for attempt in found["attempts"]] == [
        "roll back",
        "roll back",
        "give up",
    ]
    assert found["model"] is None
    assert queued(desk, "train") == []
    assert desk.warmd("resume", curriculum_id).is_refusal(2)


def test_the_last_gate_ends_the_curriculum_with_the_model_of_the_last_stage(desk):
    curriculum_id = submit(desk)
    for _ in range(2):
        finish(desk, "train", {"steps": 4})
        advance(desk, curriculum_id)
        answer(desk, curriculum_id, BETTER)
        advance(desk, curriculum_id)
    found = desk.client.groups.curriculum(curriculum_id)
    assert (found["status"], found["model"]) == ("finished", found["attempts"][-1]["job"])
    # The evaluation after the first stage is the one before the second.
    first, second = state(desk, curriculum_id).attempts
    assert first.rounds[-1].after == second.rounds[0].before
    shown = desk.warmd("show", curriculum_id).out
    assert curriculum_id in desk.warmd("jobs", "--kind", "curriculum").out
    assert "continue" in shown
    assert "better" in shown
    assert desk.warmd("rm", curriculum_id).code == 0
    assert desk.client.groups.curricula() == []


def test_canceling_and_resuming_a_curriculum(desk):
    curriculum_id = submit(desk)
    [attempt] = state(desk, curriculum_id).attempts
    assert desk.warmd("cancel", curriculum_id).out == f"{curriculum_id} canceled\n"
    assert queued(desk, "train") == []
    assert desk.warmd("resume", curriculum_id).out == f"{curriculum_id} queued\n"
    assert queued(desk, "train") == [attempt.job]
    assert desk.warmd("pause", curriculum_id).code == 0
    assert queued(desk, "train") == []
    assert desk.warmd("resume", curriculum_id).code == 0
    assert queued(desk, "train") == [attempt.job]


def test_a_gate_of_a_masked_language_model_is_refused(desk, tmp_path):
    home = mlm_jobs.make_home(tmp_path)
    stages = "gate: {samples: 4}\nstages: [{steps: 2}, {steps: 2}]"
    data = f"objective: mlm\ndata: {home}/texts.jsonl\nseq_len: 32\n"
    model = f"tokenizer: train\narchitecture: {home}/bert\n"
    (tmp_path / "job.yaml").write_text(data + model + stages)
    done = desk.warmd("submit", "mlm", "--config", str(tmp_path / "job.yaml"))
    assert done.is_refusal(2)
    assert done.err == "Error: gate: must be of a model that generates text, got a new model\n"
    assert queued(desk, "train") == []
    assert desk.client.groups.curricula() == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stages: []", "stages: must be a list of 1 to 100 stages"),
        ("stages:\n  - samples: 0", "stages: stage-1: samples: must be"),
        ("stages:\n  - learning_rat: 1", "stages: stage-1: learning_rat: unknown option"),
        ("stages:\n  - model: x", "stages: must start from the stage before, got model"),
        ("stages:\n  - samples: 4\ngate:\n  tasks: x", "gate: tasks: unknown option of eval"),
        ("stages:\n  - samples: 4\ngate:\n  samples: 0", "gate: must have samples from 1"),
        ("stages:\n  - samples: 4\nseeds: 2", "seeds: must not be given together with stages"),
    ],
)
def test_a_wrong_curriculum_is_refused_and_nothing_is_queued(desk, tmp_path, text, problem):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    done = desk.warmd(*desk.grpo[:-2], "--config", str(file))
    assert done.is_refusal(2), done.err
    assert problem in done.err
    assert queued(desk, "train") == []
    assert desk.client.groups.curricula() == []
