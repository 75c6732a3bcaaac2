"""Requests that are refused, in OpenAI's words."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import orjson
import pytest
import tool_chats


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "1", "model": "nope"}, "model"),
        ({"prompt": "1", "model": "/etc"}, "model"),
        ({"prompt": "1", "temperature": -1}, "temperature"),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "1", "max_tokens": 10_000}, "max_tokens"),
        ({"prompt": "1", "logprobs": 6}, "logprobs"),
        ({"prompt": "1", "tempreature": 1}, "tempreature"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["1", 2]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_invalid_request_is_refused_with_the_name_of_the_field(gateway, body, param):
    answer = httpx.post(f"{gateway.url}/v1/completions", json={"model": "tiny", **body})
    error = answer.json()["error"]
    assert answer.status_code == (404 if body.get("model") else 400)
    assert error["param"].split(".")[0] == param
    assert gateway.waiting() == []


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "?"}]}


PROMPT = {"model": "tiny", "prompt": "1"}
RERANK = {"model": "tiny", "query": "1", "documents": ["1"]}


TUNING = {"model": "tiny", "training_file": "arithmetic"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {**CHAT, "functions": [{}]}, "functions: not supported"),
        (
            "chat/completions",
            {**CHAT, "tool_choice": "required"},
            "tool_choice: must go with tools",
        ),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs: must go with logprobs"),
        (
            "chat/completions",
            {**CHAT, "logprobs": True, "top_logprobs": 21},
            "top_logprobs: must be less than or equal to 20, got 21",
        ),
        (
            "chat/completions",
            {**CHAT, "reasoning_effort": "none"},
            "reasoning_effort: the chat template has no variable for it, got none",
        ),
        (
            "chat/completions",
            {**CHAT, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs: the chat template has no variable enable_thinking",
        ),
        (
            "chat/completions",
            {**CHAT, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs: the value: must be an object of variables of the chat template",
        ),
        (
            "chat/completions",
            {"model": "tiny", "messages": [{**tool_chats.call("{"), "content": None}]},
            "messages: chat[0]: tool_calls[0]: function: arguments: must be JSON, got '{'",
        ),
        (
            "chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": None}]},
            "messages: chat[0]: must be an object of role and content",
        ),
        ("chat/completions", {**CHAT, "verbosity": "low"}, "verbosity: not supported"),
        ("chat/completions", {**CHAT, "modalities": ["audio"]}, "modalities: not supported"),
        ("chat/completions", {**CHAT, "service_tier": "priority"}, "service_tier: not supported"),
        ("chat/completions", {**CHAT, "topp": 1}, "topp: unknown or not supported"),
        (
            "completions",
            {**PROMPT, "logprobs": 6},
            "logprobs: must be less than or equal to 5, got 6",
        ),
        ("completions", {**PROMPT, "best_of": 2}, "best_of: not supported"),
        ("completions", {**PROMPT, "max_tokens": 0}, "max_tokens: must go with echo, got 0"),
        ("completions", {**PROMPT, "prompt": []}, "prompt: must have at least 1 item"),
        ("completions", {**PROMPT, "prompt": ["1", 2]}, "prompt.1: must be a valid string, got 2"),
        ("completions", {**PROMPT, "prompt": [1, -2]}, "prompt.1: must be greater than or equal"),
        ("completions", {**PROMPT, "top_p": "1"}, "top_p: must be a valid number, got '1'"),
        ("completions", {"model": "tiny"}, "prompt: must be given"),
        ("embeddings", {"model": "tiny", "input": "1", "dimensions": 0}, "dimensions: must be"),
        ("rerank", {**RERANK, "documents": []}, "documents: must have at least 1 item"),
        ("rerank", {**RERANK, "documents": ["1", 2]}, "documents.1: must be a valid dictionary"),
        ("rerank", {**RERANK, "documents": [{"text": 1}]}, "documents.0.text: must be a valid str"),
        (
            "rerank",
            {**RERANK, "documents": [{"text": "1", "title": "2"}]},
            "documents.0.title: unknown or not supported",
        ),
        ("rerank", {**RERANK, "query": ""}, "query: must have at least 1 character"),
        ("rerank", {**RERANK, "top_n": 0}, "top_n: must be greater than or equal to 1, got 0"),
        ("rerank", {**RERANK, "priority": 1}, "priority: not supported"),
        ("rerank", {**RERANK, "max_chunks_per_doc": 2}, "max_chunks_per_doc: not supported"),
        ("rerank", {**RERANK, "rank_fields": ["title"]}, "rank_fields: not supported"),
        (
            "rerank",
            {**RERANK, "relevant_spans": {"mode": "enabled"}},
            "relevant_spans: not supported",
        ),
        ("rerank", RERANK, "model: must be a cross-encoder"),
        (
            "fine_tuning/jobs",
            {**TUNING, "hyperparameters": {"n_epochs": 1}},
            "hyperparameters: not supported: use method.TYPE.hyperparameters",
        ),
        (
            "fine_tuning/jobs",
            {
                **{"model": "tiny", "training_file": "stdlib"},
                **{"method": {"type": "mlm"}, "validation_file": "f"},
            },
            "validation_file: must be left out for mlm, got a file",
        ),
        (
            "fine_tuning/jobs",
            {**TUNING, "validation_file": "f"},
            "validation_file: must be the id of an uploaded file",
        ),
        (
            "fine_tuning/jobs",
            {**TUNING, "integrations": [{"type": "wandb", "wandb": {"project": "p"}}]},
            "integrations[0]: must be configured: set report_to: [wandb] in defaults.grpo",
        ),
        (
            "fine_tuning/jobs",
            {**TUNING, "integrations": [{"type": "other"}]},
            "integrations[0].type: must be wandb, got 'other'",
        ),
        (
            "fine_tuning/jobs",
            {**TUNING, "method": {"type": "mlm", "mlm": {"grader": {}}}},
            "method.mlm.grader: unknown or not supported",
        ),
        (
            "fine_tuning/jobs",
            {**TUNING, "method": {"type": "mlm", "reinforcement": {}}},
            "method.reinforcement: unknown or not supported",
        ),
        (
            "fine_tuning/jobs",
            {
                **{"model": "tiny", "training_file": "arithmetic"},
                **{
                    "method": {
                        "type": "reinforcement",
                        "reinforcement": {"hyperparameters": {"nodes": 2}},
                    }
                },
            },
            "method.reinforcement.hyperparameters.nodes: must be 1 without a Redis that several",
        ),
    ],
)
def test_unsupported_field_is_refused_in_openais_format(gateway, path, body, message):
    answer = httpx.post(f"{gateway.url}/v1/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert gateway.waiting() == []


CHAT_ROW = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
PAIR = {
    "input": {"messages": [{"role": "user", "content": "?"}]},
    "preferred_output": [{"role": "assistant", "content": "yes"}],
    "non_preferred_output": [{"role": "assistant", "content": "no"}],
}


@pytest.mark.parametrize(
    ("method", "row"),
    [("supervised", CHAT_ROW), ("dpo", PAIR), ("reinforcement", {"prompt": "1+1=", "answer": "2"})],
)
@pytest.mark.parametrize("role", ["training_file", "validation_file"])
def test_a_key_with_a_meaning_that_is_not_supported_is_refused_by_file_line_and_name(
    gateway, method, row, role
):
    lines = [row, {**row, "tools": []}, {**row, "tools": [{"type": "function"}]}]
    files = [
        httpx.post(
            f"{gateway.url}/v1/files",
            files={"file": ("rows.jsonl", b"\n".join(map(orjson.dumps, content)))},
            data={"purpose": "fine-tune"},
        ).json()["id"]
        for content in (lines, lines[:2])
    ]
    names = {"training_file": files[1], "validation_file": files[1], role: files[0]}
    answer = httpx.post(
        f"{gateway.url}/v1/fine_tuning/jobs",
        json={"model": "tiny", **names, "method": {"type": method, method: {}}},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, role)
    assert f"{files[0]}" in error["message"]
    assert (
        ", line 3: tools[0]: must be an object of type and function, with its name"
        in error["message"]
    )
    assert gateway.waiting() == []


def test_unknown_query_and_form_fields_are_refused(gateway):
    query = httpx.get(f"{gateway.url}/v1/fine_tuning/jobs", params={"metadata[a]": "b"})
    form = httpx.post(
        f"{gateway.url}/v1/files",
        files={"file": ("a.jsonl", b"{}")},
        data={"purpose": "fine-tune", "expires_after[seconds]": "3600"},
    )
    assert [(r.status_code, r.json()["error"]["message"]) for r in (query, form)] == [
        (400, "metadata[a]: unknown or not supported"),
        (400, "expires_after[seconds]: unknown or not supported"),
    ]


def test_defaults_of_unsupported_fields_and_fields_about_the_request_are_accepted(
    gateway, background
):
    defaults = {
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": False,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "tool_choice": "auto",
        "tools": [],
    }
    about = {"user": "u", "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k"}
    answer = background.submit(
        httpx.post, f"{gateway.url}/v1/chat/completions", json={**CHAT, **defaults, **about}
    )
    gateway.take().finish("x")
    assert answer.result(10).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"{", b"\xff", b'{"model": "tiny", "prompt": "\\ud800"}', b"[" * 100_000, b'"a"', b"NaN"],
)
def test_body_that_is_not_a_json_object_is_refused(gateway, body):
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{gateway.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_errors_for_unknown_path_and_method_have_openais_shape(gateway):
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)):
        answer = httpx.request(method, gateway.url + path)
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/completions", "POST"),
        ("/v1/responses", "POST"),
        ("/v1/files", "GET, POST"),
        ("/v1/files/file-1", "GET, DELETE"),
        ("/v1/fine_tuning/jobs", "GET, POST"),
    ],
)
def test_allow_names_every_method_of_a_path(gateway, path, methods):
    answer = httpx.request("PUT", gateway.url + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_a_body_of_too_many_levels_is_refused_by_name(gateway):
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(150):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "at most 200 levels of objects and lists" in answer.json()["error"]["message"]
