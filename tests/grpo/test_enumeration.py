"""The gradient of GRPO on episodes against an enumeration of all episodes of a small game.

With the advantages r - mean of groups of G, and the mean over the N tokens that the policy wrote,
the expected gradient of the loss is -(G - 1)/N times that of the expected reward J, which is
differentiated here directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import combinations, product
from typing import Any

import pytest
import tiny
import torch
from group_trainers import small
from trl.trainer.grpo_config import GRPOConfig

from warmd.jobs.context import ONE_PROCESS, Ranks
from warmd.jobs.engine.rollouts import Segment
from warmd.jobs.grpo.rollouts import Group, GroupSampler, Sampled
from warmd.jobs.grpo.step import Reinforcement
from warmd.jobs.grpo.trajectories import Trajectory
from warmd.jobs.rewards.prompts import Prompt
from warmd.jobs.sequences.scoring import Scorer
from warmd.jobs.training.arguments import KEPT_ACTIVATIONS

ACTIONS = 6  # tokens, in each of two turns
PROMPT = [3, 1]
GROUP = 2

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def observation(action: int) -> list[int]:
    """What the environment answers: another number of tokens for some actions."""
    return [(2 * action + 1) % ACTIONS, 4] if action % 2 else [(action + 3) % ACTIONS]


def reward(first: int, second: int | None) -> float:
    return float((first * 5 + (7 if second is None else second * 3)) % 11) / 4


EPISODES = [*product(range(ACTIONS), range(ACTIONS))]


def written(first: int, second: int, case: str) -> list[Segment]:
    given = observation(first)
    if case == "two contexts":
        return [Segment([first], [0.0]), Segment([second], [0.0], prompt=[5, *given])]
    between = Segment(given, [0.0] * len(given))
    if case == "one context":
        between = Segment(given, is_given=True)
    return [Segment([first], [0.0]), between, Segment([second], [0.0])]


class Played:
    """A rollouts.Source whose groups are the given ones."""

    sampler: Any = type("None", (), {"is_int8": False, "rollout_dtype": "float32"})
    num_tasks, num_held_out, can_fail = 1, 0, False

    def __init__(self, case: str) -> None:
        self.next: Sequence[tuple[int, int]] = ()
        self._case = case

    def roll_out(
        self, groups: Sequence[Group], state: Mapping[str, Any], ranks: Ranks = ONE_PROCESS
    ) -> Sampled:
        prompt = Prompt("?", PROMPT, None, 0, False, {}, None)
        found = [
            Trajectory(prompt, written(*one, self._case), scores=[reward(*one)])
            for one in self.next
        ]
        return Sampled([found])

    def stored(self, one: Trajectory) -> dict[str, Any]:
        raise NotImplementedError  # for a replay buffer, which this job does not have

    def restored(self, row: int, stored: Mapping[str, Any]) -> Trajectory:
        raise NotImplementedError  # the same

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


def chances(model: Any, case: str) -> torch.Tensor:
    """The probability of each episode, (ACTIONS², ), with a gradient, in the model's precision."""

    def logp(before: Sequence[int], token: int) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=torch.tensor([before])).logits[0, -1]
        return logits.log_softmax(-1)[token]

    found = []
    for first, second in EPISODES:
        seen = [*PROMPT, first] if case != "two contexts" else [5]
        found.append(logp(PROMPT, first) + logp([*seen, *observation(first)], second))
    return torch.stack(found).exp()


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def expected_gradients(
    model: Any, task: Any, played: Played, pairs: Iterator[Any], weights: torch.Tensor
) -> torch.Tensor:
    """The sum, in float64, of the gradients of the losses of all groups by their probabilities."""
    total = torch.zeros(model.num_parameters(), dtype=torch.float64)
    for (i, one), (j, other) in pairs:
        played.next = (one, other)
        (work,) = next(task.batches(0))
        for part in task.loss(work):
            if part.value.requires_grad:
                model.zero_grad()
                part.value.backward()
                total += gradients(model) * (weights[i] * weights[j])
    return total


OTHERS = pytest.mark.nightly(
    part="episodes", catches="a gradient of episodes that is biased, or a test that cannot notice"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "two contexts",
        *(pytest.param(case, marks=OTHERS) for case in ("one context", "without a mask")),
    ],
)
def test_the_expected_gradient_is_that_of_the_expected_reward(tmp_path, case):
    model = small("llama", vocab_size=ACTIONS, bos_token_id=1, eos_token_id=2)
    model = model.requires_grad_(True).train()
    exact = deepcopy(model).double()
    of_all = chances(exact, case)
    assert float(of_all.detach().sum()) == pytest.approx(1, abs=1e-5)
    rewards = torch.tensor([reward(*one) for one in EPISODES])
    (-(GROUP - 1) / (GROUP * 2) * (of_all * rewards).sum()).backward()
    wanted = gradients(exact)

    config = GRPOConfig(
        output_dir=str(tmp_path),
        num_generations=GROUP,
        per_device_train_batch_size=GROUP,
        scale_rewards="none",
        loss_type="dapo",
        max_completion_length=8,
        reward_weights=[1.0],
        max_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
        **KEPT_ACTIVATIONS,
    )
    played = Played(case)
    task = Reinforcement(
        ctx=tiny.surroundings(tmp_path / "run", model).ctx,
        args=config,
        model=model,
        reference=None,
        groups=GroupSampler(played, config),
        scorer=Scorer(
            most_tokens=4096, pad_id=0, rows=GROUP, temperature=1.0, router_coefficient=0.0
        ),
        rewards=["game"],
        data={},
    )
    # In either order a pair has the same gradient; two equal episodes have none.
    pairs = combinations(enumerate(EPISODES), 2)
    found = expected_gradients(model, task, played, pairs, of_all.detach() * 2**0.5)
    difference = (found - wanted).norm() / wanted.norm()
    if case != "without a mask":
        assert difference < 1e-6
    else:  # observations are learned, too: the test would notice
        assert difference > 0.05
