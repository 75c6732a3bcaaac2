"""All engines of a process share one compute thread."""

from __future__ import annotations

import errno
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from warmd.jobs.compute.threads import compute_with, without_helpers
from warmd.jobs.context import WarmModel
from warmd.jobs.engine import engine as engines
from warmd.jobs.engine.compute_thread import ComputeThread
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.request import End, Request, Sampling
from warmd.jobs.errors import JobFailed

GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def compute_thread(monkeypatch: pytest.MonkeyPatch) -> ComputeThread:
    """A ComputeThread that nothing else in this process uses."""
    compute_thread = ComputeThread()
    monkeypatch.setattr(engines, "COMPUTE_THREAD", compute_thread)
    return compute_thread


def start() -> Engine:
    model = tiny.model().requires_grad_(False).eval()
    model.generation_config.eos_token_id = None
    return Engine(WarmModel(name="m", path=Path("m"), model=model, tokenizer=tiny.tokenizer()))


def submit_request(engine: Engine, tokens: int, **how: Any) -> Request:
    request = Request(ids=[4, 5, 6], sampling=GREEDY, max_tokens=tokens, **how)
    engine.submit(request)
    return request


def whole(request: Request) -> int:
    """The number of tokens of a request. Raises the error that ended it."""
    tokens = 0
    while not isinstance(piece := request.pieces.get(timeout=60), End):
        tokens += len(piece.ids)
    if piece.error is not None:
        raise piece.error
    return tokens


def test_engines_share_a_thread_that_ends_with_the_last_of_them():
    before = set(threading.enumerate())
    first, second = start(), start()
    enough = threading.Event()
    endless = submit_request(first, 10_000, is_canceled=enough.is_set)
    endless.pieces.get(timeout=60)
    assert whole(submit_request(second, 5)) == 5
    assert not first.is_idle
    (serving,) = {thread for thread in threading.enumerate() if thread.name == "engines"} - before
    enough.set()
    first.close()  # waits for what was asked for
    assert endless.pieces.qsize() > 1
    assert whole(endless) > 0
    assert serving.is_alive()
    second.close()
    assert not serving.is_alive()
    again = start()
    assert whole(submit_request(again, 5)) == 5
    again.close()


def test_a_failed_preparation_is_reported_and_retried(monkeypatch):
    class Broken(Decoder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise MemoryError("no room for it")

    engine = start()
    monkeypatch.setattr(engines, "Decoder", Broken)
    with pytest.raises(RuntimeError, match="MemoryError: no room for it"):
        whole(submit_request(engine, 5))
    monkeypatch.setattr(engines, "Decoder", Decoder)
    assert whole(submit_request(engine, 5)) == 5
    engine.close()


def test_a_thread_that_cannot_start_fails_only_the_current_request(monkeypatch):
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            start()
    engine = start()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            submit_request(engine, 5)
    assert whole(submit_request(engine, 5)) == 5
    engine.close()


def test_an_engine_may_be_closed_by_several_threads():
    engine = start()
    requested = submit_request(engine, 50)
    with ThreadPoolExecutor(3) as pool:
        for closed in [pool.submit(engine.close) for _ in range(3)]:
            closed.result(timeout=60)
    engine.close()
    assert whole(requested) == 50


def test_a_closed_engine_frees_its_memory_at_once_while_another_stays_open():
    first, second = start(), start()
    assert whole(submit_request(second, 5)) == whole(submit_request(first, 5)) == 5
    runner = weakref.ref(first._runner)
    first.close()
    del first
    assert runner() is None
    second.close()


class PanicError(BaseException):
    """Not an Exception, like the panics of libraries in Rust."""


@pytest.mark.parametrize(
    "error", [PanicError("a panic"), OSError(errno.EACCES, "no entry", "a file")]
)
def test_an_error_in_a_step_fails_the_requests_of_that_engine_only(error):
    def fail() -> bool:
        raise error

    first, second = start(), start()
    with pytest.raises(RuntimeError, match=re.escape(f"{type(error).__name__}: {error}")):
        whole(submit_request(first, 5, is_canceled=fail))
    assert whole(submit_request(second, 5)) == whole(submit_request(first, 5)) == 5
    first.close()
    second.close()


class Stuck:
    """A grammar whose first sequence has no allowed token at its third."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.tokens = 9  # that are left
        self.num_forks = 0

    def fork(self) -> Stuck:
        self.num_forks += 1
        forked = Stuck(self.error)
        if self.num_forks == 1:
            forked.tokens = 3
        return forked

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def advance(self, _token: int) -> bool:
        self.tokens -= 1
        if not self.tokens:
            raise self.error("stuck")
        return False


@pytest.mark.parametrize("error", [JobFailed, MemoryError, PanicError])
def test_a_failed_sequence_ends_its_request_only(error):
    engine = start()
    other = submit_request(engine, 50)
    other.pieces.get(timeout=60)
    with pytest.raises(error, match="stuck"):
        whole(submit_request(engine, 3, num_completions=2, grammar=Stuck(error)))
    assert whole(other) > 0
    engine.close()


def test_the_error_of_a_sequence_keeps_no_sequence_alive(monkeypatch):
    made = []

    def new(decoder: Decoder, capacity: int, new: Any = Decoder.new) -> Any:
        made.append(weakref.ref(kv := new(decoder, capacity)))
        return kv

    monkeypatch.setattr(Decoder, "new", new)
    engine = start()
    requested = submit_request(engine, 3, num_completions=2, grammar=Stuck(JobFailed))
    engine.close()
    assert [kv() for kv in made] == [None, None]
    with pytest.raises(JobFailed, match="stuck"):
        whole(requested)


def test_the_compute_thread_keeps_its_thread_count_whatever_other_threads_set():
    threads = torch.get_num_threads()

    def threads_after(number: int) -> int:
        compute_with(number)
        with ThreadPoolExecutor(1) as other:
            other.submit(compute_with, 1).result()
        return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(threads_after, 2).result() == 2
    finally:
        compute_with(threads)  # what a thread that asks for the first time is given


def test_request_preparation_computes_in_its_own_thread_only():
    threads = torch.get_num_threads()
    with without_helpers():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


def test_an_engine_with_long_steps_takes_fewer_of_them(monkeypatch):
    steps: list[Engine] = []
    step = Engine.step

    def recorded(engine: Engine) -> None:
        steps.append(engine)
        step(engine)

    monkeypatch.setattr(Engine, "step", recorded)
    large, small = start(), start()
    submit_request(small, 1).pieces.get(timeout=60)  # prepared
    leave = threading.Event()
    many = submit_request(large, 500, num_completions=64, is_canceled=leave.is_set)
    for _ in range(256):
        many.pieces.get(timeout=60)
    begun = len(steps)
    assert whole(submit_request(small, 20)) == 20
    taken = steps[begun:]
    assert taken.count(small) > 2 * taken.count(large)
    leave.set()
    large.close()
    small.close()
