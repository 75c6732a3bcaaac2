"""Evaluations in environments and of agents: the engine writes the turns, with those of other jobs.

Imports torch, by the engine.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from ..context import Context, WarmModel
from ..engine import forms
from ..engine.engine import Engine
from ..engine.image_tokens import check_takes_images, insert_image_tokens
from ..engine.images import Budget
from ..engine.request import End, Image, Piece, Request, Sampling
from ..engine.rollouts import Segment
from ..environments.episodes import Episode, Key, Rules
from ..environments.interface import EnvironmentFault
from ..environments.options import EPISODE_LENGTH
from ..environments.playing import playing
from ..environments.pool import Failure
from ..environments.tasks import task_of
from ..errors import JobFailed, Stopped
from ..keyed_numbers import uniform
from ..models.generation_settings import end_tokens
from .generation import known_scores, passes
from .options import EvalSpec
from .questions import Question

_LOOK_S = 0.02  # between two looks at the environments while turns are written
_BLOCK = 256  # tasks that are played together: the episodes of all are in memory
MOST_FAILURES = 10  # consecutive tasks without an episode, after which the job fails


@dataclass(frozen=True)
class Written:
    """A turn of the engine, as `engine.dialogues.Turn`."""

    segment: Segment
    text: str
    reason: str
    before: list[int]


@dataclass
class _Writing:
    """A turn that the engine writes."""

    has_form: bool  # whether it is constrained by a schema or an expression
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None


class _Pieces(queue.SimpleQueue[Any]):
    """The pieces of a request, with its episode and turn, in a queue of all requests."""

    def __init__(self, key: Hashable, turn: _Writing, target: queue.SimpleQueue[Any]) -> None:
        super().__init__()
        self._of = key, turn
        self._target = target

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add a piece to the queue of all."""
        self._target.put((*self._of, item))


