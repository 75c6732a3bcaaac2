"""Dynamic sampling and experience replay: the groups of a step."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
import tiny
import torch
from breadth import mostly_slow
from group_trainers import trainer
from trl.trainer.utils import RepeatSampler

from warmd.jobs.engine.rollouts import Segment
from warmd.jobs.errors import JobFailed
from warmd.jobs.grpo import completions
from warmd.jobs.grpo.batch import Batch, RewardWeights
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.grpo.replay import ReplayBuffer
from warmd.jobs.grpo.step import Rollouts, Work
from warmd.jobs.grpo.trajectories import Trajectory
from warmd.jobs.rewards.prompts import Prompt
from warmd.jobs.training.epochs import Epochs, drawn_in_sequence

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def spec(**options: Any) -> GrpoSpec:
    small = {
        "samples": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "reward": ["tiny:digit_share"],
        "learning_rate": 1e-2,
        "log_completions": 1,
    }
    return GrpoSpec.parse(small | options)


def trained(folder: Any, **options: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The step events, with all completions, and the weights of a job."""
    job = tiny.surroundings(folder)
    run(spec(**options), job.ctx)
    kept: dict[int, list[dict[str, Any]]] = {}
    for one in completions.read(job.ctx.run_dir / completions.FILE):
        kept.setdefault(one["step"], []).append(one)
    steps = [{**event, "samples": kept[event["step"]]} for event in job.of_type("step")]
    return steps, dict(job.ctx.models.take("demo").model.state_dict())


def prompts_of(step: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(sample["prompt"] for sample in step["samples"]))


# Dynamic sampling.


def test_prompts_come_in_the_order_of_the_epochs_and_none_is_left_out():
    epochs = Epochs(drawn_in_sequence(5, seed=7), 5, 1)
    taken = [epochs.at(place)[1][0] for place in range(15)]
    order = drawn_in_sequence(5, seed=7)
    assert taken == [*order(0), *order(1), *order(2)]
    sampler = RepeatSampler(range(5), mini_repeat_count=1, seed=7)
    assert taken == [*sampler, *sampler, *sampler]  # as with TRL
    resumed = Epochs(drawn_in_sequence(5, seed=7), 5, 1)
    assert [resumed.at(place)[1][0] for place in range(7, 15)] == taken[7:]


@pytest.mark.slow
def test_resampling_changes_nothing_if_every_group_has_different_rewards(tmp_path):
    usual, usual_weights = trained(tmp_path / "usual")
    steps, weights = trained(tmp_path / "resampled", resample=3)
    assert [step["loss"] for step in steps] == [step["loss"] for step in usual]
    assert all(step["resampled"] == 0 for step in steps)
    assert all("resampled" not in step for step in usual)
    assert all(torch.equal(weights[name], usual_weights[name]) for name in weights)


def test_a_group_of_equal_rewards_is_replaced_by_a_group_of_the_next_prompt(tmp_path, monkeypatch):
    share = tiny.digit_share

    def of_even_sums(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
        scores = share(prompts, completions, [])
        return [s if int(a) % 2 == 0 else 0.5 for s, a in zip(scores, answers, strict=True)]

    monkeypatch.setattr(tiny, "digit_share", of_even_sums)
    steps, _ = trained(tmp_path, resample=10, prompts_per_step=2)
    for step in steps:
        sums = [eval(prompt.removesuffix("=")) for prompt in prompts_of(step)]
        assert len(sums) == 2
        assert all(number % 2 == 0 for number in sums)
    assert sum(step["resampled"] for step in steps) > 0


@pytest.mark.slow
def test_groups_are_replaced_in_at_most_the_given_number_of_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "digit_share", lambda prompts, *_: [1.0] * len(prompts))
    steps, _ = trained(tmp_path, resample=3, prompts_per_step=2, steps=2)
    assert [step["resampled"] for step in steps] == [6, 6]
    assert [step["grad_norm"] for step in steps] == [0, 0]


