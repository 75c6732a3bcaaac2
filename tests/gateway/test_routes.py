"""The HTTP gateway with OpenAI's client; the test plays the worker."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import orjson
import pytest
from gateways import Gateway
from waiting import wait_until

from warmd.daemon.gateway.http.auth import SILENCE_S
from warmd.daemon.gateway.http.connection import HEAD_S

TOKEN = "a-token-of-tests"


@pytest.fixture(scope="module")
def module_gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        gateway = Gateway(Path(folder, "home"), tiny_model, http_queue_limit=4)
        yield gateway
        gateway.close()


@pytest.fixture
def gateway(module_gateway: Gateway) -> Iterator[Gateway]:
    """A gateway whose queue is empty."""
    if module_gateway.process.poll() is not None:
        module_gateway.start()
    yield module_gateway
    module_gateway.hang_up()
    module_gateway.drop_waiting()


@pytest.fixture
def make_gateway(tiny_model: Path) -> Iterator[Callable[..., Gateway]]:
    made: list[Gateway] = []
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:

        def make(**settings: Any) -> Gateway:
            made.append(Gateway(Path(folder, f"h{len(made)}"), tiny_model, **settings))
            return made[-1]

        yield make
        for gateway in made:
            gateway.close()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def ask(gateway: Gateway, prompt: str = "1", **options: Any) -> Any:
    settings = options.pop("settings", {})
    return gateway.openai(**settings).completions.create(model="tiny", prompt=prompt, **options)


def raw_ask(gateway: Gateway, prompt: str = "1", **headers: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, headers=named, timeout=30)


def refusal(error: openai.APIStatusError) -> tuple[int, Any]:
    """Return status and `error` of a response in OpenAI's shape."""
    body = error.response.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    return error.status_code, body


# --- the process


