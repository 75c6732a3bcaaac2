"""Sums over episodes, for the event of a training step."""

from __future__ import annotations

from warmd.jobs.engine.rollouts import Segment
from warmd.jobs.environments.episodes import Episode, Key
from warmd.jobs.environments.tally import Tally


def tally(*rewards: dict[str, float]) -> Tally:
    found = []
    for number, parts in enumerate(rewards):
        written = [Segment([1]), Segment([2], prompt=[3])]
        found.append(
            Episode(Key(number, 0, 0), written=written, parts=parts, turns=2, reason="returned")
        )
    return Tally.of(found, retried=0, waited_s=0.0)


def test_parts_of_rewards_are_means_over_the_episodes_that_have_them():
    shown = tally({"a": 1.0, "b": -3.0}, {"a": 2.0, "b": -1.0}, {}).fields()
    assert shown["parts"] == {"a": 1.5, "b": -2.0}
    assert shown["contexts"] == 2


def test_tallies_of_several_rounds_are_added_also_where_rewards_are_negative():
    both = tally({"a": 0.0, "b": -3.0}) + tally({"a": -1.0, "b": -1.0})
    assert both.fields() == tally({"a": 0.0, "b": -3.0}, {"a": -1.0, "b": -1.0}).fields()
    assert both.fields()["parts"] == {"a": -0.5, "b": -2.0}
