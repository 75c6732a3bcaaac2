"""States of an execution: allowed transitions, and an end that is final."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from workplaces import NAME, Workplace, workplace

from warmd.configs.config import ModelConfig
from warmd.daemon.host.channel import Channel
from warmd.daemon.host.messages import Downloaded, Failure, JobOutcome, LocalModel, RunJob
from warmd.daemon.queue import keys
from warmd.daemon.queue.stream import StreamWriter
from warmd.daemon.work.attempt import Attempt, State
from warmd.daemon.work.horse import Horse


@pytest.fixture
def place() -> Iterator[Workplace]:
    with workplace() as made:
        yield made


@pytest.fixture
def attempt(place: Workplace) -> Attempt:
    """An execution that has just begun."""
    job_id = place.submit()
    place.connection.lmove(place.store.queue("infer").key, keys.taken(NAME), "LEFT", "RIGHT")
    begun = place.store.begin(job_id.encode(), "infer", NAME)
    assert begun is not None
    return Attempt(place.store, *begun, StreamWriter(place.connection))


def request(attempt: Attempt, folder: str | None) -> RunJob:
    """What a horse is sent; `folder`: of the model, None while it is downloaded."""
    model = LocalModel(ModelConfig(name="far", path="far/away"), folder)
    return RunJob(
        *(attempt.job.id, NAME, "", 1),
        slots=1,
        threads=1,
        niceness=0,
        enqueued_at=None,
        model=model,
    )


def test_a_job_gets_a_horse_when_its_model_is_here_and_another_if_that_one_never_starts(attempt):
    attempt.prepare(request(attempt, None))
    states = [attempt.state]
    attempt.handle(Downloaded("/models/far"))
    states.append(attempt.state)
    own, of_the_horse = socket.socketpair()
    with closing(Channel(own)) as channel, of_the_horse:
        attempt.give(Horse(channel, attempt.request))
        states.append(attempt.state)
        attempt.detach()
    assert [*states, attempt.state] == [
        State.PREPARING,
        State.READY,
        State.RUNNING,
        State.READY,
    ]
    assert attempt.horse is None


def test_a_job_that_was_stopped_during_a_download_stays_stopped_when_that_fails(place, attempt):
    attempt.prepare(request(attempt, None))
    attempt.stop("cancel")
    assert attempt.state is State.ENDED
    attempt.handle(Failure("far/away: no such model"))
    attempt.handle(Downloaded("/models/far"))
    attempt.settle()
    assert place.status(attempt.job.id) == "stopped"


def test_an_end_is_final(attempt):
    attempt.prepare(request(attempt, "/models/far"))
    attempt.fail("one")
    end = attempt.settle
    attempt.handle(JobOutcome(attempt.job.id, "finished"))
    attempt.release()
    attempt.stop("cancel")
    attempt.end_ranks("two")
    assert attempt.settle is end
    with pytest.raises(AssertionError, match=r"ENDED to .*ENDED"):
        attempt.fail("three")
