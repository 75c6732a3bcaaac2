"""Graders in fine-tuning requests: supported ones, and those that are refused by name."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import openai
import orjson
import pytest

TUNING = {"model": "tiny", "training_file": "arithmetic"}


CHECK = {
    "type": "string_check",
    "name": "check",
    "operation": "like",
    "input": "{{sample.output_text}}",
    "reference": "{{item.reference_answer}}",
}


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (
            {"type": "score_model"},
            "must have a type of string_check, text_similarity, multi, python",
        ),
        pytest.param(
            {**CHECK, "operation": "is"},
            "operation of the grader must be one of eq, ne",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {**CHECK, "type": "text_similarity", "evaluation_metric": "cosine"},
            "the grader",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"type": "python", "name": "p", "source": "def grade(sample, item): return 1"},
            "source of the grader must be module:function of this machine",
            marks=pytest.mark.slow,
        ),
        (
            {"type": "python", "name": "p", "source": "os:getcwd"},
            "a python grader must be one of none (setting http_graders), got 'os:getcwd'",
        ),
        pytest.param(
            {
                **{"type": "multi", "name": "m", "calculate_output": "a"},
                "graders": {"a": {"type": "python", "name": "p", "source": "os:getcwd"}},
            },
            "a python grader must be one of none",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"type": "warmd", "reward": ["grader"]},
            "must be one of correctness, ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"type": "warmd", "reward": ["os:getcwd"]},
            "must be one of correctness, ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_unavailable_grader_is_refused_by_name(gateway, grader, message):
    method = {"type": "reinforcement", "reinforcement": {"grader": grader}}
    answer = httpx.post(f"{gateway.url}/v1/fine_tuning/jobs", json={**TUNING, "method": method})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"].startswith("method.reinforcement.")
    assert message in error["message"]
    assert gateway.waiting() == []


def test_openais_calls_for_reinforcement_with_graders_queue_a_job(gateway):
    client = gateway.openai()
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1="}], "reference_answer": f"{n + 1}"}
        for n in range(4)
    ]
    train, held_out = (
        client.files.create(
            file=("train.jsonl", b"\n".join(map(orjson.dumps, part))), purpose="fine-tune"
        ).id
        for part in (rows[:3], rows[3:])
    )
    similar = {
        **{"type": "text_similarity", "name": "similar", "evaluation_metric": "fuzzy_match"},
        **{"input": CHECK["input"], "reference": CHECK["reference"]},
    }
    both: Any = {
        **{"type": "multi", "name": "both", "calculate_output": "0.5 * check + 0.5 * similar"},
        "graders": {"check": CHECK, "similar": similar},
    }
    for grader in (CHECK, similar, both):
        method: Any = {
            "type": "reinforcement",
            "reinforcement": {
                "grader": grader,
                "hyperparameters": {"n_epochs": 1, "max_prompt_length": 8},
            },
        }
        job = client.fine_tuning.jobs.create(
            model="tiny", training_file=train, validation_file=held_out, method=method
        )
        assert (job.training_file, job.validation_file) == (train, held_out)
        gateway.client.jobs.cancel(job.id)
        spec = gateway.client.rundir(job.id).read_spec()["spec"]
        assert (spec["samples"], spec["reward"]) == (3, ["grader"])
        assert orjson.loads(spec["grader"]) == grader
    broken: Any = {**method, "reinforcement": {"grader": {**CHECK, "reference": "{{item.x}}"}}}
    with pytest.raises(openai.BadRequestError, match=r"item.x must be a column") as caught:
        client.fine_tuning.jobs.create(model="tiny", training_file=train, method=broken)
    assert caught.value.param == "method.reinforcement.grader"