def test_a_spread_of_any_reward_counts_if_each_is_normalized():
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert not RewardWeights([1, 1]).has_spread(scores)
    assert RewardWeights([1, 1], are_for_normalized=True).has_spread(scores)
    assert not RewardWeights([0, 0], are_for_normalized=True).has_spread(scores)
    assert not RewardWeights([1]).has_spread(torch.tensor([[torch.nan], [1.0]]))


# Replay.


PROMPTS = [Prompt(str(row), [row], None, row, False, {}, None) for row in range(5)]


def group(*rewards: float, tokens: int = 5) -> list[Trajectory]:
    return [
        Trajectory(
            PROMPTS[3], [Segment([tokens + number], [0.5], [-1.0 - number])], scores=[reward]
        )
        for number, reward in enumerate(rewards)
    ]


def first_token(one: list[Trajectory]) -> int:
    return one[0].ids[0]


def test_a_group_that_fails_gets_a_stored_success_of_its_prompt():
    buffer = ReplayBuffer(2, RewardWeights([1.0]))
    failing = group(0, 0, 0, 0)
    buffer.apply(3, failing, 0.0)
    assert not failing[0].is_replayed  # nothing is stored yet
    buffer.apply(3, group(0.05, 0, 1, 0, tokens=20), 0.0)
    failing = group(0, 0, 0, 0)
    buffer.apply(3, failing, 0.0)
    assert failing[0].is_replayed
    assert failing[0].segments == [Segment([22], [0.5], [-3.0])]
    assert [one.scores for one in failing] == [[1], [0], [0], [0]]


@pytest.mark.parametrize("rewards", [(0.3, 0.3, 0.3), (0, 0.1, 0.2), (1, 1, 1)])
def test_a_group_that_does_not_fail_is_not_changed(rewards):
    buffer = ReplayBuffer(2, RewardWeights([1.0]))
    buffer.apply(3, group(1, 1, tokens=20), 0.0)
    other = group(*rewards)
    buffer.apply(3, other, 0.0)
    assert not other[0].is_replayed
    assert first_token(other) == 5


def restored(row: int, stored: Mapping[str, Any]) -> Trajectory:
    return Trajectory(PROMPTS[row], **stored)


def test_the_latest_successes_are_kept_and_a_prompt_gets_its_own():
    buffer = ReplayBuffer(2, RewardWeights([1.0]))
    buffer.apply(3, group(1, 1, 1, 0.1, tokens=20), 0.0)  # 20 is the oldest, 23 is no success
    seen = set()
    for drawn in (0.0, 0.49, 0.5, 0.99):
        failing = group(0, 0, 0)
        buffer.apply(3, failing, drawn)
        seen.add(first_token(failing))
    assert seen == {21, 22}
    other = group(0, 0, 0)
    buffer.apply(4, other, 0.0)
    assert not other[0].is_replayed


def test_the_buffer_of_a_checkpoint_is_the_same_as_before():
    buffer = ReplayBuffer(3, RewardWeights([1.0]))
    for tokens in (10, 20, 30):
        buffer.apply(3, group(1, 0, tokens=tokens), 0.0)
    file = io.BytesIO()
    torch.save(buffer.state(lambda one: {"text": one.text}), file)
    file.seek(0)
    again = ReplayBuffer(3, RewardWeights([1.0]))
    again.load_state(torch.load(file, weights_only=True), restored)
    assert again._stored == buffer._stored
    empty = ReplayBuffer(3, RewardWeights([1.0]))
    again.load_state(empty.state(lambda _: {}), restored)
    assert not again._stored


