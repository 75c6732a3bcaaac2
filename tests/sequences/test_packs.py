"""Packs: each sequence is learned exactly once, whatever the lengths are."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import dpo_jobs
import group_trainers
import pytest
import sft_jobs
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from warmd.jobs.context import OneProcess
from warmd.jobs.dpo.dataset import Example as PreferenceExample
from warmd.jobs.dpo.task import MicroBatch as PreferenceBatch
from warmd.jobs.grpo.batch import Batch
from warmd.jobs.grpo.step import Rollouts, Work
from warmd.jobs.sequences.packs import Pack, split
from warmd.jobs.sequences.scoring import Scorer
from warmd.jobs.sequences.sequence import Sequence as Tokens
from warmd.jobs.sft.dataset import Example as RowExample
from warmd.jobs.sft.task import MicroBatch as RowBatch
from warmd.jobs.training.deprecations import no_deprecations
from warmd.jobs.training.loop import Training

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

# Few tokens, so that prompts and completions are often equal; 2 is the end token.
TOKENS = st.sampled_from([2, 5, 79])
PROMPTS = st.lists(TOKENS, min_size=1, max_size=2)
COMPLETIONS = st.lists(TOKENS, max_size=2)
PROCESSES = st.integers(1, 3)
ROOM = st.sampled_from([1, 4, 1000])  # of a pack


class Shared:
    """What the ranks of a test exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Any] = [None] * size


class ThreadRank(OneProcess):
    """A rank that is a thread of the test."""

    def __init__(self, rank: int, size: int, shared: Shared) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def sum(self, tensor: torch.Tensor) -> None:
        self._shared.given[self.rank] = tensor.clone()
        self._shared.barrier.wait()
        total = torch.stack(self._shared.given).sum(0)
        self._shared.barrier.wait()
        tensor.copy_(total)


def in_ranks(trainers: Sequence[Any], learn: Callable[[Any], torch.Tensor]) -> tuple[float, Any]:
    """Run a step on all ranks at once; return rank 0's loss and the sums of the gradients."""
    shared = Shared(len(trainers))

    def of_rank(rank: int) -> torch.Tensor:
        made = trainers[rank]
        ranks = ThreadRank(rank, len(trainers), shared)
        if isinstance(made, Training):
            made.task._ctx = replace(made.task._ctx, ranks=ranks)  # type: ignore[attr-defined]
        else:
            made.ranks = ranks
        made.model.train()
        made.model.zero_grad()
        try:
            loss = learn(made)
            if loss.requires_grad:
                loss.backward()
        except BaseException:
            shared.barrier.abort()
            raise
        return loss.detach()

    with ThreadPoolExecutor(len(trainers)) as pool:
        losses = list(pool.map(of_rank, range(len(trainers))))
    return float(losses[0]), [
        sum(torch.zeros_like(w) if w.grad is None else w.grad for w in weights)
        for weights in zip(*(made.model.parameters() for made in trainers), strict=True)
    ]


def learn_parts(made: Training, micro_batch: Any) -> torch.Tensor:
    """Add the gradients of a micro-batch to the weights, and return its loss, over all ranks."""
    total = torch.zeros(1)
    for part in made.task.loss(micro_batch):
        if part.value.requires_grad:
            part.value.backward()
        total += float(part.value.detach()) if part.amount is None else part.amount
    made.task._ctx.ranks.sum(total)  # type: ignore[attr-defined]
    return total[0]


def assert_close(ours: tuple[float, Any], theirs: tuple[float, Any]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=2e-5, abs=2e-6)
    largest = max(1e-3, *(float(gradient.abs().max()) for gradient in theirs[1]))
    for our, their in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(our, their, rtol=2e-5, atol=2e-5 * largest)


def completion(row: int, prompt: Sequence[int], ids: Sequence[int]) -> Tokens:
    weights = (0.0,) * len(prompt) + (1.0,) * len(ids)
    return Tokens((*prompt, *ids), weights, row, shared=len(prompt))


@given(
    st.lists(st.lists(st.tuples(PROMPTS, COMPLETIONS), min_size=1, max_size=2), max_size=9),
    PROCESSES,
    ROOM,
)
def test_every_sample_is_in_exactly_one_pack_of_one_rank(drawn, processes, room):
    numbers = iter(range(100))
    groups = [
        tuple(completion(next(numbers), prompt, ids) for prompt, ids in group) for group in drawn
    ]
    found = [
        sample.row
        for rank in range(processes)
        for pack in split(groups, room, ThreadRank(rank, processes, Shared(1)))
        for sample in pack
    ]
    assert sorted(found) == list(range(sum(map(len, groups))))