def test_gateway_imports_neither_torch_nor_transformers():
    code = (
        "import sys, warmd.daemon.gateway.__main__, warmd.jobs.infer.kind, warmd.jobs.encode.kind, "
        "warmd.jobs.grpo.kind, warmd.jobs.mlm.kind\n"
        "print(sorted({'torch', 'transformers', 'trl', 'datasets'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_gateway_reports_why_it_cannot_listen(gateway, make_gateway):
    port = int(gateway.url.rpartition(":")[2])
    other = make_gateway(http_port=port)
    assert f"127.0.0.1:{port}" in other.said["problem"]
    assert other.process.wait(10) == 1


# --- answers


def test_completion_has_the_text_of_its_job(gateway, background):
    answer = background.submit(ask, gateway, "one", max_tokens=7, stop=["x"], temperature=0.5)
    job = gateway.take()
    assert {k: job.spec[k] for k in ("model", "prompt", "max_tokens", "stop", "temperature")} == {
        "model": "tiny",
        "prompt": "one",
        "max_tokens": 7,
        "stop": ["x"],
        "temperature": 0.5,
    }
    job.finish(" two")
    completion = answer.result(10)
    assert completion.choices[0].text == " two"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage.total_tokens == 5
    assert completion.usage.prompt_tokens_details.cached_tokens == 1


def test_chat_passes_its_messages_to_the_job_and_responds_in_openais_shape(gateway, background):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    chat = gateway.openai().chat.completions.create
    answer = background.submit(chat, model="tiny", messages=messages, n=2, seed=5)
    job = gateway.take()
    assert openai_messages(job.spec["messages"]) == messages
    assert (job.spec["n"], job.spec["seed"]) == (2, 5)
    job.finish("Hi", "Ho")
    completion = answer.result(10)
    assert [choice.message.content for choice in completion.choices] == ["Hi", "Ho"]
    assert completion.choices[1].message.role == "assistant"


def openai_messages(text: str) -> Any:
    import orjson

    return orjson.loads(text)


def test_stream_sends_text_as_it_is_generated_and_usage_last(gateway, background):
    stream = gateway.openai().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "?"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    job = gateway.take()
    chunks = iter(stream)
    assert next(chunks).choices[0].delta.role == "assistant"
    for text in ("Hel", "lo"):
        job.write(text)
        assert next(chunks).choices[0].delta.content == text
    job.finish("Hello")
    ending, usage = list(chunks)
    assert ending.choices[0].finish_reason == "stop"
    assert (usage.choices, usage.usage.total_tokens) == ([], 5)


def test_every_job_has_its_own_seed(gateway, background):
    answers = [background.submit(ask, gateway) for _ in range(2)]
    jobs = [gateway.take() for _ in range(2)]
    assert jobs[0].spec["seed"] != jobs[1].spec["seed"]
    for job in jobs:
        job.finish("x")
    for answer in answers:
        answer.result(10)


def test_stream_continues_where_it_was_when_its_worker_is_killed(gateway):
    stream = iter(ask(gateway, stream=True))
    job = gateway.take()
    job.write("one ")
    assert next(stream).choices[0].text == "one "
    again = job.die()
    again.write("on")
    again.write("e two")
    assert next(stream).choices[0].text == "two"
    again.finish("one two")
    assert [chunk.choices[0].finish_reason for chunk in stream] == ["stop"]


def test_stream_ends_with_an_error_when_a_restarted_job_generates_other_text(gateway):
    stream = iter(ask(gateway, stream=True))
    job = gateway.take()
    job.write("one ")
    next(stream)
    again = job.die()
    again.write("uno ")
    with pytest.raises(openai.APIError, match="was restarted"):
        next(stream)
    wait_until(lambda: again.stop_asked == "cancel", timeout_s=5)
    again.fail("stopped")


def test_whole_response_survives_the_worker(gateway, background):
    answer = background.submit(ask, gateway)
    job = gateway.take()
    job.write("lost")
    job.die().finish("found")
    assert answer.result(10).choices[0].text == "found"


def test_failed_job_is_an_error_that_the_client_does_not_retry(gateway, background):
    answer = background.submit(ask, gateway, settings={"max_retries": 3})
    gateway.take().fail("RuntimeError: out of ideas", "Traceback: …")
    with pytest.raises(openai.InternalServerError, match="out of ideas") as caught:
        answer.result(10)
    assert refusal(caught.value)[0] == 500
    assert gateway.waiting() == []


def test_option_that_only_the_worker_can_check_is_a_client_error(gateway, background):
    answer = background.submit(ask, gateway)
    gateway.take().fail("prompt: must be at most 64 tokens, got 65")
    with pytest.raises(openai.BadRequestError) as caught:
        answer.result(10)
    assert refusal(caught.value)[1]["param"] == "prompt"


def test_failure_after_the_first_byte_is_sent_in_the_stream(gateway):
    stream = iter(ask(gateway, stream=True))
    job = gateway.take()
    job.write("so f")
    next(stream)
    job.fail("ZeroDivisionError: division by zero", "Traceback: …")
    with pytest.raises(openai.APIError, match="division by zero"):
        next(stream)


def test_canceled_job_is_an_error(gateway, background):
    answer = background.submit(ask, gateway)
    (job_id,) = wait_until(gateway.waiting)
    gateway.client.cancel(job_id)
    with pytest.raises(openai.ConflictError, match="canceled"):
        answer.result(10)


def test_sixty_four_concurrent_requests_each_get_their_own_response(make_gateway):
    gateway = make_gateway()
    with ThreadPoolExecutor(64) as pool:
        answers = {n: pool.submit(ask, gateway, f"{n}") for n in range(64)}
        for _ in range(64):
            job = gateway.take()
            job.write("x")
            job.finish(f"answer {job.spec['prompt']}")
        for n, answer in answers.items():
            assert answer.result(30).choices[0].text == f"answer {n}"


# --- queue positions


def waits(gateway: Gateway, number: int) -> bool:
    return len(gateway.waiting()) == number


def test_response_headers_have_job_and_queue_position(gateway, background):
    for n in range(2):
        background.submit(raw_ask, gateway, f"{n}")
        wait_until(partial(waits, gateway, n + 1))
    third = background.submit(raw_ask, gateway, "third")
    wait_until(lambda: len(gateway.waiting()) == 3)
    for n in range(3):
        gateway.take().finish(f"{n}")
    headers = third.result(10).headers
    assert headers["x-warmd-position"] == "3"
    assert headers["x-warmd-job"].startswith("infer-")


def test_waiting_stream_sends_its_queue_position_in_comments(gateway):
    ahead = iter(ask(gateway, stream=True))
    body = {"model": "tiny", "prompt": "2", "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=10) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith(":")).startswith(": position 2")
        gateway.take().finish("x")
        list(ahead)
        assert next(line for line in lines if line.startswith(":")).startswith(": position 1")
        gateway.take().finish("x")
        assert list(lines)[-2] == "data: [DONE]"


def test_full_queue_is_429_with_retry_after(gateway, background):
    for n in range(4):
        background.submit(raw_ask, gateway, f"{n}")
        wait_until(partial(waits, gateway, n + 1))
    with pytest.raises(openai.RateLimitError) as caught:
        ask(gateway)
    status, error = refusal(caught.value)
    assert (status, error["code"]) == (429, "queue_full")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for _ in range(4):
        gateway.take().finish("x")


# --- disconnects and retries


@contextlib.contextmanager
def connection(gateway: Gateway, body: str, **headers: str) -> Iterator[socket.socket]:
    """Send a request; leaving the context disconnects."""
    host, port = gateway.url.removeprefix("http://").split(":")
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection((host, int(port))) as line:
        line.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\ncontent-type: application/json\r\n"
            f"{named}content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        yield line


@pytest.mark.parametrize("stream", ["true", "false"])
def test_client_that_disconnects_cancels_its_running_job(gateway, stream):
    with connection(gateway, f'{{"model":"tiny","prompt":"1","stream":{stream}}}'):
        job = gateway.take()
        job.write("x")
    assert wait_until(lambda: job.stop_asked, timeout_s=5) == "cancel"
    job.fail("stopped")


def test_client_that_disconnects_cancels_its_waiting_job(gateway):
    with connection(gateway, '{"model":"tiny","prompt":"1"}'):
        (job_id,) = wait_until(gateway.waiting)
    wait_until(lambda: gateway.status(job_id) == "canceled", timeout_s=5)


def test_request_that_is_retried_after_a_timeout_is_computed_once(gateway, background):
    answer = background.submit(ask, gateway, settings={"timeout": 0.5, "max_retries": 2})
    job = gateway.take()
    begun = time.monotonic()
    # The first try has timed out by now, and the second one waits for the same job.
    wait_until(lambda: time.monotonic() - begun > 1.2)
    job.finish("once")
    assert answer.result(10).choices[0].text == "once"
    assert gateway.waiting() == []
    assert job.stop_asked is None


def test_request_that_is_not_retried_after_a_timeout_cancels_its_job(gateway):
    with pytest.raises(openai.APITimeoutError):
        ask(gateway, settings={"timeout": 0.3})
    job = gateway.take()
    assert wait_until(lambda: job.stop_asked, timeout_s=10) == "cancel"
    job.fail("stopped")


def test_same_key_joins_the_running_job_and_gets_its_result_later(gateway, background):
    first = background.submit(raw_ask, gateway, idempotency_key="k1")
    job = gateway.take()
    second = background.submit(raw_ask, gateway, idempotency_key="k1")
    job.write("on")
    job.finish("one")
    assert [r.result(10).json()["choices"][0]["text"] for r in (first, second)] == ["one", "one"]
    assert raw_ask(gateway, idempotency_key="k1").json()["choices"][0]["text"] == "one"
    assert gateway.waiting() == []


def test_concurrent_requests_with_one_key_make_one_job(gateway, background):
    answers = [background.submit(raw_ask, gateway, idempotency_key="k2") for _ in range(6)]
    gateway.take().finish("one")
    assert {answer.result(10).json()["id"] for answer in answers} == {
        answers[0].result().json()["id"]
    }
    assert gateway.waiting() == []


def test_same_key_with_another_request_is_refused(gateway, background):
    first = background.submit(raw_ask, gateway, idempotency_key="k3")
    gateway.take().finish("one")
    first.result(10)
    other = raw_ask(gateway, "another prompt", idempotency_key="k3")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert gateway.waiting() == []


def test_killed_gateway_loses_no_job_and_its_successor_knows_the_keys(gateway, background):
    lost = background.submit(raw_ask, gateway, idempotency_key="k4")
    job = gateway.take()
    gateway.kill()
    with pytest.raises(httpx.TransportError):
        lost.result(10)
    job.finish("kept")
    gateway.start()
    assert raw_ask(gateway, idempotency_key="k4").json()["choices"][0]["text"] == "kept"


def test_recorded_job_that_never_was_queued_is_queued_by_the_next_request(gateway, background):
    first = background.submit(raw_ask, gateway, idempotency_key="k5")
    (job_id,) = wait_until(gateway.waiting)
    gateway.kill()
    with contextlib.suppress(httpx.TransportError):
        first.result(10)
    # The state after a gateway died between recording and queueing the job.
    gateway.client.connection.delete(f"rq:job:{job_id}", gateway.client.store.queue("infer").key)
    gateway.start()
    again = background.submit(raw_ask, gateway, idempotency_key="k5")
    job = gateway.take()
    assert job.job.id == job_id
    job.finish("late")
    assert again.result(10).json()["choices"][0]["text"] == "late"


def test_stopping_gateway_responds_503_and_leaves_the_jobs(gateway, background):
    answer = background.submit(raw_ask, gateway)
    (job_id,) = wait_until(gateway.waiting)
    gateway.process.terminate()
    stopped = answer.result(10)
    assert (stopped.status_code, job_id in stopped.text) == (503, True)
    assert gateway.process.wait(10) in (0, -15)
    assert gateway.status(job_id) == "queued"


def test_unreachable_redis_is_503_with_retry_after(make_gateway):
    gateway = make_gateway()
    gateway.server.stop()
    with pytest.raises(openai.APIStatusError) as caught:
        ask(gateway)
    assert refusal(caught.value)[0] == 503
    assert caught.value.response.headers["retry-after"]
    gateway.server.start()


def test_follow_survives_a_restart_of_redis(make_gateway, background):
    gateway = make_gateway()
    answer = background.submit(ask, gateway)
    job = gateway.take()
    gateway.server.stop()
    gateway.server.start()
    job.finish("after all")
    assert answer.result(15).choices[0].text == "after all"


def test_event_reader_that_lost_its_connection_follows_new_requests_at_once(
    make_gateway, background
):
    gateway = make_gateway()
    first = background.submit(ask, gateway)
    gateway.take().finish("before")
    assert first.result(10).choices[0].text == "before"
    # All waiting connections, the event reader's included.
    gateway.client.connection.client_kill_filter(_type="normal", skipme=True)
    with gateway.openai().completions.create(model="tiny", prompt="1", stream=True) as stream:
        job = gateway.take()
        begun = time.monotonic()
        job.write("at once")
        assert next(iter(stream)).choices[0].text == "at once"
        assert time.monotonic() - begun < 2
        job.finish("at once")


def test_many_clients_that_disconnect_at_once_leave_nothing(make_gateway, capfd):
    gateway = make_gateway()
    for _ in range(40):
        with connection(gateway, '{"model":"tiny","prompt":"1"}'):
            pass

    def has_seen_all_go() -> bool:
        # A client that disconnects before its request is read has no job.
        name = 'warmd_http_requests_total{route="/v1/completions",status="499"}'
        return metrics(gateway).get(name) == 40

    wait_until(has_seen_all_go)
    wait_until(lambda: gateway.waiting() == [])
    gateway.kill()
    assert "Traceback" not in capfd.readouterr().err


# --- refused requests


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
TUNING = {"model": "tiny", "training_file": "arithmetic"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {**CHAT, "tools": [{}]}, "tools: not supported"),
        ("chat/completions", {**CHAT, "functions": [{}]}, "functions: not supported"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice: not supported"),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs: must go with logprobs"),
        (
            "chat/completions",
            {**CHAT, "logprobs": True, "top_logprobs": 21},
            "top_logprobs: must be less than or equal to 20, got 21",
        ),
        ("chat/completions", {**CHAT, "reasoning_effort": "low"}, "reasoning_effort: not supp"),
        ("chat/completions", {**CHAT, "verbosity": "low"}, "verbosity: not supported"),
        ("chat/completions", {**CHAT, "modalities": ["audio"]}, "modalities: not supported"),
        ("chat/completions", {**CHAT, "service_tier": "priority"}, "service_tier: not supported"),
        (
            "chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "?", "name": "Ada"}]},
            "messages.0.name: not supported",
        ),
        ("chat/completions", {**CHAT, "topp": 1}, "topp: unknown or not supported"),
        (
            "completions",
            {**PROMPT, "logprobs": 6},
            "logprobs: must be less than or equal to 5, got 6",
        ),
        ("completions", {**PROMPT, "best_of": 2}, "best_of: not supported"),
        ("completions", {**PROMPT, "max_tokens": 0}, "max_tokens: must be at least 1 without echo"),
        ("completions", {**PROMPT, "prompt": []}, "prompt: must have at least 1 item"),
        ("completions", {**PROMPT, "prompt": ["1", 2]}, "prompt.1: must be a valid string, got 2"),
        ("completions", {**PROMPT, "prompt": [1, -2]}, "prompt.1: must be greater than or equal"),
        ("completions", {**PROMPT, "top_p": "1"}, "top_p: must be a valid number, got '1'"),
        ("completions", {"model": "tiny"}, "prompt: must be given"),
        ("embeddings", {"model": "tiny", "input": "1", "dimensions": 8}, "dimensions: not supp"),
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
    ],
)
def test_unsupported_field_is_refused_in_openais_words(gateway, path, body, message):
    answer = httpx.post(f"{gateway.url}/v1/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert gateway.waiting() == []


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
        ({**CHECK, "operation": "is"}, "operation of the grader must be one of eq, ne"),
        ({**CHECK, "type": "text_similarity", "evaluation_metric": "cosine"}, "the grader"),
        (
            {"type": "python", "name": "p", "source": "def grade(sample, item): return 1"},
            "source of the grader must be module:function of this machine",
        ),
        (
            {"type": "python", "name": "p", "source": "os:getcwd"},
            "a python grader must be one of none (setting http_graders), got 'os:getcwd'",
        ),
        (
            {
                **{"type": "multi", "name": "m", "calculate_output": "a"},
                "graders": {"a": {"type": "python", "name": "p", "source": "os:getcwd"}},
            },
            "a python grader must be one of none",
        ),
        ({"type": "warmd", "reward": ["grader"]}, "must be one of correctness, "),
        ({"type": "warmd", "reward": ["os:getcwd"]}, "must be one of correctness, "),
    ],
)
def test_a_grader_that_cannot_be_had_is_refused_by_name(gateway, grader, message):
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
        gateway.client.cancel(job.id)
        spec = gateway.client.rundir(job.id).read_spec()["spec"]
        assert (spec["samples"], spec["reward"]) == (3, ["grader"])
        assert orjson.loads(spec["grader"]) == grader
    broken: Any = {**method, "reinforcement": {"grader": {**CHECK, "reference": "{{item.x}}"}}}
    with pytest.raises(openai.BadRequestError, match=r"item.x must be a column") as caught:
        client.fine_tuning.jobs.create(model="tiny", training_file=train, method=broken)
    assert caught.value.param == "method.reinforcement.grader"


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
        "reasoning_effort": "none",
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


