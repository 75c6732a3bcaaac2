"""A step of GRPO, from top to bottom (loop.Task): roll out, score, advantages, loss, update.

GRPO: Shao et al. 2024, arXiv:2402.03300.

    Reinforcement.batches   groups of completions of the policy, scored by the rewards (`rollouts`)
                            their advantages and tokens (`batch`)
    Reinforcement.loss      log-probabilities (`sequences.scoring`), the loss (`losses.grpo`)
    training.loop           gradients, clipping, update of the weights

With packs, a group shares its prompt, and completions without a gradient are not computed. With
num_iterations > 1, later steps learn from the same batch; its old log-probabilities are those of
the first one. Imports torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig

from ..context import Context
from ..errors import JobFailed
from ..files.shortage import lacks_space
from ..losses.grpo import (
    Objective,
    Step,
    Terms,
    Tokens,
    grpo_loss,
    importance_weights,
    mean_entropy,
)
from ..sequences.packs import FIXED
from ..sequences.padding import ROUNDED
from ..sequences.scoring import Part, Scorer, Table
from ..sequences.sequence import Sequence as Tokenized
from ..training.arguments import UNPLANNED
from ..training.loop import STEP_FIELDS, Loss
from ..training.reference import copy_shared_weights, move_towards, reference_of
from . import metrics
from .batch import Batch, advantages, completion_order
from .completions import Completions
from .entropy_bonus import EntropyBonus, entropy_sums
from .flat_rewards import FlatRewards
from .reward_log import RewardLog
from .rollouts import GroupSampler
from .trajectories import Trajectory

# How results differ since RULES 3, for the warning of a job that is resumed.
KEYED = "completions are drawn with random numbers of their own"
SHOWN_SAMPLES, SHOWN_CHARACTERS = 2, 200  # in an event; the file has all completions, whole
# Fields of a step event -> the metrics of the loss that they are; not every loss has all.
FROM_LOSS = {"kl": "kl", "entropy": "entropy", "clip_ratio": "clip_ratio/region_mean"}


@dataclass
class Rollouts:
    """The completions of a step, and what its event has of them.

    `fields`: of the event; `metrics`: by TRL's names, for the trackers; `logged`: what rewards have
    logged, by their names, for the trackers; `seconds`: of generation. `batch` gets its old
    log-probabilities in the first of several iterations.
    """

    batch: Batch
    fields: dict[str, Any]
    metrics: dict[str, float]
    logged: dict[str, float]
    seconds: float
    is_flat: bool  # whether all rewards of each group are equal


@dataclass(frozen=True)
class Work:
    """The one micro-batch of a step, which began at a time.perf_counter."""

    rollouts: Rollouts
    is_first: bool  # whether they were sampled in this step
    began: float


class Reinforcement:
    """The task of a GRPO job (training.loop.Task).

    `args`: a GRPOConfig, whose steps_per_generation is its gradient_accumulation_steps.
    `reference`: the frozen model of the KL term, which may share its weights with the model
    (training.reference); None without a KL term, or for an adapter, whose reference is the model
    without it. `rewards`: their names, in the order of the weights of `args`. `data`: fingerprints
    of the prompts ("data") and of the other columns that rewards see ("columns").
    """

    def __init__(
        self,
        *,
        ctx: Context,
        args: GRPOConfig,
        model: Any,
        reference: Any | None,
        groups: GroupSampler,
        scorer: Scorer,
        rewards: Sequence[str],
        data: Mapping[str, str],
    ) -> None:
        self.groups = groups
        self.scorer = scorer
        self.completions: Completions | None = None
        self.reward_log: RewardLog | None = None  # of a job of an earlier version
        self.reward_before: float | None = None  # of a checkpoint of an earlier version
        self._ctx = ctx
        self._args: Any = args
        self._model = model
        self._reference = reference
        self._rewards = list(rewards)
        self._data = dict(data)
        self._objective = _objective(args)
        self._bonus = EntropyBonus(args)
        self._flat_rewards = FlatRewards()
        self._step = 0  # steps done
        self._tokens_seen = 0.0
        self._has_warned_of_names = False
        self._has_kept = True  # the completions of the latest step
        self._rollouts: Rollouts | None = None  # the latest ones

    @property
    def _micro_batches(self) -> int:
        return int(self._args.gradient_accumulation_steps)

    # A step.

    def batches(self, first_step: int) -> Iterator[Sequence[Work]]:
        for step in count(first_step):
            began = time.perf_counter()
            is_first = step % self._args.num_iterations == 0 or self._rollouts is None
            if is_first:
                self._rollouts = self._roll_out(step)
            assert self._rollouts is not None
            yield [Work(self._rollouts, is_first, began)]

    def _roll_out(self, step: int) -> Rollouts:
        """Sample the groups of a step, score them, and compute their advantages."""
        sampled = self.groups.of_step(step, self.trainer_state(step))
        found = [one for group in sampled.groups for one in group]
        scores = torch.tensor([one.scores for one in found])
        size, scale = self._args.num_generations, self._args.scale_rewards
        values, is_flat = advantages(scores, self.groups.weights, size, scale)
        batch = Batch.of(
            found,
            values,
            hides_cut=self._args.mask_truncated_completions,
            has_sampled=self.groups.sampler.is_int8,
            device=self._model.device,
        )
        batch = self._with_reference(batch)
        order = completion_order(len(batch.completions), seed=self._args.seed, step=step)
        measured = {
            **metrics.of_lengths(found),
            **metrics.of_rewards(scores, self._rewards, self.groups.weights, is_flat),
        }
        self._tokens_seen += sum(one.num_tokens for one in found)
        self._log_rewards(found, step + 1)
        self._keep(found, self.groups.weights.rewards(scores), values, step + 1)
        return Rollouts(
            batch.rows(order),
            {**self._shown(found, measured, batch), **sampled.counts},
            {**measured, "num_tokens": self._tokens_seen},
            metrics.of_logged(sampled.logged),
            sampled.seconds,
            is_flat=measured["frac_reward_zero_std"] == 1,
        )

    def loss(self, micro_batch: Work) -> Iterator[Loss]:
        """Yield a part with gradients for each pass, then one with the loss and its metrics.

        The log-probabilities of other passes are constants. Those of later passes are not known
        yet: the losses of their completions have no gradient here.
        """
        rollouts, ranks = micro_batch.rollouts, self._ctx.ranks
        batch, model = rollouts.batch, self._model
        written = learning = batch.sequences
        table = Table.empty(batch.mask.shape, batch.mask.device)
        if batch.old is not None:  # completions that are not computed keep it: their ratio is 1
            table.logps.copy_(batch.old)
        table.entropies.copy_(batch.entropies)
        silent = []  # completions without a gradient
        if self.scorer.most_tokens is not None and not self._needs_all_gradients:
            is_learned = batch.is_learned
            learning = [one for one in written if is_learned[one.row]]
            silent = [one for one in written if not is_learned[one.row]]
        if self._objective.top_entropy_quantile < 1:  # all entropies decide which have a loss
            self.scorer.fill(table, model, self._parts(written), ranks)
        elif self._args.num_iterations > 1:  # for the metrics only
            self.scorer.fill(table, model, self._parts(silent), ranks)
        micro_batches = self._split(batch)
        places, balances = [], []
        parts = self._parts(learning)
        for one in self.scorer.scored(model, parts, has_entropy_gradient=self._bonus.is_on):
            losses = self._terms(micro_batches, table.put(one.at, one.scores))
            value = torch.stack([self._with_bonus(*terms) for terms in losses]).sum()
            if one.balance is not None:
                balances.append(one.balance.detach().cpu() / self._micro_batches)
                value = value + one.balance / self._micro_batches
            yield Loss(value, amount=0.0)
            table.store(one.at, one.scores)
            places.append(one.at)
        table.exchange(places, ranks)
        total, found = self._reported(micro_batches, table)
        if micro_batch.is_first:
            found = {**self._logged(rollouts, found), **rollouts.metrics, **found}
            if self._args.num_iterations > 1:
                rollouts.batch = replace(batch, old=table.logps)
        if balances:
            total = total + sum(balances)
            found["aux_loss"] = float(sum(balances)) / self.scorer.router_coefficient
        if ranks.rank == 0:  # the table has the scores of all ranks
            yield Loss(total, found)

    def _with_reference(self, batch: Batch) -> Batch:
        """Add the log-probabilities by the reference, if the loss has a KL term."""
        if self._objective.beta == 0:
            return batch
        table = Table.empty(batch.mask.shape, batch.mask.device)
        ranks = self._ctx.ranks
        with (
            reference_of(self._model, self._reference) as model,
            torch.random.fork_rng(devices=[], enabled=ranks.size > 1),  # of dropout
        ):
            self.scorer.fill(table, model, self._parts(batch.sequences), ranks)
        return replace(batch, reference=table.logps)

    def _parts(self, sequences: Sequence[Tokenized]) -> list[Part]:
        return self.scorer.parts([(one,) for one in sequences], self._model.device, self._ctx.ranks)

    @property
    def _needs_all_gradients(self) -> bool:
        """Whether completions with advantage 0 have a gradient: KL term, entropy bonus."""
        return self._objective.beta != 0 or self._bonus.is_on

    def _split(self, batch: Batch) -> list[Batch]:
        size = len(batch.completions) // self._micro_batches
        return [batch.rows(slice(i * size, (i + 1) * size)) for i in range(self._micro_batches)]

    def _terms(
        self, micro_batches: Sequence[Batch], table: Table
    ) -> Iterator[tuple[Tokens, Terms]]:
        """Yield the losses of the micro-batches of a step, from the scores of all of them."""
        step = Step(
            micro_batches=len(micro_batches),
            tokens=torch.stack([part.mask.sum() for part in micro_batches]).sum(),
        )
        size = len(table.logps) // len(micro_batches)
        scores = zip(
            torch.split(table.logps, size), torch.split(table.entropies, size), strict=True
        )
        for part, (logps, entropies) in zip(micro_batches, scores, strict=True):
            tokens = self._tokens(part, logps, entropies)
            yield tokens, grpo_loss(tokens, self._objective, step)

    def _tokens(self, part: Batch, logps: Tensor, entropies: Tensor) -> Tokens:
        old, given = part.old, part.advantages
        if part.is_replayed is not None:  # of the policy that sampled them
            now = logps.detach() if old is None else old
            assert part.replayed is not None
            old = torch.where(part.is_replayed[:, None], part.replayed, now)
        if part.sampled is not None:  # the losses are linear in the advantages
            given = given[:, None] * importance_weights(
                logps.detach() if old is None else old,
                part.sampled,
                part.mask,
                self._args.vllm_importance_sampling_clip_max,
            )
        return Tokens(
            logps=logps,
            entropies=entropies,
            mask=part.mask,
            advantages=given,
            old=old,
            sampler=part.sampled,
            reference=part.reference,
        )

    def _with_bonus(self, tokens: Tokens, terms: Terms) -> Tensor:
        """Return the loss of a micro-batch less the entropy bonus."""
        if not self._bonus.is_on:
            return terms.loss
        mean = mean_entropy(tokens.entropies, tokens.mask, terms.chosen) / self._micro_batches
        return terms.loss - self._bonus.applied * mean

    @torch.no_grad()
    def _reported(
        self, micro_batches: Sequence[Batch], table: Table
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss and the metrics of a step, with the scores of all passes.

        Adapts the entropy bonus of the next step.
        """
        total, found = torch.tensor(0.0), []
        sums = torch.zeros(2, device=table.logps.device)
        for part, (tokens, terms) in zip(
            micro_batches, self._terms(micro_batches, table), strict=True
        ):
            total = total + self._with_bonus(tokens, terms).cpu()
            measured = metrics.of_loss(tokens, terms, self._objective)
            if part.sampled is not None:
                is_known = None if self._needs_all_gradients else part.advantages.ne(0)
                measured[metrics.DRIFT] = metrics.drift(tokens, is_known)
            if self._bonus.is_on:
                measured["policy_loss"] = float(terms.own)
                sums += entropy_sums(tokens.entropies, tokens.mask, terms.chosen)
            found.append(measured)
        means = metrics.averaged(found)
        if self._bonus.is_on:
            self._bonus.update(sums)
            means["entropy_coef"] = self._bonus.coefficient
        return total, means

    def _logged(self, rollouts: Rollouts, found: Mapping[str, float]) -> dict[str, float]:
        """Return what rewards have logged, without names that the training itself measures.

        `found`: the metrics of the loss.
        """
        own = {*found, *rollouts.metrics, *rollouts.fields, *FROM_LOSS.values(), *STEP_FIELDS}
        taken = sorted(own & rollouts.logged.keys())
        if taken and not self._has_warned_of_names:
            self._has_warned_of_names = True
            self._ctx.emit(
                "warning",
                step=self._step + 1,
                message=f"reward: log_metric cannot record {taken[0]}, a metric of the training: "
                "choose another name",
            )
        return {name: value for name, value in rollouts.logged.items() if name not in own}

    def fields(self, batch: Sequence[Work], sums: Mapping[str, float]) -> dict[str, Any]:
        (work,) = batch
        seconds = work.rollouts.seconds if work.is_first else 0.0
        found = {
            **work.rollouts.fields,
            **{name: sums.get(metric) for name, metric in FROM_LOSS.items()},
            "generation_s": seconds,
            "training_s": time.perf_counter() - work.began - seconds,
        }
        if self.groups.sampler.rollout_dtype == "int8":
            found["rollout_drift"] = sums.get(metrics.DRIFT)  # nats
        return found

    def trained(self, step: int, fields: Mapping[str, Any]) -> None:
        """Move the reference, and warn if nothing is being learned, after a step."""
        self._step = step
        if self._moves_reference and step % self._args.ref_model_sync_steps == 0:
            move_towards(self._reference, self._model, self._args.ref_model_mixup_alpha)
        assert self._rollouts is not None
        warning = self._flat_rewards.count(
            is_flat=self._rollouts.is_flat, reward=fields["reward"], truncated=fields["clipped"]
        )
        if warning is not None:
            self._ctx.emit("warning", step=step, message=warning)

    @property
    def _moves_reference(self) -> bool:
        return self._reference is not None and bool(self._args.sync_ref_model)

    def before_update(self) -> None:
        """Keep the reference as it is: give the model weights of its own."""
        if self._reference is not None:
            copy_shared_weights(self._model, self._reference)

    # Exact resume.

    def state(self) -> dict[str, Any]:
        if self.reward_log is not None:
            self.reward_log.sync()
        rollouts = self._rollouts
        assert rollouts is not None
        is_reused = self._step % self._args.num_iterations != 0
        moved = None
        if self._moves_reference and self._step >= self._args.ref_model_sync_steps:
            moved = [weight.data for weight in cast(Any, self._reference).parameters()]
        return {
            **self._data,
            "reward_before": self.reward_before,
            "completions": rollouts.batch.state() if is_reused else None,
            "rollout": rollouts.fields,
            "is_flat": rollouts.is_flat,
            "micro_steps": self._step * self._micro_batches,
            "flat_steps": self._flat_rewards.steps,
            "entropy_coef": self._bonus.coefficient,
            "last_entropy": self._bonus.latest,
            "reference": moved,
            **self.groups.state(),
            "tokens_seen": self._tokens_seen,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        # Earlier versions wrote no "columns": rewards had no access to them; and none of the values
        # that have a default here.
        if any(state.get(name, digest) != digest for name, digest in self._data.items()):
            raise JobFailed("dataset: its rows are not those that the checkpoint was trained on")
        self.before_update()
        self.reward_before = state["reward_before"]
        self._step = state["micro_steps"] // self._micro_batches
        self._rollouts = None
        if state["completions"] is not None:
            batch = Batch.of_state(state["completions"], self._model.device)
            is_flat = state.get("is_flat", False)
            self._rollouts = Rollouts(batch, state["rollout"], {}, {}, 0.0, is_flat)
        self._flat_rewards.steps = state.get("flat_steps", 0)
        self._bonus.coefficient = state.get("entropy_coef", self._bonus.coefficient)
        self._bonus.latest = state.get("last_entropy", self._bonus.latest)
        self.groups.load(state)
        self._tokens_seen = state.get("tokens_seen", 0.0)
        if state.get("reference") is not None:
            assert self._reference is not None
            for weight, saved in zip(self._reference.parameters(), state["reference"], strict=True):
                weight.data.copy_(saved)

    def differences_since(self, rules: int) -> list[str]:
        """Return how results differ from those of a version with these RULES."""
        packs = self.scorer.most_tokens is not None
        found = [KEYED] if rules < 3 else []
        found += [ROUNDED] if rules < 3 and not packs else []
        if rules < 1:
            found += [FIXED] if packs else []
            found.append(
                "rewards receive the text of a completion with its leading space and without an "
                "incomplete last character"
            )
        return found

    # What rewards and events are told.

    def trainer_state(self, step: int | None = None) -> dict[str, Any]:
        """Return what a reward gets as TRL's `trainer_state`, after so many steps (None: now)."""
        step = self._step if step is None else step
        per_epoch = self.groups.steps_of_epoch
        # With a time limit the steps are not known before they are planned: then both are None.
        steps = None if self._args.max_steps == UNPLANNED else self._args.max_steps
        return {
            "global_step": step,
            "max_steps": steps,
            "epoch": step / per_epoch,
            "num_train_epochs": None if steps is None else math.ceil(steps / per_epoch),
            "num_input_tokens_seen": self._tokens_seen,
            "train_batch_size": self._args.per_device_train_batch_size,
            "logging_steps": 1,
        }

    def _named(self, one: Trajectory) -> dict[str, float]:
        """Return the scores of a trajectory by the names of the rewards."""
        return dict(zip(self._rewards, one.scores, strict=True))

    def _shown(
        self, found: Sequence[Trajectory], measured: Mapping[str, float], batch: Batch
    ) -> dict[str, Any]:
        """Return what the event of a step has of its completions."""
        return {
            "reward": measured["reward"],
            "reward_std": measured["reward_std"],
            "rewards": {name: measured[f"rewards/{name}/mean"] for name in self._rewards},
            "rewards_std": {name: measured[f"rewards/{name}/std"] for name in self._rewards},
            "completion_length": measured["completions/mean_length"],
            "clipped": measured["completions/clipped_ratio"],
            "tokens": sum(len(context.prompt) for one in found for context in one.contexts)
            + int(batch.mask.sum()),
            "samples": [
                {
                    "prompt": _truncated(one.prompt.text),
                    "completion": _truncated(one.text),
                    "rewards": self._named(one),
                }
                for one in found[
                    : SHOWN_SAMPLES if self.completions and self.completions.every else 0
                ]
            ],
        }

    def _keep(
        self, found: Sequence[Trajectory], rewards: Tensor, values: Tensor, step: int
    ) -> None:
        """Add the completions of this step to the file. A full disk does not end the training."""
        if self.completions is None or not self.completions.every:
            return
        size = self._args.num_generations
        rows = [
            {
                "row": one.prompt.row,
                "group": number // size,
                "prompt": one.prompt.text,
                "completion": one.text,
                "answer": one.prompt.answer,
                "reward": reward,
                "rewards": self._named(one),
                "advantage": value,
                "tokens": len(one.ids),
                "stop": "length" if one.is_cut else "end",
                "replayed": one.is_replayed,
                **one.about,
            }
            for number, (one, reward, value) in enumerate(
                zip(found, rewards.tolist(), values.tolist(), strict=True)
            )
        ]
        try:
            self.completions.add(step, rows)
            self._has_kept = True
        except OSError as error:
            if self._has_kept:  # one warning for all the steps of a full disk
                message = f"completions: those of step {step} and following are not kept: {error}"
                self._ctx.emit("warning", step=step, message=message)
            self._has_kept = False

    def _log_rewards(self, found: Sequence[Trajectory], step: int) -> None:
        """Append the completions of this step to the reward log; warn if that fails."""
        if self.reward_log is None:
            return
        lines = [
            {"row": one.prompt.row, "completion": one.text, "rewards": self._named(one)}
            for one in found
        ]
        log = self.reward_log
        try:
            self._ctx.patiently(lambda: log.add(step, lines), log.path.parent)
        except OSError as error:
            if self._ctx.stop.is_set() and lacks_space(error):  # the step is computed again
                raise
            self._ctx.emit("warning", step=step, message=f"reward_log: lacks step {step}: {error}")


def _objective(args: Any) -> Objective:
    """Return the parameters of the loss, of a GRPOConfig."""
    names = [field.name for field in fields(Objective) if field.name != "epsilon_high"]
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return Objective(epsilon_high=high, **{name: getattr(args, name) for name in names})


def _truncated(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