def test_the_buffer_of_an_earlier_version_is_read():
    stored = ReplayBuffer(2, RewardWeights([1.0]))
    former = {
        "rows": torch.tensor([3, 1]),
        "lengths": torch.tensor([2, 1]),
        "scores": torch.tensor([[1.0], [0.5]]),
        "ids": torch.tensor([7, 8, 9]),
        "logps": torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64),
        "entropies": torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64),
    }
    stored.load_state(former, restored)
    kept = [*stored._stored[3], *stored._stored[1]]
    first, second = Segment([7, 8], [0.25, 0.5], [-1.0, -2.0]), Segment([9], [0.75], [-3.0])
    assert kept == [
        Trajectory(PROMPTS[3], [first], scores=[1.0]),
        Trajectory(PROMPTS[1], [second], scores=[0.5]),
    ]


@pytest.mark.parametrize(
    "loss", mostly_slow(["dapo", "grpo", "cispo", "sapo", "vespo"], but=["dapo"])
)
def test_the_loss_of_a_replayed_completion_is_trls_with_its_old_log_probabilities(tmp_path, loss):
    model = tiny.model()
    options = {"loss_type": loss, "temperature": 0.8}
    # TRL's last: arguments that are made later reset the state that its trainer uses.
    ours = trainer("warmd", tmp_path, model, **options)
    theirs = trainer("trl", tmp_path, model, **options)
    ids = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(6) < torch.tensor([[6], [3], [5], [2]])
    advantages = torch.tensor([1.5, -0.5, 0.0, -1.0])
    batch = {
        "prompt_ids": ids[:1, :3].expand(4, 3),
        "prompt_mask": torch.ones(4, 3, dtype=torch.int64),
        "completion_ids": ids[:, 3:] * mask,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    theirs.current_gradient_accumulation_steps = 1
    theirs.model.train()
    with torch.no_grad():
        inputs = [
            torch.cat([batch[f"prompt_{n}"], batch[f"completion_{n}"]], 1) for n in ("ids", "mask")
        ]
        logps, *_ = theirs._get_per_token_logps_and_entropies(theirs.model, *inputs, 6)
    behavior = logps - 0.4 * torch.rand(4, 6)
    old = torch.cat([behavior[:1], logps[1:]])
    expected = theirs._compute_loss(theirs.model, {**batch, "old_per_token_logps": old})
    expected.backward()
    is_replayed = torch.tensor([True, False, False, False])
    made = Batch(
        prompts=batch["prompt_ids"].tolist(),
        completions=[row[kept].tolist() for row, kept in zip(ids[:, 3:], mask, strict=True)],
        mask=mask.long(),
        advantages=advantages,
        entropies=torch.zeros(4, 6),
        replayed=behavior * is_replayed[:, None],
        is_replayed=is_replayed,
    )
    work = Work(Rollouts(made, {}, {}, {}, 0.0, is_flat=False), is_first=True, began=0.0)
    found = torch.tensor(0.0)
    for part in ours.task.loss(work):
        if part.value.requires_grad:
            part.value.backward()
        else:
            found = part.value
    torch.testing.assert_close(found, expected.detach())
    for our, their in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-4, atol=1e-6)


def test_replay_is_reported_in_the_steps_of_a_job(tmp_path, monkeypatch):
    seen: set[str] = set()

    def first_try_only(
        prompts: list[str], completions: list[str], answers: list[str]
    ) -> list[float]:
        scores = [float(number == 0 and prompts[0] not in seen) for number in range(len(prompts))]
        seen.update(prompts)
        return scores

    monkeypatch.setattr(tiny, "digit_share", first_try_only)
    steps, _ = trained(tmp_path, replay=8, samples=3, epochs=2)
    assert [step["replayed"] for step in steps] == [0, 0, 0, 1, 1, 1]
    assert [step["reward"] for step in steps] == [0.25] * 6
    assert all(step["grad_norm"] > 0 for step in steps)


def test_replay_is_refused_for_a_model_that_cannot_be_packed(tmp_path):
    job = tiny.surroundings(tmp_path, tiny.model(dropout=0.1))
    with pytest.raises(JobFailed, match=r"^replay: must be 0 for a llama of this config, got 8$"):
        run(spec(replay=8), job.ctx)
