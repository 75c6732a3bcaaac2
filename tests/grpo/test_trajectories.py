"""Trajectories: what the model wrote is learned, what it was given is only read."""

from __future__ import annotations

import pytest
import torch

from warmd.jobs.engine.rollouts import Segment
from warmd.jobs.grpo.batch import Batch
from warmd.jobs.grpo.metrics import of_lengths
from warmd.jobs.grpo.trajectories import Trajectory
from warmd.jobs.rewards.prompts import Prompt

PROMPT = Prompt("1+1=", [5, 6], None, 0, False, {}, None)
TURNS = [
    Segment([7, 8], [0.1, 0.2], [-1.0, -2.0]),
    Segment([20, 21, 22], is_given=True),  # of a tool
    Segment([9], [0.3], [-3.0]),
]
SINGLE = [Segment([10, 2], [0.4, 0.5], [-4.0, -5.0])]


def batch(*, hides_cut: bool = False) -> Batch:
    return Batch.of(
        [Trajectory(PROMPT, TURNS, is_cut=True), Trajectory(PROMPT, SINGLE)],
        torch.tensor([1.0, -1.0]),
        hides_cut=hides_cut,
        has_sampled=True,
        device=torch.device("cpu"),
    )


def test_tokens_that_the_model_was_given_are_in_a_sequence_without_a_weight():
    made = batch()
    turns, single = made.sequences
    assert turns.tokens == (5, 6, 7, 8, 20, 21, 22, 9)
    assert list(turns.weights) == [0, 0, 1, 1, 0, 0, 0, 1]
    assert single.tokens == (5, 6, 10, 2)
    assert list(single.weights) == [0, 0, 1, 1]
    assert made.mask.tolist() == [[1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0]]
    assert made.entropies[0].tolist() == pytest.approx([0.1, 0.2, 0, 0, 0, 0.3])
    sampled = torch.tensor([[-1, -2, 0, 0, 0, -3], [-4, -5, 0, 0, 0, 0]])
    torch.testing.assert_close(made.sampled, sampled.float())


def test_a_trajectory_that_was_cut_can_be_left_out():
    made = batch(hides_cut=True)
    assert [one.row for one in made.sequences] == [1]
    assert made.mask[0].tolist() == [0] * 6


def test_the_lengths_of_completions_are_what_the_model_wrote():
    found = of_lengths([Trajectory(PROMPT, TURNS, is_cut=True), Trajectory(PROMPT, SINGLE)])
    assert found["completions/max_length"] == 3
    assert found["completions/clipped_ratio"] == 0.5
