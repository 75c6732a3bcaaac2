"""Many followers of one job: each gets every event once, in order, whenever it begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx2 as httpx
import pytest
from breadth import mostly_slow
from followers import Training
from gateways import Gateway
from waiting import wait_until

from warmd.daemon.gateway.core import inbox as inbox_module
from warmd.daemon.gateway.core.inbox import Inbox, Pace


@pytest.fixture
def job(gateway: Gateway) -> Iterator[Training]:
    job = Training(gateway)
    yield job
    job.end()


def test_followers_that_begin_at_any_time_get_each_event_once_in_order(
    job: Training,
) -> None:
    followers = []
    for round_ in range(12):
        after = round_ * 10
        followers.append((after, job.follow(after=after)))
        job.log(50)
        followers.append((after, job.follow(after=after)))
    wait_until(lambda: all(follower.ids[-1:] == [job.seq] for _, follower in followers))
    job.end()
    for after, follower in followers:
        assert follower.ended() == list(range(after + 1, job.seq + 1))


@pytest.mark.slow
def test_a_follower_that_is_slow_gets_from_the_file_what_it_missed(
    job: Training,
) -> None:
    slow, fast = job.follow(reads=False), job.follow()
    job.log(1)
    wait_until(lambda: fast.ids)
    for _ in range(40):  # more than fits into its inbox and the buffers between
        job.log(100, note="a" * 2000)
    wait_until(lambda: len(fast.ids) == job.seq, timeout_s=60)
    job.trim()
    slow.may_read.set()
    job.log(1)
    wait_until(lambda: len(slow.ids) == job.seq, timeout_s=60)
    job.end()
    assert slow.ended() == fast.ended() == list(range(1, job.seq + 1))


def test_events_that_only_the_stream_has_reach_followers_that_begin_later(
    job: Training,
) -> None:
    first = job.follow()
    job.log(3)
    job.log_in_stream_only()
    wait_until(lambda: first.ids == [1, 2, 3, 4])
    second = job.follow()
    wait_until(lambda: second.ids == [1, 2, 3, 4])


@pytest.mark.parametrize("following", mostly_slow([1, 3], but=[3]))
def test_a_trimmed_stream_is_completed_from_the_file(job: Training, following: int) -> None:
    job.log(500, note="a" * 200)  # more than a piece of the file
    job.trim()
    followers = [job.follow(after=2) for _ in range(following)]
    wait_until(lambda: all(len(one.ids) == 498 for one in followers))
    job.log(1)
    job.end()
    assert [one.ended() for one in followers] == [list(range(3, job.seq + 1))] * following


@pytest.mark.parametrize("is_trimmed", mostly_slow([False, True], but=[True]))
def test_the_events_of_a_resumed_job_continue_after_its_first_finished(
    job: Training, *, is_trimmed: bool
) -> None:
    execution = job.begin()
    job.log(100, note="a" * 500)  # more than a piece of the file
    job.finish(execution)
    if is_trimmed:
        job.trim()
    job.resume()
    from_queue = job.follow()
    wait_until(lambda: from_queue.ids[-1:] == [job.seq])
    execution = job.begin()
    job.log(100, note="a" * 500)
    from_run = job.follow()
    wait_until(lambda: from_run.ids[-1:] == from_queue.ids[-1:] == [job.seq])
    job.finish(execution)
    followers = from_queue, from_run, job.follow()
    assert [one.ended() for one in followers] == [list(range(1, job.seq + 1))] * len(followers)


@pytest.mark.slow
def test_the_state_is_sent_once_and_again_when_it_changes(gateway: Gateway, job: Training) -> None:
    url = f"{gateway.url}/v1/warmd/jobs/{job.id}/events/stream"
    with httpx.stream("GET", url, timeout=60) as answer:
        lines = answer.iter_lines()

        def until(wanted: Callable[[str], bool]) -> list[str]:
            seen = []
            for line in lines:
                seen.append(line)
                if wanted(line):
                    break
            return seen

        assert "event: state" in until(lambda line: '"queued"' in line)
        silent = until(lambda line: line == ": no news")
        assert "event: state" not in silent
        job.end()
        assert '"canceled"' in "".join(until(lambda line: line == "event: end"))


@pytest.mark.slow
def test_many_followers_of_one_job_cost_one_reading_of_the_stream(
    gateway: Gateway, job: Training
) -> None:
    job.log(500, note="a" * 1000)
    connection: Any = gateway.client.connection

    def sent() -> int:
        return int(connection.info("stats")["total_net_output_bytes"])

    before = sent()
    followers = []
    for _ in range(20):
        followers.append(job.follow())
        wait_until(lambda: len(followers[-1].ids) == job.seq)
    job.log(1)
    wait_until(lambda: all(len(one.ids) == job.seq for one in followers))
    assert sent() - before < 5 * 500 * 1000


# --- inboxes and their pace


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_turns_come_a_few_at_a_time_in_the_order_in_which_they_are_asked_for() -> None:
    async def all_at_once() -> None:
        loop = asyncio.get_running_loop()
        pace, served = Pace(), []

        async def ask(number: int) -> None:
            turn = loop.create_future()
            pace.ask(turn)
            await turn
            served.append(number)

        asking = [asyncio.create_task(ask(number)) for number in range(100)]
        rounds = []
        while len(served) < 99:
            await asyncio.sleep(0)  # another request
            rounds.append(len(served))
            if len(served) == 8:
                asking[50].cancel()
        others = [number for number in range(100) if number != 50]
        assert served == others
        assert max(after - before for before, after in pairwise(rounds)) == 8
        await asyncio.wait(asking)

    run(all_at_once())


def test_others_have_the_event_loop_for_as_long_as_turns_take() -> None:
    async def slow() -> None:
        loop = asyncio.get_running_loop()
        pace, served = Pace(), 0

        async def ask() -> None:
            nonlocal served
            turn = loop.create_future()
            pace.ask(turn)
            await turn
            time.sleep(0.005)
            served += 1

        asking = asyncio.gather(*(ask() for _ in range(20)))
        began, rounds = loop.time(), [0]
        while not asking.done():
            await asyncio.sleep(0.001)  # another request
            rounds.append(served)
        assert loop.time() - began > 0.15  # 0.1 for the turns, as much for others but at the end
        assert max(after - before for before, after in pairwise(rounds)) == 8

    run(slow())


def test_what_comes_while_a_follower_waits_for_its_turn_is_taken_together() -> None:
    async def late() -> None:
        loop = asyncio.get_running_loop()
        pace = Pace()
        for _ in range(50):
            pace.ask(loop.create_future())
        inbox: Inbox[int] = Inbox(9, pace)
        inbox.put(1)
        taking = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        inbox.put(2)
        assert await taking == [1, 2]

    run(late())


def test_an_inbox_returns_without_items_when_woken_and_after_silence(monkeypatch) -> None:
    monkeypatch.setattr(inbox_module, "SILENCE_S", 0.01)

    async def nothing() -> None:
        inbox: Inbox[int] = Inbox(2)
        assert await inbox.take() == []
        inbox.wake()
        assert await inbox.take() == []
        inbox.put(1)
        inbox.put(2)
        assert inbox.is_full
        assert await inbox.take() == [1, 2]
        inbox.put(3)
        inbox.close()
        inbox.put(4)
        assert [await inbox.take() for _ in range(2)] == [None, None]

    run(nothing())


def test_a_canceled_take_loses_no_item() -> None:
    async def canceled() -> None:
        inbox: Inbox[int] = Inbox(2)
        for _ in range(2):
            taking = asyncio.create_task(inbox.take())
            await asyncio.sleep(0)
            taking.cancel()
            await asyncio.wait([taking])
        inbox.put(1)
        assert await inbox.take() == [1]

    run(canceled())
