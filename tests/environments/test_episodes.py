"""Episodes of a policy in environments: what is written, how they end, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from engines import make

from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.dialogues import Dialogues
from warmd.jobs.engine.rollouts import Drawing, Segment
from warmd.jobs.engine.sampling import BatchSampler
from warmd.jobs.environments.environment_player import EnvironmentPlayer
from warmd.jobs.environments.episodes import Episode, Key, Rules
from warmd.jobs.environments.journal import EpisodeJournal, remove, remove_before
from warmd.jobs.environments.pool import Limits, Pool
from warmd.jobs.environments.tasks import Task
from warmd.jobs.environments.turns import RawTurns
from warmd.jobs.keyed_numbers import uniform

FOLDER = str(Path(__file__).parent)
END = 5


@pytest.fixture(scope="module")
def runner() -> Any:
    return Decoder(make("Qwen2", vocab_size=len(tiny.SPECIAL) + len(tiny.CHARACTERS)))


def numbers(key: Key, turn: int) -> Any:
    return uniform(4, **key._asdict(), turn=turn)


def play(
    runner: Any,
    tasks: list[Task],
    environment: str = "games:HigherLower",
    *,
    members: int = 2,
    size: int = 4,
    known: dict[Key, Episode] | None = None,
    on_end: Callable[[Episode], None] | None = None,
    **rules: Any,
) -> tuple[list[list[Episode]], EnvironmentPlayer]:
    how = Drawing(sampler=BatchSampler(), temperature=1.0, max_new_tokens=0, ends=frozenset([END]))
    tokenizer = tiny.tokenizer()
    # Every token may end a turn: a random model seldom writes the one that does.
    stop = tuple("0123456789")
    limits = {"max_turn_tokens": 4, "max_tokens": 60, **rules}
    with Pool(environment, [FOLDER], size=size, limits=Limits(step_s=20)) as pool:
        policy = Dialogues(runner, how, tokenizer, most_sequences=8, stop=stop)
        player = EnvironmentPlayer(
            *(pool, policy, RawTurns(tokenizer), Rules(**limits)),
            numbers=numbers,
            known=known,
            on_end=on_end,
        )
        groups = [(number, range(members)) for number in range(len(tasks))]
        return player.play(tasks, groups), player


def plain(groups: list[list[Episode]]) -> list[Any]:
    return [
        (
            *(one.key, one.prompt, one.messages, one.reward, one.success, one.turns, one.reason),
            [(segment.ids, segment.entropies, segment.is_given) for segment in one.written],
        )
        for group in groups
        for one in group
    ]


TASKS = [Task(seed=seed, row={}) for seed in range(3)]


def test_an_episode_has_the_turns_of_the_policy_and_what_it_was_told(runner):
    groups, _ = play(runner, TASKS)
    tokenizer = tiny.tokenizer()
    assert [[one.key for one in group] for group in groups] == [
        [Key(task, member, 0) for member in range(2)] for task in range(3)
    ]
    for group in groups:
        for one in group:
            assert one.prompt == tokenizer("?=")["input_ids"]
            written = [segment for segment in one.written if not segment.is_given]
            told = [segment for segment in one.written if segment.is_given]
            assert len(written) == one.turns
            texts = [text for text in one.messages[1:] if text in ("low=", "high=")]
            assert [segment.ids for segment in told] == [
                tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
            ]
            assert one.failure is None
            assert one.reward in (0.0, 1.0)
            if one.reason == "terminated":
                assert (one.reward, one.success) == (1.0, True)
            elif one.reason == "truncated":
                assert (one.reward, one.turns) == (0.0, 4)
            else:
                assert one.reason == "length"
                assert len(written[-1].ids) == 4


@pytest.mark.slow
def test_results_do_not_depend_on_how_many_play_and_which_is_faster(runner):
    expected = plain(play(runner, TASKS, size=1)[0])
    for size in (2, 6):
        assert plain(play(runner, TASKS, "games:Sleepy", size=size)[0]) == expected


def test_an_episode_ends_at_its_number_of_turns(runner):
    groups, _ = play(runner, TASKS, max_turns=1)
    reasons = {one.reason for group in groups for one in group}
    assert reasons <= {"max_turns", "terminated", "length"}
    assert all(one.turns == 1 for group in groups for one in group)


def test_an_episode_ends_where_its_tokens_do(runner):
    groups, _ = play(runner, TASKS, max_tokens=3)
    for group in groups:
        for one in group:
            assert sum(len(segment.ids) for segment in one.written) <= 3
            assert one.reward is not None


def test_a_failed_episode_begins_again_with_other_numbers_and_is_else_left_out(runner, tmp_path):
    tasks = [
        Task(seed=1, row={"once": str(tmp_path / "marker")}),
        Task(seed=1, row={"always": True}),
        Task(seed=1, row={}),
    ]
    groups, player = play(runner, tasks, "games:Unlucky", members=1)
    (first,), (second,), (third,) = groups
    assert (first.key.attempt, first.failure) == (1, None)
    assert first.reward is not None
    assert (second.key.attempt, second.reward, second.reason) == (1, None, "environment_error")
    assert second.failure is not None
    assert second.failure.words == "RuntimeError: no table is free"
    assert (third.key.attempt, third.failure) == (0, None)
    assert sorted(one.key for one in player.failed) == [Key(0, 0, 0), Key(1, 0, 0)]


def test_episodes_of_a_journal_are_not_played_again_and_are_the_same(runner, tmp_path):
    tasks = [*TASKS, Task(seed=9, row={"always": True})]
    header = {"weights": "a"}
    with EpisodeJournal(tmp_path, 3, header, Segment) as journal:
        expected, player = play(runner, tasks, "games:Unlucky", on_end=journal.add)
    path = tmp_path / "rollouts" / "3.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 1 + 4 * 2 + len(player.failed)
    for kept in (len(whole), len(b"".join(lines[:4])), len(b"".join(lines[:5])) - 7):
        path.write_bytes(whole[:kept])
        played: list[Key] = []

        with EpisodeJournal(tmp_path, 3, header, Segment) as journal:
            known = set(journal.known)

            def note(
                one: Episode, played: list[Key] = played, to: EpisodeJournal = journal
            ) -> None:
                played.append(one.key)
                to.add(one)

            groups, _ = play(runner, tasks, "games:Unlucky", known=journal.known, on_end=note)
        assert plain(groups) == plain(expected)
        assert known.isdisjoint(played)
        assert len(known) + len(played) == len(lines) - 1
        assert sorted(path.read_bytes().splitlines()[0:1]) == sorted(lines[0].splitlines())


def test_a_journal_of_other_weights_is_begun_anew(runner, tmp_path):
    with EpisodeJournal(tmp_path, 3, {"weights": "a"}, Segment) as journal:
        play(runner, TASKS, on_end=journal.add)
    with EpisodeJournal(tmp_path, 3, {"weights": "b"}, Segment) as journal:
        assert journal.is_outdated
        assert journal.known == {}
    assert len((tmp_path / "rollouts" / "3.jsonl").read_bytes().splitlines()) == 1
    remove_before(tmp_path, 3)
    assert (tmp_path / "rollouts" / "3.jsonl").exists()
    with EpisodeJournal(tmp_path, 3, {"weights": "b"}, Segment, rank=1):
        assert (tmp_path / "rollouts" / "3-1.jsonl").exists()
    remove_before(tmp_path, 4)
    # The folder stays: another process of the job may be about to create its file.
    assert list((tmp_path / "rollouts").iterdir()) == []
    remove(tmp_path, 4)
    assert not (tmp_path / "rollouts").exists()