def image_url(width: int, height: int) -> str:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/cat.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:image/png;base64,!!!",
        "data:image/png;base64,aGVsbG8=",
        "data:text/plain;base64,aGVsbG8=",
    ],
)
def test_url_that_is_not_an_image_is_refused(gateway, url):
    with pytest.raises(openai.BadRequestError) as caught:
        chat_with_image(gateway, url)
    assert refusal(caught.value)[1]["param"] == "messages"


def test_image_with_too_many_pixels_is_refused(gateway):
    url = image_url(20_000, 20_000)
    assert len(url) < 200_000
    with pytest.raises(openai.BadRequestError, match="at most 50,000,000 pixels"):
        chat_with_image(gateway, url)


def chat_with_image(gateway: Gateway, url: str) -> Any:
    part: Any = {"type": "image_url", "image_url": {"url": url}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]
    return gateway.openai().chat.completions.create(model="tiny", messages=messages)


def test_file_urls_work_only_below_the_configured_folder(make_gateway, background):
    with tempfile.TemporaryDirectory(prefix="warmd-") as name:
        folder = Path(name).resolve() / "shown"
        (folder / "deep").mkdir(parents=True)
        for place in (folder / "deep" / "a.png", folder.parent / "b.png"):
            place.write_bytes(base64.b64decode(image_url(4, 3).partition(",")[2]))
        (folder / "c.png").symlink_to(folder.parent / "b.png")
        (folder / "d.png").write_text("no image")
        (folder / "e.png").hardlink_to(folder.parent / "b.png")
        (folder / "way").symlink_to(folder / "deep")
        os.mkfifo(folder / "f.png")
        gateway = make_gateway(http_files=folder)
        links = ("../b.png", "deep/../deep/a.png", "c.png", "e.png", "way/a.png")
        for path in (*links, "d.png", "f.png", "deep", "none.png", "", "..", "/etc/passwd"):
            with pytest.raises(openai.BadRequestError):
                chat_with_image(gateway, f"file://{folder}/{path}")
        url = f"file://{folder}/deep/a.png"
        answer = background.submit(chat_with_image, gateway, url)
        job = gateway.take()
        (message,) = openai_messages(job.spec["messages"])
        # A copy: replacing the file before the job reads it has no effect.
        copy = Path(message["content"][1]["image_url"]["url"].removeprefix("file://"))
        assert copy.read_bytes() == (folder / "deep" / "a.png").read_bytes()
        job.finish("so")
        answer.result(10)


