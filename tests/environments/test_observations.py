"""What an environment may answer: text, messages, parts of text; all else is named."""

from __future__ import annotations

from typing import Any

import pytest

from warmd.jobs.environments.classes import GymnasiumEnvironment
from warmd.jobs.environments.episodes import Episode, Key
from warmd.jobs.environments.interface import EnvironmentFault

TEXT = {"type": "text", "text": "a"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Answering:
    """Answers each step with what it was made with."""

    def __init__(self, observation: Any) -> None:
        self.observation = observation

    def reset(self) -> tuple[Any, dict[str, Any]]:
        return self.observation, {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation, 0.0, False, False, {}


def observed(observation: Any) -> Any:
    return GymnasiumEnvironment(Answering(observation)).act("")["observation"]


MESSAGE = {"role": "user", "content": "7?"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", "text"),
        (None, None),
        (MESSAGE, [MESSAGE]),
        ([MESSAGE, MESSAGE], [MESSAGE, MESSAGE]),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            [{"role": "user", "content": "a"}],
        ),
        ([TEXT, PICTURE], [{"role": "user", "content": [TEXT, PICTURE]}]),
    ],
)
def test_text_messages_and_parts_of_text_are_observations(given, expected):
    assert observed(given) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, "must return text, a message or a list of messages as the observation, got int 7"),
        ([MESSAGE, {"content": "7?"}], r"the observation of step\[1\]"),
        ({"role": "oracle", "content": "7?"}, "role: must be one of"),
        ([{"type": "image", "image": "a.png"}], "must be of type text .* or image_url, got image"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "url begins with data:image/, got"),
        ([], "got an empty list"),
    ],
)
def test_other_observations_are_refused_by_name(given, words):
    with pytest.raises(EnvironmentFault, match=words):
        observed(given)


def test_an_episode_reads_as_text_with_the_roles_of_messages():
    result = {"role": "tool", "name": "read", "content": "7"}
    episode = Episode(Key(0, 0, 0), messages=[[MESSAGE], "I read.", [result], "It is 7."])
    assert episode.opening == "\n[user] 7?\n"
    assert episode.transcript == "I read.\n[tool] 7\nIt is 7."
