"""What the request of an agent asks for, and what the job decides otherwise."""

from __future__ import annotations

import json

import pytest
from talkers import TOOL

from warmd.jobs.environments.agent_requests import read

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
ASKED = {"messages": json.dumps([{"role": "user", "content": "a?"}]), "tools": json.dumps([TOOL])}


@pytest.mark.parametrize("choice", ["required", "read"])
def test_a_forced_call_is_sampled_freely_and_named(choice):
    found = read({**ASKED, "tool_choice": choice}, SAMPLING)
    assert found.tools == [TOOL]
    assert found.warnings == (
        f"agent: a request has tool_choice {choice}; turns are sampled freely, as with auto",
    )


def test_only_what_differs_from_the_job_is_named():
    assert read({**ASKED, "temperature": 1.0, "top_p": 1.0}, SAMPLING).warnings == ()
    cold = read({**ASKED, "temperature": 0.0}, SAMPLING)
    assert cold.warnings == (
        "agent: a request has temperature 0; turns are sampled with the job's, 1",
    )
    assert read({**ASKED, "tool_choice": "none"}, SAMPLING).tools == []
