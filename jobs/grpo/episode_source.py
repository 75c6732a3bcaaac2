"""Multi-turn trajectories: episodes in an environment or of an agent, which give the rewards, too.

A trajectory has the tokens of the policy and those of the observations between its turns. A failed
episode has no score and no token with a loss. Imports torch.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..context import MANIFEST, ONE_PROCESS, Context, Ranks, step_of
from ..engine.rollouts import Segment
from ..environments import journal
from ..environments.episodes import LENGTH, Episode, Key, Player
from ..environments.journal import EpisodeJournal
from ..environments.playing import Playing
from ..environments.tally import Tally
from ..environments.tasks import Task
from ..errors import JobFailed
from ..files.shortage import lacks_space
from ..rewards.prompts import Prompt
from .judge import MOST_FAILURES
from .rollouts import Group, Sampled
from .sampler import Sampler, finite_probabilities, run_of
from .trajectories import Trajectory

_KEPT_CHECKPOINTS = 2  # that the journals of steps are kept for, in case the latest is damaged


class EpisodeSource:
    """Plays the episodes of tasks (rollouts.Source).

    `args`: a GRPOConfig. `option`: that names the environment or agent. `stop`: texts that end a
    turn. Episodes of a step that have ended are in
    a journal, and are not played again after a kill; those of evaluations are. Its state: the
    consecutive groups without an episode.
    """

    can_fail = True

    def __init__(
        self,
        *,
        ctx: Context,
        args: Any,
        model: Any,
        tokenizer: Any,
        sampler: Sampler,
        playing: Playing,
        option: str,
        stop: tuple[str, ...],
        held_out: Sequence[Task] = (),
    ) -> None:
        self.sampler = sampler
        self._ctx = ctx
        self._args = args
        self._model = model
        self._tokenizer = tokenizer
        self._playing = playing
        self._option = option
        self._stop = stop
        self._tasks = playing.tasks
        self._held_out = held_out
        self._failures = 0
        self._has_room = True  # for the journal of this step

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def roll_out(
        self, groups: Sequence[Group], state: Mapping[str, Any], ranks: Ranks = ONE_PROCESS
    ) -> Sampled:
        began, done = time.perf_counter(), int(state["global_step"])
        is_trained = groups[0].step is not None
        tasks = self._tasks if is_trained else self._held_out
        own = groups[run_of(len(groups), ranks)]
        with self._journal(done, ranks) if is_trained else nullcontext() as kept:
            played, player = self._play(tasks, own, done, kept, ranks)
        retried, waited_s = len(player.failed), player.waited_s
        if ranks.size > 1:
            written = [[journal.plain(one) for one in group] for group in played]
            of_ranks = ranks.gather(written)
            played = [
                [journal.episode_of(one, Segment) for one in group]
                for part in of_ranks
                for group in part
            ]
            retried = sum(ranks.gather(retried))
            waited_s = max(ranks.gather(waited_s))
        self._report(tasks, played, done + is_trained)
        found = [
            [self._trajectory(one, tasks[group.row], group.row) for one in episodes]
            for group, episodes in zip(groups, played, strict=True)
        ]
        tally = Tally.of(
            (one for group in played for one in group), retried=retried, waited_s=waited_s
        )
        return Sampled(found, seconds=time.perf_counter() - began, tally=tally)

    def _play(
        self,
        tasks: Sequence[Task],
        groups: Sequence[Group],
        step: int,
        kept: EpisodeJournal | None,
        ranks: Ranks,
    ) -> tuple[list[list[Episode]], Player]:
        """Play groups of episodes; `kept`: the journal of those that end, and of earlier ones.

        Raises Stopped, with one rank.
        """
        length, seed = self._playing.rules.max_turn_tokens, self._args.seed
        of_row = {(group.row, sample): group for group in groups for sample in group.samples}

        def numbers(key: Key, turn: int, context: int = 0) -> NDArray[np.float64]:
            # Without the fields of a first turn, an episode of one turn has the numbers of a
            # completion.
            fields = {"attempt": key.attempt, "turn": turn, "context": context}
            more = {name: value for name, value in fields.items() if value}
            group = of_row[key.task, key.member]
            return group.numbers(key.member, length, seed=seed, **more)

        count = sum(len(group.samples) for group in groups)
        with (
            finite_probabilities(self._model, step),
            self.sampler.dialogues(
                self._tokenizer, stop=self._stop, most_sequences=max(count, 1)
            ) as policy,
        ):
            player = self._playing.player(
                policy,
                numbers=numbers,
                known=None if kept is None else kept.known,
                on_end=None if kept is None else self._keeping(kept, step),
                # Several processes leave a step together, at its end.
                check=self._ctx.check_stop if ranks.size == 1 else None,
            )
            return player.play(tasks, [(group.row, group.samples) for group in groups]), player

    @contextmanager
    def _journal(self, step: int, ranks: Ranks) -> Iterator[EpisodeJournal | None]:
        """Yield the journal of a step, of this rank; None if the disk is full."""
        self._forget_covered()
        self._has_room = True
        header = {
            "weights": _digest(self._model),
            "sources": self._playing.pool.sources,
            "rules": asdict(self._playing.rules),
        }
        try:
            made = EpisodeJournal(self._ctx.run_dir, step, header, Segment, rank=ranks.rank)
        except OSError as error:
            self._without_journal(error, step)
            yield None
            return
        if made.is_outdated:
            self._ctx.emit(
                "warning",
                step=step + 1,
                message=f"{self._option}: its files, the weights or the limits of episodes have "
                "changed: the episodes of this step are played again",
            )
        with made:
            yield made

    def _forget_covered(self) -> None:
        """Remove the journals of steps that checkpoints cover."""
        folders = (self._ctx.run_dir / "checkpoints").glob("checkpoint-*")
        steps = sorted(step_of(one) for one in folders if (one / MANIFEST).exists())
        if len(steps) >= _KEPT_CHECKPOINTS:
            journal.remove_before(self._ctx.run_dir, steps[-_KEPT_CHECKPOINTS])

    def _keeping(self, kept: EpisodeJournal, step: int) -> Callable[[Episode], None]:
        """Return what writes each attempt that ends, while there is room."""

        def keep(episode: Episode) -> None:
            if self._has_room:
                try:
                    kept.add(episode)
                except OSError as error:
                    self._without_journal(error, step)

        return keep

    def _without_journal(self, error: OSError, step: int) -> None:
        """Go on without a journal of this step. Raises what is no full disk."""
        if not lacks_space(error):
            raise error
        self._has_room = False
        self._ctx.emit(
            "warning",
            step=step + 1,
            message=f"{self._option}: episodes are not kept ({error.strerror}): after a kill those "
            "of this step are played again",
        )

    def _trajectory(self, episode: Episode, task: Task, row: int) -> Trajectory:
        prompt = self._prompt(episode.opening, episode.prompt, task, row)
        written, score = episode.written, episode.reward
        if score is None:  # left out: no token of it has a loss
            written, score = [], math.nan
        if not written:
            written = [Segment(ids=prompt.ids[:1], is_given=True)]
        failure = {} if episode.failure is None else {"error": episode.failure.words}
        return Trajectory(
            prompt,
            written,
            text=episode.transcript,
            scores=[score],
            is_cut=episode.reason == LENGTH,
            about={
                "stop": episode.reason,
                "turns": episode.shown_turns,
                "success": episode.success,
                **({"rewards": episode.parts} if episode.parts else {}),
                **failure,
            },
        )

    def _prompt(self, text: str, ids: list[int], task: Task, row: int) -> Prompt:
        return Prompt(
            text=text,
            ids=ids or [min(self.sampler.ends)],
            answer=None,
            row=row,
            is_cut=False,
            columns=task.row,
            messages=None,
        )

    def _report(self, tasks: Sequence[Task], played: Sequence[list[Episode]], step: int) -> None:
        """Report episodes that are left out. Raises JobFailed after too many groups in a row."""
        for group in played:
            failed = [one for one in group if one.failure is not None]
            for one in failed:
                assert one.failure is not None
                self._ctx.emit(
                    "episode_failed",
                    step=step,
                    task=tasks[one.key.task].seed,
                    member=one.key.member,
                    reason=one.failure.reason,
                    message=one.failure.words,
                )
            self._failures = self._failures + 1 if len(failed) == len(group) else 0
            # Rank 0 decides: it alone evaluates, so that the other ranks count less.
            if self._failures == MOST_FAILURES and self._ctx.ranks.rank == 0:
                last = failed[-1].failure
                raise JobFailed(
                    f"{self._option}: must play an episode of one of {MOST_FAILURES} consecutive "
                    f"groups, got none; the last one: {last.words if last else ''}"
                )

    def stored(self, one: Trajectory) -> dict[str, Any]:
        return {
            "prompt": one.prompt.text,
            "prompt_ids": one.prompt.ids,
            "text": one.text,
            "is_cut": one.is_cut,
            "about": dict(one.about),
        }

    def restored(self, row: int, stored: Mapping[str, Any]) -> Trajectory:
        found = dict(stored)
        text, ids = found.pop("prompt"), found.pop("prompt_ids")
        return Trajectory(self._prompt(text, ids, self._tasks[row], row), **found)

    def state(self) -> dict[str, Any]:
        return {"episode_failures": self._failures}

    def load(self, state: Mapping[str, Any]) -> None:
        self._failures = state.get("episode_failures", 0)


def _digest(model: Any) -> str:
    """Return a digest of some values of each weight: any training step changes it."""
    found = 0
    for weight in model.parameters():
        if weight.requires_grad:
            values = weight.detach().flatten()
            some = values[:: max(1, len(values) // 64)].float().cpu().numpy()
            found = zlib.crc32(some.tobytes(), found)
    return f"{found:08x}"
