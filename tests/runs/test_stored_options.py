"""Jobs, sweeps and curricula of versions that gave questions a prompt of their own."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from worked_sweeps import planned, queued

from warmd.daemon.groups import driver
from warmd.daemon.groups.curriculum import CurriculumFolder
from warmd.daemon.groups.members import submit_all
from warmd.daemon.groups.sweep import SweepFolder
from warmd.jobs import spec_class, stored_options
from warmd.jobs.data.templates import MATH
from warmd.jobs.eval.options import EvalSpec


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(50)))
    return str(path)


def without_template(path):
    """Make a stored document one of a version that did not store the template."""

    def changed(value):
        if isinstance(value, dict):
            return {k: changed(v) for k, v in value.items() if k not in ("template", "digest")}
        return [changed(item) for item in value] if isinstance(value, list) else value

    path.write_bytes(orjson.dumps(changed(orjson.loads(path.read_bytes()))))


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_stored_job_keeps_its_template_and_one_without_has_the_former_prompt(kind):
    data = {"dataset": "rows.jsonl"}
    spec: Any = spec_class(kind)
    assert spec.parse(stored_options(kind, data)).template == MATH
    kept = stored_options(kind, {**data, "template": "{question}"})
    assert spec.parse(kept).template == "{question}"


@pytest.mark.parametrize(
    ("stored", "template"),
    [
        ({"template": None}, MATH),
        ({"task": "reward"}, MATH),
        ({"task": "choice", "template": None, "dataset": "d"}, "Question: {question}\nAnswer:"),
        ({"task": "gsm8k", "template": None}, "as-trained"),  # which has no effect
        ({"task": "gsm8k", "template": "{question}"}, "as-trained"),
        ({"template": "{question}"}, "{question}"),
    ],
)
def test_a_stored_evaluation_keeps_the_prompt_of_its_task(stored, template):
    assert EvalSpec.parse(stored_options("eval", stored)).template == template


def test_a_job_of_an_earlier_version_resumes_with_its_prompt(desk, questions):
    job_id = desk.submit("--dataset", questions)
    rundir = desk.client.rundir(job_id)
    assert rundir.read_spec()["spec"]["template"] == "{question}"
    without_template(rundir.path / "spec.json")
    desk.client.jobs.cancel(job_id)
    desk.client.jobs.resume(job_id)
    assert rundir.read_spec()["spec"]["template"] == MATH
    [again] = desk.warmd("submit", "--like", job_id, "--dry-run", "--json").objects
    assert again["spec"]["template"] == MATH


@pytest.mark.slow
def test_jobs_that_an_old_sweep_submits_later_have_its_prompt(desk):
    sweep_id = planned(desk, sweep=["beta=0,0.1"])
    folder = SweepFolder(desk.home, sweep_id)
    without_template(folder.path / "plan.json")
    with folder.changing():
        submit_all(desk.client.places, folder)
    stored = [desk.client.rundir(one).path / "spec.json" for one in queued(desk)]
    assert stored
    for path in stored:
        assert orjson.loads(path.read_bytes())["spec"]["template"] == MATH


@pytest.mark.slow
def test_jobs_that_an_old_curriculum_submits_later_have_its_prompt(desk, questions):
    values = {"model": desk.grpo[3], "num_generations": 2, "dataset": questions}
    given = {
        "stages": [{"samples": 4}, {"samples": 8}],
        "gate": {"samples": 40, "most_samples": 40, "max_tokens": 4},
    }
    plan = desk.client.groups.submit_curriculum("grpo", values, given)
    folder = CurriculumFolder(desk.home, plan)
    without_template(folder.path / "plan.json")
    run = desk.begin()
    run.finish({})
    driver.advance(desk.client.places, folder)
    evaluation = folder.state().attempts[0].rounds[0].before
    path = desk.client.rundir(evaluation).path / "spec.json"
    assert orjson.loads(path.read_bytes())["spec"]["template"] == MATH
    assert folder.read().stages[1].document["spec"]["template"] == MATH
