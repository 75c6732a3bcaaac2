"""`/tokenize` and `/detokenize`, in vLLM's shape."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import orjson
import pytest
import tool_chats
from gateways import Gateway

USER = {"role": "user", "content": "?"}


def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/{path}", json={"model": "tiny", **body}, timeout=30)


def test_a_prompt_reaches_the_job_and_its_tokens_the_client(gateway, background):
    given = {"prompt": "ab", "add_special_tokens": False}
    answer = background.submit(post, gateway, "tokenize", **given, return_token_strs=True)
    job = gateway.take()
    about = (job.spec["reply"], job.spec["prompt"], job.spec["add_special_tokens"])
    assert about == ("tokens", "ab", False)
    job.finish_with_tokens([3, 4], ["a", "b"], "[3, 4]")
    found = answer.result(10)
    assert found.headers["x-warmd-job"] == job.job.id
    assert found.json() == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [3, 4],
        "token_strs": ["a", "b"],
    }


def test_a_chat_reaches_the_job(thinking, background):
    given = {
        "messages": [USER],
        "tools": tool_chats.TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
    }
    answer = background.submit(post, thinking, "tokenize", **given)
    job = thinking.take()
    assert orjson.loads(job.spec["messages"]) == [USER]
    assert orjson.loads(job.spec["tools"]) == tool_chats.TOOLS
    assert job.spec["chat_template_kwargs"] == '{"enable_thinking":false}'
    assert job.spec["add_generation_prompt"] is False
    job.finish_with_tokens([3], ["a"], "[3]")
    assert answer.result(10).json()["token_strs"] is None


def test_token_ids_become_a_text(gateway, background):
    answer = background.submit(post, gateway, "detokenize", tokens=[3, 4])
    job = gateway.take()
    assert (job.spec["reply"], job.spec["prompts"]) == ("tokens", "[[3,4]]")
    job.finish_with_tokens([3, 4], ["a", "b"], "ab")
    assert answer.result(10).json() == {"prompt": "ab"}
    assert post(gateway, "detokenize", tokens=[]).json() == {"prompt": ""}


def test_an_unknown_token_is_a_client_error_by_the_name_of_the_request(gateway, background):
    answer = background.submit(post, gateway, "detokenize", tokens=[999])
    gateway.take().fail("prompts: [0] must be token ids of tiny, got 999, which it has not")
    found = answer.result(10)
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["param"] == "tokens"
    assert error["message"] == "tokens: must be token ids of tiny, got 999, which it has not"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": ""}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("tokenize", {"prompt": "a", "tools": tool_chats.TOOLS}, "tools"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("tokenize", {"messages": [USER], "continue_final_message": True},
         "continue_final_message"),
        ("tokenize", {"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("tokenize", {"messages": [USER], "response_template": "/etc/x"}, "response_template"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [2**31]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens"),
        ("detokenize", {}, "tokens"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_by_name(gateway, path, body, param):
    found = post(gateway, path, **body)
    assert found.status_code == 400, found.text
    assert str(found.json()["error"]["param"]).startswith(param)
    assert gateway.waiting() == []


@pytest.mark.parametrize(
    ("path", "body"), [("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})]
)
def test_a_model_that_is_not_there_and_a_missing_token_are_refused(gateway, locked, path, body):
    assert post(gateway, path, **{**body, "model": "none"}).status_code == 404
    assert post(locked, path, **body).status_code == 401
