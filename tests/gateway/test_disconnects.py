"""Disconnects, retries and restarts: their effect on the job of a request."""

from __future__ import annotations

import contextlib
import time

import httpx2 as httpx
import openai
import pytest
from gateway_requests import connection, metrics, raw_ask, refusal, request
from waiting import wait_until

from warmd.daemon.queue import keys


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


@pytest.mark.slow
def test_request_that_is_retried_after_a_timeout_is_computed_once(gateway, background):
    answer = background.submit(request, gateway, settings={"timeout": 0.5, "max_retries": 2})
    job = gateway.take()
    begun = time.monotonic()
    # The first try has timed out by now, and the second one waits for the same job.
    wait_until(lambda: time.monotonic() - begun > 1.2)
    job.finish("once")
    assert answer.result(10).choices[0].text == "once"
    assert gateway.waiting() == []
    assert job.stop_asked is None


@pytest.mark.slow
def test_request_that_is_not_retried_after_a_timeout_cancels_its_job(gateway):
    with pytest.raises(openai.APITimeoutError):
        request(gateway, settings={"timeout": 0.3})
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


def test_a_result_that_is_gone_is_not_found_and_no_place_is_named(gateway, background):
    first = background.submit(raw_ask, gateway, idempotency_key="k6")
    job = gateway.take()
    job.finish("one")
    first.result(10)
    for name in ("result.json", "events.jsonl"):
        (job.rundir.path / name).unlink()
    gateway.client.connection.delete(keys.events(job.job.id))
    gone = raw_ask(gateway, idempotency_key="k6")
    message = f"{job.job.id} has finished, but its result was removed or is on another machine"
    assert (gone.status_code, gone.json()["error"]["message"]) == (404, message)


@pytest.mark.slow
def test_killed_gateway_loses_no_job_and_its_successor_knows_the_keys(gateway, background):
    lost = background.submit(raw_ask, gateway, idempotency_key="k4")
    job = gateway.take()
    gateway.kill()
    with pytest.raises(httpx.TransportError):
        lost.result(10)
    job.finish("kept")
    gateway.start()
    assert raw_ask(gateway, idempotency_key="k4").json()["choices"][0]["text"] == "kept"


@pytest.mark.slow
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


@pytest.mark.slow
def test_unreachable_redis_is_503_with_retry_after(make_gateway):
    gateway = make_gateway()
    gateway.server.stop()
    with pytest.raises(openai.APIStatusError) as caught:
        request(gateway)
    assert refusal(caught.value)[0] == 503
    assert caught.value.response.headers["retry-after"]
    gateway.server.start()


@pytest.mark.nightly(part="clients", catches="an answer that is lost when Redis is restarted")
def test_follow_survives_a_restart_of_redis(make_gateway, background):
    gateway = make_gateway()
    answer = background.submit(request, gateway)
    job = gateway.take()
    gateway.server.stop()
    gateway.server.start()
    job.finish("after all")
    assert answer.result(15).choices[0].text == "after all"


@pytest.mark.slow
def test_event_reader_that_lost_its_connection_follows_new_requests_at_once(
    make_gateway, background
):
    gateway = make_gateway()
    first = background.submit(request, gateway)
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


@pytest.mark.nightly(part="clients", catches="jobs or errors that a crowd of clients leaves behind")
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
