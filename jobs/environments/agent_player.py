"""Plays the episodes of agents: programs that request turns from the model, as often as they like.

The program of an episode is a function in a process of the pool. Its requests come over the
endpoint of the job; each is one turn in a context of its session. The function's result ends the
episode. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import JobFailed, SpecError
from ..files.chats import Messages
from ..models import image_parts
from .agent_replies import AgentTurns, message_of
from .agent_requests import Wanted, read
from .agents import variables
from .endpoint import AgentRequest, Endpoint
from .episodes import LENGTH, MAX_TURNS, Episode, Key, Player, Policy, Rules, of_images
from .interface import AGENT, EnvironmentFault
from .pool import Answer, Failure, Pool
from .sessions import Asked, Context, Session, plain, shown_of, written_of

RETURNED = "returned"  # the agent has returned: the end of its episode
_MOST_OPEN = 16  # contexts of an episode that may be continued, the latest ones
_TOO_LONG = "context_length_exceeded"  # OpenAI's code


@dataclass(eq=False)
class _Open:
    """An episode that is played. Contexts are named by their numbers in the session."""

    episode: Episode
    session: Session
    key: str
    writing: dict[int, tuple[Asked, Wanted]] = field(default_factory=dict)  # by context
    closed: set[int] = field(default_factory=set)  # contexts that are not continued any more


class AgentPlayer(Player):
    """Plays the episodes of a step.

    `endpoint`: where the requests come in; `url`: of the gateway, where agents send them.
    `numbers` returns those that decide the tokens of a turn, by attempt, turn and context.
    `sampling`: what the job samples with, by name: requests cannot change it, and `warn` gets a
    line when they try. `names`: of the rewards of earlier steps, one set. `others`: as of Player.
    """

    option = AGENT

    def __init__(
        self,
        pool: Pool,
        policy: Policy,
        turns: AgentTurns,
        rules: Rules,
        *,
        endpoint: Endpoint,
        url: str,
        numbers: Callable[..., Any],
        sampling: Mapping[str, Any],
        warn: Callable[[str], None],
        names: set[frozenset[str]],
        **others: Any,
    ) -> None:
        super().__init__(pool, policy, rules, **others)
        self._turns = turns
        self._endpoint = endpoint
        self._url = url
        self._numbers = numbers
        self._sampling = sampling
        self._warn = warn
        self._open: dict[Key, _Open] = {}
        self._by_key: dict[str, _Open] = {}
        self._names = names

    # Processes.

    def _start(self, episode: Episode) -> None:
        key = self._endpoint.new_key()
        self._open[episode.key] = self._by_key[key] = _Open(episode, Session(), key)
        task = self._tasks[episode.key.task]
        row = {"seed": task.seed, **task.row}
        if task.prompt is not None:
            row.setdefault("prompt", task.prompt)
        self._pool.run(episode.key, seed=task.seed, row=row, variables=variables(self._url, key))

    def _answered(self, episode: Episode, answer: Answer) -> None:
        found = answer.found["reward"]
        self._assemble(self._open[episode.key])
        episode.reason = RETURNED
        if found is not None:
            self._check_names(frozenset(found))
            episode.reward = sum(found.values())
            episode.parts = found if len(found) > 1 else {}
        self._end(episode)

    def _check_names(self, names: frozenset[str]) -> None:
        """Raise JobFailed for rewards with other names than those of other episodes."""
        if self._names and names not in self._names:
            one, other = (sorted(some) for some in (*self._names, names))
            raise JobFailed(
                f"agent: must return the same rewards for all tasks, got {one} and {other}"
            )
        self._names.add(names)

    def _fail(self, episode: Episode, failure: Failure) -> None:
        opened = self._open[episode.key]
        self._assemble(opened)
        if failure.reason != "environment_error":
            super()._fail(episode, failure)
            return
        limit = opened.session.limit
        failure = replace(failure, reason="agent_error")
        if limit is None:
            super()._fail(episode, failure)
        elif (reward := self._rules.timeout_reward) is not None:
            episode.reason, episode.reward = limit, reward
            self._leave(episode)
        else:  # another attempt would come to the limit, too
            self._leave_out(episode, failure, limit)

    def _assemble(self, opened: _Open) -> None:
        """Give an episode the turns of its session."""
        episode, contexts = opened.episode, opened.session.learned()
        if contexts:
            episode.prompt = contexts[0].prompt
            episode.written = written_of(contexts)
            episode.messages = shown_of(contexts)
            episode.turns = sum(not one.is_given for one in episode.written)

    def _drop(self, key: Key) -> None:
        opened = self._open.pop(key)
        del self._by_key[opened.key]
        for asked, _ in opened.writing.values():
            for request in asked.waiting:
                _refuse_ended(request)
        for place in range(len(opened.session.contexts)):
            if place not in opened.closed:
                self._policy.end((key, place))

    # Requests.

    def _look(self) -> None:
        for request in self._endpoint.take():
            opened = self._by_key.get(request.key)
            if opened is None:
                _refuse_ended(request)
            elif not request.is_lost:
                self._take(opened, request)

    def _take(self, opened: _Open, request: AgentRequest) -> None:
        """Begin the turn of a request, or join the one that an equal request has begun."""
        session = opened.session
        known = session.repeated(request.fingerprint, is_retry=request.is_retry)
        if known is not None:
            known.waiting.append(request)
            if known.reply is not None:
                request.answer(known.reply)
            return
        try:
            wanted = read(request.options, self._sampling, is_trained=self._images is None)
            request.options.clear()  # a conversation has all earlier ones
            self._turns.check(wanted)
        except SpecError as error:
            request.refuse(400, error.problem, option=error.field)
            return
        for words in wanted.warnings:
            self._warn(words)
        if session.turns >= self._rules.max_turns:
            session.limit = MAX_TURNS
            words = f"max_turns: the episode has had {self._rules.max_turns} turns"
            request.refuse(400, words, param="messages", code=MAX_TURNS)
            return
        if not self._begin_turn(opened, request, wanted):
            session.limit = LENGTH
            words = "max_completion_length: the conversation leaves no room for a turn"
            request.refuse(400, words, param="messages", code=_TOO_LONG)

    def _begin_turn(self, opened: _Open, request: AgentRequest, wanted: Wanted) -> bool:
        """Let the policy write a turn; return whether there was room, or it was refused."""
        key, session = opened.episode.key, opened.session
        try:
            found, messages, ids, images = self._tokens_of(session, wanted)
        except (JobFailed, EnvironmentFault) as error:
            request.refuse(400, str(error), param="messages")
            return True
        context, given = found, ids
        if context is None:
            capacity = self._rules.capacity(len(ids))
            if len(ids) >= capacity:
                return False
            context, given = session.open(ids, messages, wanted.tools_text, images), []
            begun = key, len(session.contexts) - 1
            self._policy.begin(begun, ids, capacity=capacity, **of_images(images))
        place = session.contexts.index(context)
        mark = len(context.segments), len(context.shown)
        numbers = self._numbers(key, context.turns, context.digest)[: wanted.max_tokens]
        others = of_images(images if given else ()) | wanted.form
        is_refused = False
        try:
            room = self._policy.go_on((key, place), numbers, given, stop=wanted.stop, **others)
        except JobFailed as error:  # the form does not go with the tokenizer of the model
            request.refuse(400, str(error))
            room, is_refused = 0, True
        if not room:
            if found is None:
                session.forget_latest()
                self._policy.end((key, place))
            return is_refused
        context.is_open = False
        if given:
            context.segments.append(self._policy.given(given))
            context.show(messages, images)
            context.history += plain(messages)
        asked = Asked(context, request.fingerprint, mark, [request])
        session.asked.append(asked)
        if not opened.writing:
            opened.episode.environment_s += time.monotonic() - opened.episode.asked_at
        opened.writing[place] = asked, wanted
        return True

    def _tokens_of(
        self, session: Session, wanted: Wanted
    ) -> tuple[Context | None, Messages, list[int], list[Any]]:
        """Return the context that a request continues, and its new messages, tokens and images.

        None: it opens another context, and all messages are new. Raises JobFailed and
        EnvironmentFault.
        """
        tools = wanted.tools_text
        continued = session.continued(wanted.messages, tools)
        if continued is not None:
            context, more = continued
            messages, urls = image_parts.split(more)
            # A template can refuse them behind that turn, and take the whole conversation.
            with suppress(JobFailed):
                given = self._turns.observed(messages, tools, context.calls)
                return context, more, *self._seen(context.missing_end + given, urls)
        messages, urls = image_parts.split(wanted.messages)
        prompt = self._turns.prompt(messages, tools)
        return None, wanted.messages, *self._seen(prompt, urls)

    def _written(self, key: Any, turn: Any) -> None:
        attempt, place = key
        opened = self._open[attempt]
        asked, wanted = opened.writing.pop(place)
        if not opened.writing:
            opened.episode.asked_at = time.monotonic()
        context = asked.context
        if isinstance(turn, JobFailed):  # decoding has exceeded a limit of the parser
            for request in asked.waiting:
                request.refuse(400, str(turn))
            opened.session.take_back(asked)
            self._close_some(opened)
            return
        # Ids of calls can be part of a prompt: a resumed job has the same ones.
        seed = f"{tuple(attempt)}/{context.digest}/{context.turns}"
        choice = self._turns.choice(turn, wanted, seed, context.screen)
        message = message_of(choice)
        context.segments.append(turn.segment)
        context.shown.append(_shown(message))
        context.history += plain([message])
        context.calls = [call["name"] for call in choice.get("calls", ())]
        context.turns += 1
        context.missing_end = self._turns.missing_end(turn, wanted)
        context.is_open = self._turns.has_closed(turn) or bool(context.missing_end)
        self._close_some(opened)
        asked.reply = _result(choice, context, turn, wants_ids=wanted.wants_ids)
        for request in asked.waiting:
            request.answer(asked.reply)

    def _close_some(self, opened: _Open) -> None:
        """Forget the KV caches of contexts that are not continued any more."""
        contexts = enumerate(opened.session.contexts)
        idle = [(n, one) for n, one in contexts if n not in (*opened.writing, *opened.closed)]
        ended = [one for one in idle if not one[1].is_open]
        ended += [one for one in idle if one[1].is_open][:-_MOST_OPEN]
        for place, context in ended:
            context.is_open = False
            opened.closed.add(place)
            self._policy.end((opened.episode.key, place))


def _refuse_ended(request: AgentRequest) -> None:
    request.refuse(410, "Authorization: the episode of this key has ended", code="episode_ended")


def _result(choice: dict[str, Any], context: Context, turn: Any, *, wants_ids: bool) -> Any:
    """Return what an infer job returns."""
    ids = [*context.prompt, *(token for one in context.segments for token in one.ids)]
    written = turn.segment.ids
    prompt = ids[: len(ids) - len(written)]
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(written),
        "total_tokens": len(ids),
    }
    found: dict[str, Any] = {"choices": [choice], "usage": usage, "timings": {}}
    if wants_ids:
        found["prompt_token_ids"] = [prompt]
        found["choices"] = [{**choice, "token_ids": list(written)}]
    return found


def _shown(message: Mapping[str, Any]) -> str:
    """Return a message of the policy as text, for people."""
    calls = (call["function"] for call in message.get("tool_calls", ()))
    texts = [f"{call['name']}({call['arguments']})" for call in calls]
    return "\n".join(filter(None, [message["content"], *texts]))
