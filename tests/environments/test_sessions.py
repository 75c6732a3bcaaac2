"""Which context a request of an agent continues: that with the same conversation, or a new one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from warmd.jobs.engine.rollouts import Segment
from warmd.jobs.environments.endpoint import AgentRequest
from warmd.jobs.environments.sessions import Asked, Context, Session, plain, shown_of, written_of

HELLO = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more"}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(arguments: Any, id: str = "call_1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "read", "arguments": arguments}}


@pytest.fixture
def request_of() -> Any:
    loop = asyncio.new_event_loop()

    def make(fingerprint: str = "f") -> AgentRequest:
        return AgentRequest("key", fingerprint, False, {}, loop.create_future())

    yield make
    loop.close()


def turn(session: Session, context: Context, reply: dict[str, Any], request: AgentRequest) -> Asked:
    """A turn that is over."""
    asked = Asked(
        context, request.fingerprint, (len(context.segments), len(context.shown)), [request]
    )
    session.asked.append(asked)
    context.segments.append(Segment([len(session.asked)]))
    context.shown.append(reply["content"])
    context.history += plain([reply])
    context.is_open = True
    asked.reply = reply
    return asked


def test_a_conversation_that_goes_on_continues_its_context(request_of):
    session = Session()
    context = session.open([1], [HELLO], "")
    turn(session, context, assistant("hi"), request_of())
    found = session.continued([HELLO, assistant("hi"), MORE], "")
    assert found == (context, [MORE])


@pytest.mark.parametrize(
    "reply",
    [
        assistant(" hi\n"),  # clients strip
        assistant("hi", reasoning_content="hm"),  # or keep what templates drop
        assistant("hi", tool_calls=[]),
    ],
)
def test_what_clients_change_of_a_message_makes_no_other_one(reply, request_of):
    session = Session()
    context = session.open([1], [HELLO], "")
    turn(session, context, assistant("hi"), request_of())
    assert session.continued([HELLO, reply, MORE], "") == (context, [MORE])


def test_arguments_of_calls_are_compared_as_values(request_of):
    session = Session()
    context = session.open([1], [HELLO], "")
    turn(session, context, assistant("", tool_calls=[call({"a": 1, "b": 2})]), request_of())
    result = {"role": "tool", "content": "3", "tool_call_id": "x"}
    same = assistant(None, tool_calls=[call({"b": 2, "a": 1}, id="other")])
    assert session.continued([HELLO, same, result], "") == (context, [result])
    for arguments in ({"a": 1, "b": 3}, {"a": True, "b": 2}):
        other = assistant(None, tool_calls=[call(arguments)])
        assert session.continued([HELLO, other, result], "") is None


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([HELLO, assistant("ho"), MORE], ""),
        ([MORE, assistant("hi"), MORE], ""),
        ([HELLO, assistant("hi"), MORE], "[]"),
        ([{**HELLO, "content": "hello "}, assistant("hi"), MORE], ""),
        ([HELLO, assistant("hi")], ""),  # nothing new
        ([HELLO], ""),  # the same again
        ([HELLO, assistant("hi"), assistant("oh"), MORE], ""),  # a turn that it has not sampled
        ([{"role": "system", "content": "x"}, HELLO, assistant("hi"), MORE], ""),
    ],
)
def test_any_other_conversation_continues_none(messages, tools, request_of):
    session = Session()
    turn(session, session.open([1], [HELLO], ""), assistant("hi"), request_of())
    assert session.continued(messages, tools) is None


def test_a_context_that_is_being_continued_is_not_continued_twice(request_of):
    session = Session()
    context = session.open([1], [HELLO], "")
    turn(session, context, assistant("hi"), request_of())
    context.is_open = False
    assert session.continued([HELLO, assistant("hi"), MORE], "") is None


def test_the_longest_of_several_contexts_is_continued(request_of):
    session = Session()
    short = session.open([1], [HELLO], "")
    turn(session, short, assistant("hi"), request_of())
    long = session.open([1, 2], [HELLO, assistant("hi"), MORE], "")
    turn(session, long, assistant("what"), request_of())
    found = session.continued([HELLO, assistant("hi"), MORE, assistant("what"), MORE], "")
    assert found is not None
    assert found[0] is long


def test_only_a_request_whose_reply_was_lost_or_that_is_a_retry_is_joined(request_of):
    session = Session()
    first = request_of()
    asked = turn(session, session.open([1], [HELLO], ""), assistant("hi"), first)
    assert session.repeated("f", is_retry=False) is None
    assert session.repeated("f", is_retry=True) is asked
    assert session.repeated("g", is_retry=True) is None
    first.is_lost = True
    assert session.repeated("f", is_retry=False) is asked
    asked.waiting.append(request_of())
    assert session.repeated("f", is_retry=False) is None
    # A retry of a request that has not arrived is no repetition of one that was answered before.
    turn(session, session.open([2], [MORE], ""), assistant("oh"), request_of("g"))
    assert session.repeated("f", is_retry=True) is None


def test_equal_requests_that_were_lost_are_joined_one_each(request_of):
    session, asked = Session(), []
    for prompt in ([1], [2]):
        asked.append(
            turn(session, session.open(prompt, [HELLO], ""), assistant("hi"), request_of())
        )
        asked[-1].waiting[0].is_lost = True
    for expected in asked:
        found = session.repeated("f", is_retry=True)
        assert found is expected
        found.waiting.append(request_of())


def test_turns_that_were_not_delivered_are_not_learned(request_of):
    session = Session()
    context = session.open([1], [HELLO], "")
    turn(session, context, assistant("hi"), request_of())
    lost = request_of()
    context.segments.append(Segment([9], is_given=True))
    asked = turn(session, context, assistant("lost"), lost)
    asked.mark = (1, 2)
    lost.is_lost = True
    other = session.open([5], [MORE], "")
    never = turn(session, other, assistant("never"), request_of())
    never.reply = None
    assert session.learned() == [context]
    assert [one.ids for one in context.segments] == [[1]]
    assert shown_of([context]) == [[HELLO], "hi"]


def test_contexts_come_in_an_order_that_does_not_depend_on_time(request_of):
    prompts = [[7, 1], [7, 2], [7, 2], [7, 3]]
    found = []
    for order in ([0, 1, 2, 3], [0, 3, 2, 1]):
        session = Session()
        for number in order:
            context = session.open(prompts[number], [HELLO], "")
            turn(session, context, assistant("hi"), request_of())
        learned = session.learned()
        assert learned[0].digest == 0
        found.append([(one.prompt, one.digest) for one in learned])
    assert found[0] == found[1]
    assert len({digest for _, digest in found[0]}) == 4


def test_each_context_after_the_first_has_its_prompt(request_of):
    session = Session()
    for prompt in ([1], [2]):
        context = session.open(prompt, [HELLO], "")
        turn(session, context, assistant("hi"), request_of())
    written = written_of(session.learned())
    assert [one.prompt for one in written] == [None, [2]]
    opening = shown_of(session.learned())[2]
    assert opening == [{"role": "context", "content": "2"}, HELLO]