@pytest.mark.parametrize("stream", [False, True])
def test_requested_actions_are_part_of_the_choice(gateway, background, stream):
    found = {"thought": None, "screen": [800, 600], "actions": [{"type": "wait"}], "errors": []}

    def ask() -> Any:
        answer = gateway.openai().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "?"}],
            stream=stream,
            extra_body={"actions": "ui-tars", "screen": "800x600"},
        )
        return list(answer)[-1] if stream else answer

    answer = background.submit(ask)
    job = gateway.take()
    assert (job.spec["actions"], job.spec["screen"]) == ("ui-tars", "800x600")
    text = "Action: wait()"
    choice = {"index": 0, "text": text, "finish_reason": "stop", "actions": found}
    job.finish(text, choices=[choice])
    assert answer.result(10).choices[0].actions == found


def test_request_with_too_large_content_length_is_refused_at_once(gateway):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: 99999999999\r\n\r\n"
    )
    with socket.create_connection(tuple_address(gateway)) as line:
        line.sendall(head)
        assert line.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("is_announced", [True, False])
def test_client_that_sends_too_much_receives_the_413(gateway, is_announced):
    parts = [b'{"model": "tiny", "prompt": "', *[b"x" * 2**20] * 70]
    content = b"".join(parts) if is_announced else iter(parts)
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{gateway.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-stainless-retry-count": "9" * 5000},
        {"x-stainless-read-timeout": "nan"},
        {"idempotency-key": ""},
    ],
)
def test_nonsense_header_does_not_make_the_gateway_fail(gateway, headers):
    answer = httpx.post(f"{gateway.url}/v1/completions", json={}, headers=headers)
    assert answer.status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "limit_s"),
    [
        (b"", HEAD_S),
        (b"POST /v1/completions HTTP/1.1\r\nHost: loc", HEAD_S),
        # After a response, uvicorn's shorter limit applies.
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v1", 5),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
            SILENCE_S,
        ),
    ],
)
def test_client_that_stops_in_the_middle_of_a_request_is_disconnected(gateway, said, limit_s):
    with socket.create_connection(tuple_address(gateway), timeout=limit_s + 5) as line:
        line.sendall(said)
        begun = time.monotonic()
        heard = b""
        while got := line.recv(4096):
            heard += got
        assert time.monotonic() - begun == pytest.approx(limit_s, abs=2)
    assert (b"HTTP/1.1 408" in heard) == (limit_s == SILENCE_S)