def test_the_ranks_have_about_as_many_tokens_each():
    groups = [(completion(number, [number] * 9, [5] * 8),) for number in range(12)]
    sizes = [len(split(groups, 1000, ThreadRank(rank, 3, Shared(1)))[0]) for rank in range(3)]
    assert sizes == [4, 4, 4]


def test_a_first_token_with_a_weight_is_refused():
    with pytest.raises(ValueError, match="row 7: nothing predicts the first token"):
        Pack([completion(7, [], [5, 2])])


# Weights anywhere in a sequence: of the shared tokens, before and after tokens without one.
SEQUENCES = [
    Tokens((5, 6, 7, 8, 9), (0, 0, 1, 1, 0.5), row=0, shared=3),
    Tokens((5, 6, 7, 10, 11, 12, 13), (0, 0, 0, 1, 0, 0, 2), row=1, column=-3, shared=3),
    Tokens((20, 21, 22, 23), (0, 1, 0, 0), row=1, column=4),
    Tokens((5, 6, 7), (0, 1, 0), row=2, shared=3),
]


@pytest.mark.parametrize("keeps_all_logits", [True, False])
@pytest.mark.parametrize("most_tokens", [None, 1, 9, 1000])
def test_a_token_is_scored_in_its_place_by_all_tokens_before_it(
    most_tokens, keeps_all_logits, monkeypatch
):
    if not keeps_all_logits:
        monkeypatch.setattr("warmd.jobs.sequences.padded.CHUNK_BYTES", 1)
    model = group_trainers.small("qwen2")
    scorer = Scorer(most_tokens=most_tokens, pad_id=0)
    found: dict[tuple[int, int], tuple[float, float]] = {}
    expected: dict[tuple[int, int], Any] = {}
    with torch.no_grad():
        for part in scorer.scored(model, scorer.parts([(one,) for one in SEQUENCES], "cpu")):
            places = zip(*(values.tolist() for values in part.at), strict=True)
            weights, logps = part.part.weights.tolist(), part.scores.logps.tolist()
            found |= dict(zip(places, zip(weights, logps, strict=True), strict=True))
        for one in SEQUENCES:
            alone = model(torch.tensor([one.tokens])).logits.log_softmax(-1)[0]
            for t, weight in enumerate(one.weights):
                if weight:
                    value = float(alone[t - 1, one.tokens[t]])
                    expected[one.row, one.column + t] = (weight, pytest.approx(value, abs=1e-5))
    assert found == expected


# Through the trainers.