class EnginePolicy:
    """Writes turns by the engine: each is a request, whose prompt is all of the episode so far.

    The prefix cache of the engine has what was computed for the turn before. A policy of
    `environments.episodes.Player`: the numbers of a turn are a range that begins at its seed.
    """

    def __init__(
        self, engine: Engine, spec: EvalSpec, adapter: Any, is_canceled: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._adapter = adapter
        self._is_canceled = is_canceled
        self._owner = object()
        self._ids: dict[Hashable, list[int]] = {}
        self._images: dict[Hashable, list[Image]] = {}
        self._capacity: dict[Hashable, int] = {}
        self._writing: dict[Hashable, _Writing] = {}
        self._pieces: queue.SimpleQueue[tuple[Hashable, _Writing, Piece | End]]
        self._pieces = queue.SimpleQueue()

    @property
    def is_idle(self) -> bool:
        """Whether no turn is being written."""
        return not self._writing

    def begin(
        self, key: Hashable, prompt: Sequence[int], *, capacity: int, images: Sequence[Image] = ()
    ) -> None:
        """Begin an episode; `capacity`: its most tokens. `images`: in the prompt."""
        self._ids[key] = list(prompt)
        self._images[key] = list(images)
        self._capacity[key] = capacity

    def go_on(
        self,
        key: Hashable,
        numbers: range,
        given: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        images: Sequence[Image] = (),
        json_schema: str = "",
        regex: str = "",
    ) -> int:
        """Let the engine write a turn after `given` tokens; return its most tokens.

        `stop`: further texts that end it. `images`: in `given`. `json_schema`, `regex`: that the
        turn must match, checked before. Raises JobFailed where the tokenizer takes none.
        """
        ids = self._ids[key]
        room = min(len(numbers), self._capacity[key] - len(ids) - len(given))
        if room <= 0:
            return 0
        grammar = forms.grammar_of(self._engine, json_schema=json_schema, regex=regex)
        seen = self._images[key]
        seen += [replace(image, start=len(ids) + image.start) for image in images]
        ids += given
        spec = self._spec
        self._writing[key] = writing = _Writing(has_form=grammar is not None)
        self._engine.submit(
            Request(
                ids=tuple(ids),
                sampling=Sampling(
                    temperature=spec.temperature,
                    top_p=spec.top_p,
                    top_k=spec.top_k,
                    seed=numbers.start,
                ),
                max_tokens=room,
                images=tuple(seen),
                stop=(*spec.stop, *stop),
                grammar=grammar,
                owner=self._owner,
                adapter=self._adapter,
                is_canceled=lambda: self._is_canceled() or self._ids.get(key) is not ids,
                pieces=_Pieces(key, writing, self._pieces),
            )
        )
        return room

    def step(self) -> dict[Any, Written | JobFailed]:
        """Wait a moment for pieces; return the turns that are over. Raises Stopped.

        JobFailed stands for a constrained turn that has exceeded a limit of the parser.
        """
        over: dict[Any, Written | JobFailed] = {}
        wait_s = _LOOK_S
        while True:
            try:
                key, writing, piece = self._pieces.get(timeout=wait_s)
            except queue.Empty:
                return over
            wait_s = 0.0
            is_given_up = self._writing.get(key) is not writing
            if isinstance(piece, End):
                error = piece.error
                if error is not None and not (isinstance(error, JobFailed) and writing.has_form):
                    raise error
                if not is_given_up:
                    over[key] = self._over(key, writing, error)
            elif not is_given_up:
                writing.ids += piece.ids
                writing.text += piece.text
                writing.reason = piece.finish_reason

    def _over(
        self, key: Hashable, writing: _Writing, error: JobFailed | None
    ) -> Written | JobFailed:
        del self._writing[key]
        for image in self._images[key]:
            image.patches.release()
        if error is not None:
            return error
        if writing.reason in (None, "cancelled"):
            raise Stopped(0)
        before = self._ids[key][-256:]
        self._ids[key] += writing.ids
        return Written(Segment(ids=writing.ids), writing.text, str(writing.reason), before)

    def given(self, ids: Sequence[int]) -> Segment:
        """Return tokens that the model is given, as a segment."""
        return Segment(ids=list(ids), is_given=True)

    def end(self, key: Hashable) -> None:
        """Forget an episode; a turn of it that is being written is given up."""
        del self._ids[key], self._images[key], self._capacity[key]
        self._writing.pop(key, None)


class Evaluation:
    """The episodes of the tasks of an evaluation."""

    def __init__(
        self,
        spec: EvalSpec,
        ctx: Context,
        warm: WarmModel,
        engine: Engine,
        questions: Sequence[Question],
    ) -> None:
        self._spec = spec
        self._ctx = ctx
        self._warm = warm
        self._engine = engine
        self._tasks = [task_of(one.problem) for one in questions]
        self._option = "" if spec.played is None else spec.played[0]
        self._failures = 0  # consecutive tasks without an episode

    def play(
        self,
        done: int,
        is_canceled: Callable[[], bool],
        append: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Play the tasks from number `done` on; `append` gets the row of each, in order.

        Raises Stopped and JobFailed.
        """
        spec, warm = self._spec, self._warm
        if done == len(self._tasks):
            return
        with playing(
            spec,
            self._ctx,
            warm,
            ends=end_tokens(warm.model, warm.tokenizer),
            tasks=self._tasks,
            sampling={
                "temperature": spec.temperature,
                "top_p": spec.top_p,
                "top_k": spec.top_k,
                "min_p": 0.0,
            },
            most_tokens=spec.max_tokens or EPISODE_LENGTH,
            episodes=min(_BLOCK, len(self._tasks) - done) * spec.repeats,
        ) as made:
            for first in range(done, len(self._tasks), _BLOCK):
                player = made.player(
                    EnginePolicy(self._engine, spec, warm.adapter, is_canceled),
                    numbers=self._numbers(made.rules.max_turn_tokens),
                    on_end=self._rows(first, made.rules, append),
                    check=self._ctx.check_stop,
                    images=self._insert_images,
                )
                block = range(first, min(first + _BLOCK, len(self._tasks)))
                player.play(self._tasks, [(task, range(spec.repeats)) for task in block])

    def _insert_images(self, ids: list[int], urls: Sequence[str]) -> tuple[list[int], list[Image]]:
        """See `environments.episodes.InsertImages`."""
        if urls:
            check_takes_images(self._warm)
        try:
            return insert_image_tokens(self._warm, ids, urls, Budget())
        except JobFailed as error:
            raise EnvironmentFault(str(error)) from error

    def _numbers(self, length: int) -> Callable[..., range]:
        """Return what gives the seed of a turn, as a range of `length`."""

        def numbers(key: Key, turn: int, context: int = 0) -> range:
            fields = {"task": key.task, "sample": key.member, "attempt": key.attempt}
            if context:
                fields["context"] = context
            drawn = uniform(1, use="episode", seed=self._spec.seed, turn=turn, **fields)
            start = int(drawn[0] * 2**53)
            return range(start, start + length)

        return numbers

    def _rows(
        self, first: int, rules: Rules, append: Callable[[Mapping[str, Any]], None]
    ) -> Callable[[Episode], None]:
        """Return what takes the episodes of a block as they end.

        The row of a task is made once all of its episodes, and those of earlier tasks, are over.
        """
        spec = self._spec
        over: dict[int, dict[int, Episode]] = {}
        due = first  # the next task

        def ended(episode: Episode) -> None:
            nonlocal due
            key = episode.key
            if rules.repeats(episode):
                return
            over.setdefault(key.task, {})[key.member] = episode
            while len(over.get(due, ())) == spec.repeats:
                of_task = over.pop(due)
                due += 1
                self._count(list(of_task.values()))
                append(row_of(spec, [of_task[number] for number in range(spec.repeats)]))

        return ended

    def _count(self, episodes: Sequence[Episode]) -> None:
        """Count consecutive tasks without an episode. Raises JobFailed after too many."""
        failures = [one.failure for one in episodes if one.failure is not None]
        self._failures = self._failures + 1 if len(failures) == len(episodes) else 0
        if self._failures == MOST_FAILURES:
            raise JobFailed(
                f"{self._option}: must play an episode of one of {MOST_FAILURES} consecutive "
                f"tasks, got none; the last one: {failures[-1].words}"
            )


def row_of(spec: EvalSpec, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the record of a task: its episodes with their scores, and its metrics."""
    prompt = next((one.opening for one in episodes if one.messages), "")
    completions = [_completion(one) for one in episodes]
    scores = known_scores(completions)
    metrics = {name: fmean(known) for name, known in scores.items() if known}
    metrics |= passes(scores["reward"], spec.pass_k)
    return {"prompt": prompt, "answer": None, "completions": completions, "metrics": metrics}


def _completion(episode: Episode) -> dict[str, Any]:
    scores: dict[str, float | None] = {"reward": episode.reward, **episode.parts}
    if episode.success is not None:
        scores["success"] = float(episode.success)
    if episode.failure is None:
        scores["turns"] = float(episode.turns)
    return {
        "text": episode.transcript,
        "messages": episode.messages,
        "finish_reason": episode.reason,
        "tokens": sum(len(one.ids) for one in episode.written if not one.is_given),
        "turns": episode.turns,
        "scores": scores,
        **_why(episode.failure),
    }


def _why(failure: Failure | None) -> dict[str, str]:
    return {} if failure is None else {"error": failure.words}
