"""Requests with the key of an agent: who gets in, what reaches the job, and what comes back."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2 as httpx
import openai
import pytest
from breadth import mostly_slow
from gateways import Gateway
from waiting import wait_until

from warmd.jobs.environments.agent_keys import Keys
from warmd.jobs.environments.endpoint import AgentRequest, Endpoint

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
RESULT = {
    "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    "timings": {},
}


class Job:
    """A job with an agent, whose part the test plays."""

    def __init__(self, gateway: Gateway, stack: ExitStack) -> None:
        self.gateway = gateway
        self._endpoint = stack.enter_context(Endpoint(gateway.home.sockets, "grpo-1", 0))
        self.key = self._endpoint.new_key()
        self.requests: list[AgentRequest] = []
        self.answer: Callable[[AgentRequest], None] | None = lambda one: one.answer(RESULT)
        self._is_over = threading.Event()
        thread = threading.Thread(target=self._work)
        stack.callback(thread.join)
        stack.callback(self._is_over.set)
        thread.start()

    def client(self, **settings: Any) -> openai.OpenAI:
        return self.gateway.openai(**{"api_key": self.key, **settings})

    def ask(self, client: openai.OpenAI | None = None, **more: Any) -> Any:
        made = client or self.client()
        return made.chat.completions.create(model="any", messages=HELLO, **more)

    def _work(self) -> None:
        while not self._is_over.wait(0.01):
            for one in self._endpoint.take():
                self.requests.append(one)
                if self.answer is not None:
                    self.answer(one)


@contextmanager
def job_of(gateway: Gateway) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(gateway, stack)


@pytest.fixture
def job(gateway: Gateway) -> Iterator[Job]:
    with job_of(gateway) as made:
        yield made


def test_a_request_goes_to_the_job_and_not_into_the_queue(job):
    answer = job.ask(max_tokens=7, stop=["x"])
    assert answer.choices[0].message.content == "hi"
    assert answer.usage.completion_tokens == 2
    (asked,) = job.requests
    assert asked.key == job.key
    assert (asked.options["max_tokens"], asked.options["stop"]) == (7, ["x"])
    assert not asked.is_retry
    assert job.gateway.waiting() == []


@pytest.mark.slow
def test_defaults_of_the_daemon_are_not_those_of_a_job(make_gateway):
    gateway = make_gateway(defaults={"infer": {"max_tokens": 3, "temperature": 0.5}})
    with job_of(gateway) as job:
        job.ask()
        (asked,) = job.requests
        assert not {"max_tokens", "temperature"} & asked.options.keys()


def test_calls_and_reasoning_come_back_as_of_other_models(job):
    calls = [{"id": "call_1", "name": "add", "arguments": '{"a":1}'}]
    choice = {"index": 0, "text": "", "finish_reason": "tool_calls", "calls": calls}
    result = {**RESULT, "choices": [{**choice, "reasoning": "hm"}]}
    job.answer = lambda one: one.answer(result)
    message = job.ask().choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.arguments == '{"a":1}'
    assert message.reasoning_content == "hm"
    chunks = list(job.ask(stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert any(delta.tool_calls for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_key_opens_what_agents_need_whatever_tokens_are_set(locked):
    with job_of(locked) as job:
        assert job.ask().choices[0].message.content == "hi"
        for request in (lambda: job.client().models.list(), lambda: job.client().files.list()):
            with pytest.raises(openai.PermissionDeniedError, match="key of an agent opens"):
                request()


@pytest.mark.slow
@pytest.mark.parametrize("is_locked", [False, True])
def test_a_wrong_key_lets_nobody_in(request, is_locked):
    gateway = request.getfixturevalue("locked" if is_locked else "gateway")
    with job_of(gateway) as job:
        for key in (f"{job.key[:-1]}x", "warmd-agent-", f"{job.key}0", job.key.replace("-", "_")):
            if not is_locked and not key.startswith("warmd-agent-"):
                continue  # no key at all: everybody may ask then
            with pytest.raises(openai.AuthenticationError):
                job.ask(job.client(api_key=key))
        key = job.key
    with pytest.raises(openai.AuthenticationError):  # the job has ended
        gateway.openai(api_key=key).chat.completions.create(model="any", messages=HELLO)
    assert job.requests == []


def test_what_the_job_refuses_is_the_answer(job):
    job.answer = lambda one: one.refuse(410, "it has ended", code="episode_ended")
    with pytest.raises(openai.APIStatusError) as error:
        job.ask(job.client(max_retries=2))
    assert (error.value.status_code, error.value.code) == (410, "episode_ended")
    assert len(job.requests) == 1
    job.answer = lambda one: one.refuse(400, "must be unset", option="json_schema")
    with pytest.raises(openai.BadRequestError, match="response_format: must be unset") as error:
        job.ask(response_format={"type": "json_object"})
    assert error.value.param == "response_format"


def test_a_job_that_ends_meanwhile_has_ended(gateway):
    keys = Keys(gateway.home.sockets, "grpo-2", 0)
    keys.publish()
    client = gateway.openai(api_key=keys.new())
    with pytest.raises(openai.APIStatusError, match="the job of this key has ended") as error:
        client.chat.completions.create(model="any", messages=HELLO)
    assert error.value.status_code == 410
    keys.revoke()


@pytest.mark.parametrize("stream", mostly_slow([False, True], but=[False]))
def test_a_client_that_leaves_is_noticed_by_the_job(job, stream):
    async def leave() -> None:
        async with openai.AsyncOpenAI(**settings) as client:
            asked = asyncio.create_task(
                client.chat.completions.create(model="any", messages=HELLO, stream=stream)
            )
            while not job.requests:
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.wait([asked])

    job.answer = None
    settings: Any = {"base_url": f"{job.gateway.url}/v1", "api_key": job.key, "max_retries": 0}
    asyncio.run(leave())
    wait_until(lambda: job.requests[0].is_lost)


def test_half_of_a_surrogate_pair_is_shown_as_another_character(job):
    choice = {"index": 0, "text": "a\ud800", "finish_reason": "stop"}
    job.answer = lambda one: one.answer({**RESULT, "choices": [choice]})
    assert job.ask().choices[0].message.content == "a?"


def test_a_retry_says_so_and_has_the_fingerprint_of_the_first_one(job):
    job.answer = None
    with pytest.raises(openai.APITimeoutError):
        job.ask(job.client(timeout=2, max_retries=1))  # a busy gateway needs a part of it
    first, second = job.requests
    assert (first.is_retry, second.is_retry) == (False, True)
    assert first.fingerprint == second.fingerprint
    wait_until(lambda: first.is_lost and second.is_lost)


def test_a_reply_that_was_read_is_not_lost(job):
    job.ask()
    assert not job.requests[0].is_lost


def test_what_is_no_request_disturbs_nobody(job, caplog):
    (path,) = job.gateway.home.sockets.glob("a-*.sock")
    for sent in (b"", b"{}\n", b"nonsense\n", b"[1]\n"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    assert job.ask().choices[0].message.content == "hi"
    assert caplog.records == []


def test_a_large_body_needs_a_key_that_is_valid(locked):
    with job_of(locked) as job:
        body = {"model": "any", "messages": [{"role": "user", "content": "x" * 10_000}]}
        codes = []
        for key in (job.key, f"{job.key[:-1]}x"):
            headers = {"authorization": f"Bearer {key}"}
            url = f"{locked.url}/v1/chat/completions"
            codes.append(httpx.post(url, json=body, headers=headers).status_code)
        assert codes == [200, 401]