def padded(rows: Sequence[Sequence[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of rows with padding on a side, and their mask."""
    longest = max(map(len, rows))
    gaps = [longest - len(row) for row in rows]
    masks = [[1] * len(row) for row in rows]
    if side == "left":
        pairs = [
            ([0] * gap + [*row], [0] * gap + mask)
            for row, mask, gap in zip(rows, masks, gaps, strict=True)
        ]
    else:
        pairs = [
            ([*row] + [0] * gap, mask + [0] * gap)
            for row, mask, gap in zip(rows, masks, gaps, strict=True)
        ]
    ids, kept = zip(*pairs, strict=True)
    return torch.tensor(ids), torch.tensor(kept)


def made_last_first(make: Callable[[str], Any]) -> list[Any]:
    """Return TRL's trainer, made last, and the trainings of three ranks.

    Arguments that are made later reset the state that a trainer of TRL uses.
    """
    ours = [make("warmd") for _ in range(3)]
    return [make("trl"), *ours]


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """TRL's trainer, and those of three ranks, with the same weights and a KL term."""
    folder = tmp_path_factory.mktemp("grpo")
    model = group_trainers.small("llama")
    made = made_last_first(lambda side: group_trainers.trainer(side, folder, model, beta=0.1))
    made[0].current_gradient_accumulation_steps = 1
    return made


def learn_group(
    rows: Sequence[tuple[list[int], list[int]]], room: int
) -> Callable[[Any], torch.Tensor]:
    advantages = torch.linspace(-1, 1.5, len(rows))
    prompts, prompt_mask = padded([prompt for prompt, _ in rows], "left")
    completions, completion_mask = padded([ids for _, ids in rows], "right")

    def learn(made: Any) -> torch.Tensor:
        if isinstance(made, Training):
            task: Any = made.task
            task.scorer.most_tokens = room
            batch = Batch(
                prompts=[prompt for prompt, _ in rows],
                completions=[ids for _, ids in rows],
                mask=completion_mask,
                advantages=advantages,
                entropies=torch.zeros(completions.shape),
            )
            rollouts = Rollouts(task._with_reference(batch), {}, {}, {}, 0.0, is_flat=False)
            return learn_parts(made, Work(rollouts, is_first=True, began=0.0))
        inputs = {
            "prompt_ids": prompts,
            "prompt_mask": prompt_mask,
            "completion_ids": completions,
            "completion_mask": completion_mask,
            "advantages": advantages,
            "num_items_in_batch": completion_mask.sum(),
        }
        ids = torch.cat([prompts, completions], 1)
        mask = torch.cat([prompt_mask, completion_mask], 1)
        with torch.no_grad():
            inputs["ref_per_token_logps"] = made._get_per_token_logps_and_entropies(
                made.ref_model, ids, mask, completions.shape[1]
            )[0]
        return made.compute_loss(made.model, inputs)  # type: ignore[no-any-return]

    return learn


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(PROMPTS, COMPLETIONS), min_size=2, max_size=6).filter(
        lambda rows: any(completion for _, completion in rows)
    ),
    PROCESSES,
    ROOM,
)
def test_grpo_learns_each_completion_once_in_any_division(grpo, rows, processes, room):
    theirs = in_ranks(grpo[:1], learn_group(rows, room))
    assert_close(in_ranks(grpo[1 : 1 + processes], learn_group(rows, room)), theirs)


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """TRL's trainer, and those of three ranks: policies alike, away from the reference."""
    folder = tmp_path_factory.mktemp("dpo")
    model = sft_jobs.small("llama", tie_word_embeddings=True)
    made = made_last_first(lambda side: dpo_jobs.trainer(side, folder, model))
    for one in made:
        if isinstance(one, Training):
            one.task.before_update()  # type: ignore[attr-defined]
        else:
            one.current_gradient_accumulation_steps = 1
        torch.manual_seed(0)
        for weight in one.model.parameters():
            weight.data += 0.05 * torch.randn_like(weight)
    return made


def learn_pairs(rows: Sequence[dict[str, Any]], room: int) -> Callable[[Any], torch.Tensor]:
    def learn(made: Any) -> torch.Tensor:
        if isinstance(made, Training):
            made.task.scorer.most_tokens = room  # type: ignore[attr-defined]
            pairs = [
                PreferenceExample(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"])
                for row in rows
            ]
            return learn_parts(made, PreferenceBatch(pairs, 1))
        with no_deprecations():
            inputs = made._prepare_inputs(made.data_collator(copy.deepcopy(list(rows))))
            return made.compute_loss(made.model, inputs)  # type: ignore[no-any-return]

    return learn


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.lists(TOKENS, max_size=2),  # DPO may have no prompt
            st.lists(TOKENS, min_size=1, max_size=2),
            st.lists(TOKENS, min_size=1, max_size=2),
        ),
        min_size=1,
        max_size=4,
    ),
    PROCESSES,
    ROOM,
)
def test_dpo_learns_each_pair_once_in_any_division(dpo, pairs, processes, room):
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [dict(zip(names, pair, strict=True)) for pair in pairs]
    theirs = in_ranks(dpo[:1], learn_pairs(rows, room))
    assert_close(in_ranks(dpo[1 : 1 + processes], learn_pairs(rows, room)), theirs)


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """TRL's trainer, and those of three ranks, with the same weights."""
    folder = tmp_path_factory.mktemp("sft")
    model = sft_jobs.small("llama", tie_word_embeddings=True)
    return made_last_first(lambda side: sft_jobs.trainer(side, folder, model, "text", how={}))


def learn_rows(rows: Sequence[RowExample], room: int) -> Callable[[Any], torch.Tensor]:
    def learn(made: Any) -> torch.Tensor:
        learned = sum(row.num_learned for row in rows)
        if isinstance(made, Training):
            made.task.scorer.most_tokens = room  # type: ignore[attr-defined]
            return learn_parts(made, RowBatch(rows, learned, 1.0))
        inputs = made._prepare_inputs(made.data_collator([row.stock() for row in rows]))
        return made.compute_loss(made.model, inputs, num_items_in_batch=learned)  # type: ignore[no-any-return]

    return learn


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=3), min_size=1, max_size=5
    ).filter(lambda rows: any(is_learned for row in rows for _, is_learned in row[1:])),
    PROCESSES,
    ROOM,
)
def test_sft_learns_each_row_once_in_any_division(sft, drawn, processes, room):
    rows = [
        RowExample([token for token, _ in row], [int(is_learned) for _, is_learned in row])
        for row in drawn
    ]
    theirs = in_ranks(sft[:1], learn_rows(rows, room))
    assert_close(in_ranks(sft[1 : 1 + processes], learn_rows(rows, room)), theirs)