def tuple_address(gateway: Gateway) -> tuple[str, int]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return host, int(port)


# --- authorization


def test_token_is_required_if_set(make_gateway):
    gateway = make_gateway(http_token=TOKEN)
    for key in ("wrong", f"{TOKEN}x"):
        with pytest.raises(openai.AuthenticationError) as caught:
            gateway.openai(api_key=key).models.list()
        assert refusal(caught.value)[1]["code"] == "invalid_api_key"
    assert gateway.openai(api_key=TOKEN).models.list().data[0].id == "tiny"
    assert httpx.get(f"{gateway.url}/metrics").status_code == 401
    assert httpx.get(f"{gateway.url}/health").status_code == 503


def test_gateway_listens_on_other_addresses_only_with_a_token(make_gateway):
    assert "http_token: must be set" in make_gateway(http_host="0.0.0.0").said["problem"]
    assert make_gateway(http_host="0.0.0.0", http_token=TOKEN).said["url"]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example@127.0.0.1"},
        {"host": "127.0.0.1:1@evil.example"},
        {"origin": "http://evil.example@127.0.0.1"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
    ],
)
def test_web_page_cannot_send_requests_without_token(gateway, headers):
    assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 403


# --- operation


def test_health_has_the_reason_when_no_worker_is_ready(gateway):
    answer = httpx.get(f"{gateway.url}/health")
    assert answer.status_code == 503
    assert "no daemon runs" in answer.json()["error"]["message"]


