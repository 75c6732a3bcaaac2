"""Responses over HTTP: text, chats, streams, and jobs that fail or restart."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
from gateway_requests import openai_messages, refusal, request
from waiting import wait_until

USER = {"role": "user", "content": "?"}


def test_completion_has_the_text_of_its_job(gateway, background):
    answer = background.submit(request, gateway, "one", max_tokens=7, stop=["x"], temperature=0.5)
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
    answers = [background.submit(request, gateway) for _ in range(2)]
    jobs = [gateway.take() for _ in range(2)]
    assert jobs[0].spec["seed"] != jobs[1].spec["seed"]
    for job in jobs:
        job.finish("x")
    for answer in answers:
        answer.result(10)


def test_stream_continues_where_it_was_when_its_worker_is_killed(gateway):
    stream = iter(request(gateway, stream=True))
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
    stream = iter(request(gateway, stream=True))
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
    answer = background.submit(request, gateway)
    job = gateway.take()
    job.write("lost")
    job.die().finish("found")
    assert answer.result(10).choices[0].text == "found"


def test_failed_job_is_an_error_that_the_client_does_not_retry(gateway, background):
    answer = background.submit(request, gateway, settings={"max_retries": 3})
    gateway.take().fail("RuntimeError: out of ideas", "Traceback: …")
    with pytest.raises(openai.InternalServerError, match="out of ideas") as caught:
        answer.result(10)
    assert refusal(caught.value)[0] == 500
    assert gateway.waiting() == []


def test_option_that_only_the_worker_can_check_is_a_client_error(gateway, background):
    answer = background.submit(request, gateway)
    gateway.take().fail("prompt: must be at most 64 tokens, got 65")
    with pytest.raises(openai.BadRequestError) as caught:
        answer.result(10)
    assert refusal(caught.value)[1]["param"] == "prompt"


def test_failure_after_the_first_byte_is_sent_in_the_stream(gateway):
    stream = iter(request(gateway, stream=True))
    job = gateway.take()
    job.write("so f")
    next(stream)
    job.fail("ZeroDivisionError: division by zero", "Traceback: …")
    with pytest.raises(openai.APIError, match="division by zero"):
        next(stream)


def test_canceled_job_is_an_error(gateway, background):
    answer = background.submit(request, gateway)
    (job_id,) = wait_until(gateway.waiting)
    gateway.client.jobs.cancel(job_id)
    with pytest.raises(openai.ConflictError, match="canceled"):
        answer.result(10)


@pytest.mark.slow
def test_sixty_four_concurrent_requests_each_get_their_own_response(make_gateway):
    gateway = make_gateway()
    with ThreadPoolExecutor(64) as pool:
        answers = {n: pool.submit(request, gateway, f"{n}") for n in range(64)}
        for _ in range(64):
            job = gateway.take()
            job.write("x")
            job.finish(f"answer {job.spec['prompt']}")
        for n, answer in answers.items():
            assert answer.result(30).choices[0].text == f"answer {n}"


@pytest.mark.parametrize("stream", [False, True])
def test_requested_actions_are_part_of_the_choice(gateway, background, stream):
    found = {"thought": None, "screen": [800, 600], "actions": [{"type": "wait"}], "errors": []}

    def request() -> Any:
        answer = gateway.openai().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "?"}],
            stream=stream,
            extra_body={"actions": "ui-tars", "screen": "800x600"},
        )
        return list(answer)[-1] if stream else answer

    answer = background.submit(request)
    job = gateway.take()
    assert (job.spec["actions"], job.spec["screen"]) == ("ui-tars", "800x600")
    text = "Action: wait()"
    choice = {"index": 0, "text": text, "finish_reason": "stop", "actions": found}
    job.finish(text, choices=[choice])
    assert answer.result(10).choices[0].actions == found


def test_waiting_requests_do_not_hold_a_thread_each(gateway, background):
    import psutil

    process = psutil.Process(gateway.process.pid)
    answers = [background.submit(request, gateway, f"{n}") for n in range(4)]
    wait_until(lambda: len(gateway.waiting()) == 4)
    threads = process.num_threads()
    assert threads <= 20  # the pool and the loop
    for _ in range(4):
        gateway.take().finish("x")
    for answer in answers:
        answer.result(10)
    assert threading.active_count() < 20


IDS = {"extra_body": {"return_token_ids": True}}


def with_ids(job: Any) -> None:
    """Write a completion of three tokens, in two events."""
    assert job.spec["token_ids"] is True
    job.emit("text", index=0, text="a", tokens=1, token_ids=[5], prompt_token_ids=[1, 2])
    job.emit("text", index=0, text="bc", tokens=2, token_ids=[6, 7])
    choice = {"index": 0, "text": "abc", "finish_reason": "stop", "token_ids": [5, 6, 7]}
    job.finish(choices=[choice], prompt_token_ids=[[1, 2]])


def test_token_ids_are_named_as_by_vllm(gateway, background):
    chat, complete = (
        partial(gateway.openai().chat.completions.create, messages=[USER]),
        partial(gateway.openai().completions.create, prompt="?"),
    )
    answer = background.submit(chat, model="tiny", **IDS)
    with_ids(gateway.take())
    found = answer.result(10)
    assert (found.prompt_token_ids, found.choices[0].token_ids) == ([1, 2], [5, 6, 7])
    answer = background.submit(complete, model="tiny", **IDS)
    with_ids(gateway.take())
    (choice,) = answer.result(10).choices
    assert (choice.prompt_token_ids, choice.token_ids) == ([1, 2], [5, 6, 7])

    def read(create: Any) -> tuple[list[Any], list[Any]]:
        chunks = list(create(model="tiny", stream=True, **IDS))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        prompts = [getattr(one, "prompt_token_ids", None) for one in (*chunks, *choices)]
        ids = [getattr(choice, "token_ids", None) for choice in choices]
        return [one for one in prompts if one], [one for one in ids if one]

    for create in (chat, complete):
        answer = background.submit(read, create)
        job = gateway.take()
        job.emit("text", index=0, text="a", tokens=1, token_ids=[5], prompt_token_ids=[1, 2])
        with_ids(job.die())
        assert answer.result(10) == ([[1, 2]], [[5], [6, 7]])


def test_expressions_and_choices_reach_the_job_as_an_expression(gateway, background):
    for create, more in (
        (gateway.openai().chat.completions.create, {"messages": [USER]}),
        (gateway.openai().completions.create, {"prompt": "a"}),
    ):
        for form, regex in (({"regex": "a+"}, "a+"), ({"choice": ["yes.", "no"]}, r"yes\.|no")):
            body = {"structured_outputs": form}
            answer = background.submit(create, model="tiny", extra_body=body, **more)
            job = gateway.take()
            job.finish("")
            answer.result(10)
            assert job.spec["regex"] == regex
        refused: list[tuple[dict[str, Any], str]] = [
            ({"regex": "(a"}, "structured_outputs: unsupported expression"),
            ({"regex": "a", "choice": ["a"]}, "structured_outputs: must be a regex or a choice"),
            ({}, "structured_outputs: must be a regex or a choice, got neither"),
            ({"grammar": "start: a"}, "structured_outputs.grammar: unknown or not supported"),
        ]
        for form, problem in refused:
            with pytest.raises(openai.BadRequestError, match=problem):
                create(model="tiny", extra_body={"structured_outputs": form}, **more)


def test_biases_and_min_p_reach_the_job(gateway, background):
    given = {"logit_bias": {"5": -100, "7": 2.5}, "extra_body": {"min_p": 0.1}}
    chat = gateway.openai().chat.completions.create
    answer = background.submit(chat, model="tiny", messages=[USER], **given)
    job = gateway.take()
    job.finish("")
    answer.result(10)
    assert (job.spec["logit_bias"], job.spec["min_p"]) == ('{"5":-100.0,"7":2.5}', 0.1)
    for bias, problem in (({"a": 1}, "must have token ids as keys"), ({"1": 101}, "must be")):
        with pytest.raises(openai.BadRequestError, match=problem) as refused:
            chat(model="tiny", messages=[USER], logit_bias=bias)
        assert refusal(refused.value)[1]["param"].startswith("logit_bias")