def test_metrics_count_requests_tokens_and_jobs(gateway, background):
    before = metrics(gateway)
    answer = background.submit(ask, gateway)
    gateway.take().finish("x")
    answer.result(10)
    after = metrics(gateway)
    route = 'warmd_http_requests_total{route="/v1/completions",status="200"}'
    finished = 'warmd_jobs{queue="infer",status="finished"}'
    tokens = 'warmd_http_tokens_total{type="completion"}'
    grown = {name: after[name] - before.get(name, 0) for name in (route, finished, tokens)}
    assert grown == {route: 1, finished: 1, tokens: 2}


def metrics(gateway: Gateway) -> dict[str, float]:
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_models_are_the_warm_ones(gateway):
    assert [model.id for model in gateway.openai().models.list()] == ["tiny"]
    assert gateway.openai().models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        gateway.openai().models.retrieve("nope")
    assert refusal(caught.value)[1]["code"] == "model_not_found"


def test_waiting_requests_do_not_hold_a_thread_each(gateway, background):
    import psutil

    process = psutil.Process(gateway.process.pid)
    answers = [background.submit(ask, gateway, f"{n}") for n in range(4)]
    wait_until(lambda: len(gateway.waiting()) == 4)
    threads = process.num_threads()
    assert threads <= 20  # the pool and the loop
    for _ in range(4):
        gateway.take().finish("x")
    for answer in answers:
        answer.result(10)
    assert threading.active_count() < 20
