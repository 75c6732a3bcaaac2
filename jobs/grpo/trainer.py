"""TRL's GRPOTrainer on a warm model: resumes exactly, loads no model, emits sampled completions.

GRPO: Shao et al. 2024, arXiv:2402.03300. Imports trl: only `run` of the GRPO kind imports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from trl.trainer.grpo_config import GRPOConfig

from ..context import Context
from ..engine.detokenizer import text_of
from ..engine.sampling import NotFiniteError
from ..errors import JobFailed
from ..files.shortage import lacks_space
from ..packing.passes import require_one_process, stored_number
from ..packing.shared_prompts import FIXED
from ..rewards.prompts import Prompt
from ..rewards.reward_calls import as_trl_calls
from ..rewards.rewards import Reward
from ..rewards.user_rewards import KeywordReward, PositionalReward
from ..statistics import interval_of
from ..training.deprecations import no_deprecations
from ..training.evaluation import EvaluatingTrainer
from ..training.options import TrainingSpec
from ..user_code.modules import SOURCES, changed, digests
from .flat_rewards import FlatRewards
from .groups import Group, Weights
from .loss_options import NORMALIZE_FIRST
from .packed_trainer import DRIFT
from .prompt_order import EpochSampler, PromptStream
from .replay import ReplayBuffer, replayed_fields
from .reward_log import RewardLog
from .reward_process import RewardProcess
from .scored_trainer import ScoredTrainer

SHOWN_CHARACTERS = 200  # of a prompt or completion in an event
EVAL_BATCH = 16


class GroupTrainer(EvaluatingTrainer, ScoredTrainer):
    """A GRPOTrainer inside a job.

    `reference` is the frozen model of the KL term (beta > 0); None for a LoRA adapter, whose
    reference is the model without it. `rewards` are by name; their weights are the config's
    `reward_weights`, in the same order. `data` has fingerprints of the prompts ("data") and of the
    other columns that rewards see ("columns"): a resume on other data is refused. `resample`: how
    often groups with equal rewards are replaced by groups of the next prompts; `replay`: size of
    the replay buffer per prompt (0: none). `reward_process`: runs the rewards; None: this process
    does. `held_out`: the prompts whose reward is measured, every `eval_every` steps and after the
    last one.
    """

    model: Any
    processing_class: Any
    _buffered_inputs: Any
    _pending_extra_logs: Any
    _pending_metrics: Any
    _logs: dict[str, Any]
    entropy_coef: float
    _last_world_entropy: float  # nats per token, of the latest step

    def __init__(
        self,
        *,
        job: Context,
        spec: TrainingSpec,
        config: GRPOConfig,
        model: Any,
        reference: Any | None,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        rewards: Mapping[str, Reward | KeywordReward],
        data: Mapping[str, str],
        rollout_dtype: str,
        samples_shown: int,
        resample: int = 0,
        replay: int = 0,
        reward_process: RewardProcess | None = None,
        reward_log: RewardLog | None = None,
        held_out: Sequence[Prompt] = (),
        eval_every: int = 0,
    ) -> None:
        self.config: Any = config
        self.data = dict(data)
        self._prompts = list(prompts)
        self.held_out = held_out
        self._has_own_rewards = any(
            isinstance(reward, PositionalReward | KeywordReward) for reward in rewards.values()
        )
        # Digests of the files of own rewards, by path.
        self.sources = digests() if self._has_own_rewards else {}
        self.samples_shown = samples_shown
        self.reward_before: float | None = None
        self._prompt_ids = {prompt.text: prompt.ids for prompt in prompts}
        self._flat_rewards = FlatRewards()
        self._is_flat = False  # whether the latest completions have no such group
        self._rollout: dict[str, Any] = {}  # event fields of the current completions
        self._chosen: list[Group] | None = None  # for TRL, instead of sampling and scoring
        self._resample = resample
        self._stream = PromptStream(len(prompts), config.seed)
        self._weights = Weights(
            cast(Any, config).reward_weights, config.multi_objective_aggregation == NORMALIZE_FIRST
        )
        self._replay = ReplayBuffer(replay, self._weights) if replay else None
        self._reward_log = reward_log
        # With beta > 0, GRPOTrainer would load the reference model from disk.
        beta, config.beta = config.beta, 0.0
        is_synced, config.sync_ref_model = config.sync_ref_model, False
        super().__init__(
            job=job,
            spec=spec,
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=_dataset(prompts, data["data"]),
            reward_funcs=as_trl_calls(rewards, prompts),
            rewards=rewards,
            reward_process=reward_process,
            eval_every=eval_every if held_out else None,
        )
        if rollout_dtype == "int8" and self.most_tokens is None:
            raise JobFailed(
                f"rollout_dtype: must be float32 for a {self.model.config.model_type} of this "
                "config, got int8"
            )
        if replay and self.most_tokens is None:
            raise JobFailed(
                f"replay: must be 0 for a {self.model.config.model_type} of this config, "
                f"got {replay}"
            )
        self.keeps_logps = replay > 0
        self.rollout_dtype = rollout_dtype
        if self.most_tokens is not None:
            self.most_tokens = stored_number(
                job.run_dir / "pack_tokens", self.most_tokens, self.ranks
            )
        else:
            require_one_process(self.ranks, model)
        config.beta, config.sync_ref_model = beta, is_synced
        if beta > 0:
            self.set_reference(reference, beta)

    def _send_telemetry(self) -> None:
        """Send no telemetry."""

    # Exact resume.

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler(
            cast(Any, self.train_dataset if dataset is None else dataset),
            mini_repeat_count=self.config.num_generations,
            batch_size=self.config.generation_batch_size // self.config.num_generations,
            repeat_count=self.config.num_iterations * self.config.steps_per_generation,
            seed=self.config.seed,
        )

    def job_state(self) -> dict[str, Any]:
        # With num_iterations > 1, the next step may reuse the current completions.
        cycle = self.config.steps_per_generation * self.config.num_iterations
        if self._reward_log is not None:
            self._reward_log.flush()
        is_reused = self._step % cycle != 0
        return {
            **super().job_state(),
            **self.data,
            "reward_before": self.reward_before,
            "micro_steps": self._step,
            "completions": self._buffered_inputs if is_reused else None,
            "rollout": self._rollout,
            "flat_steps": self._flat_rewards.steps,
            "entropy_coef": self.entropy_coef,
            "last_entropy": self._last_world_entropy,
            "reference": self._moved_reference(),
            "prompts_taken": self._stream.position,
            "replay": None if self._replay is None else self._replay.state(),
            "reward_failures": self.reward_failures,
        }

    def _moved_reference(self) -> list[torch.Tensor] | None:
        """Return the weights of the reference if they differ from the initial ones."""
        if (
            not self.config.sync_ref_model
            or self.state.global_step < self.config.ref_model_sync_steps
        ):
            return None
        return [weight.data for weight in self.ref_model.parameters()]

    def load_job_state(self, state: dict[str, Any]) -> None:
        super().load_job_state(state)
        # Checkpoints of earlier versions have no "columns": rewards had no access to them.
        if any(state.get(name, digest) != digest for name, digest in self.data.items()):
            raise JobFailed("dataset: its rows are not those that the checkpoint was trained on")
        self.reward_before = state["reward_before"]
        self._step = state["micro_steps"]
        self._buffered_inputs = self._prepare_input(state["completions"])
        self._rollout = state["rollout"]
        self._flat_rewards.steps = state.get("flat_steps", 0)
        self.entropy_coef = state.get("entropy_coef", self.entropy_coef)
        self._last_world_entropy = state.get("last_entropy", self._last_world_entropy)
        self._stream.position = state.get("prompts_taken", 0)
        self.reward_failures = state.get("reward_failures", 0)
        if self._replay is not None:
            self._replay.load_state(state["replay"])
        if state.get("reference") is not None:
            for weight, saved in zip(self.ref_model.parameters(), state["reference"], strict=True):
                weight.data.copy_(saved)

    def changes_since(self, rules: int) -> list[str]:
        found = super().changes_since(rules)
        if rules < 1:
            found += [] if self.most_tokens is None else [FIXED]
            found.append(
                "rewards receive the text of a completion with its leading space and without an "
                "incomplete last character"
            )
        return found

    def about(self) -> dict[str, Any]:
        if not self._has_own_rewards:
            return super().about()
        self.sources = digests(self.sources)
        return {**super().about(), SOURCES: self.sources}

    def _warn_of_differences(self, checkpoint: Path) -> None:
        super()._warn_of_differences(checkpoint)
        files = changed(self.job.checkpoints.about(checkpoint).get(SOURCES, {}))
        if files:
            self.job.emit(
                "warning",
                message=f"reward: changed since {checkpoint.name}: {', '.join(files)}; the steps "
                "from here on differ from those of an uninterrupted run",
                files=files,
            )

    # Generation.

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [self._prompt_ids[prompt] for prompt in prompts], None, {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self._chosen is not None:
            self.written = [one for group in self._chosen for one in group.completions]
            return self._as_trl_returns(self.written)
        try:
            return cast(Any, super())._generate_single_turn(*args, **kwargs)
        except (NotFiniteError, RuntimeError) as error:
            if isinstance(error, NotFiniteError) or "probability tensor" in str(error):
                self.check_weights()  # the message names the weights if they are the cause
                step = self.state.global_step + 1
                raise JobFailed(
                    f"step {step}: the model's probabilities are nan or infinite"
                ) from error
            raise

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with no_deprecations():
            groups, counts = self._groups(inputs)
            self._chosen = groups
            try:
                batch: dict[str, Any] = super()._generate_and_score_completions(
                    [self._input(group.row) for group in groups for _ in group.completions]
                )
            finally:
                self._chosen = None
        if any(group.replayed for group in groups):
            batch |= replayed_fields(groups, batch["completion_ids"])
        metrics = {name: values[-1] for name, values in self._metrics["train"].items() if values}
        self._is_flat = metrics.get("frac_reward_zero_std") == 1
        self._rollout = {
            "reward": metrics["reward"],
            "reward_std": metrics["reward_std"],
            "rewards": {name: metrics[f"rewards/{name}/mean"] for name in self.rewards},
            "rewards_std": {name: metrics[f"rewards/{name}/std"] for name in self.rewards},
            **counts,
            "completion_length": metrics["completions/mean_length"],
            "clipped": metrics["completions/clipped_ratio"],
            "tokens": int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()),
            "samples": self._samples(groups),
        }
        self._log_rewards(groups)
        return batch

    def _groups(self, inputs: list[dict[str, Any]]) -> tuple[list[Group], dict[str, int]]:
        """Sample the groups of a step; return them, and event fields that count their changes."""
        rows = [one["row"] for one in inputs[:: self.config.num_generations]]
        if self._resample:
            rows = self._stream.take(len(rows))
        groups = self._sampled(rows)
        resampled = 0
        for _ in range(self._resample):
            flat = [i for i, one in enumerate(groups) if not self._weights.has_spread(one.scores)]
            for i, group in zip(flat, self._sampled(self._stream.take(len(flat))), strict=True):
                groups[i] = group
            resampled += len(flat)
        counts = {"resampled": resampled} if self._resample else {}
        if self._replay is not None:
            counts["replayed"] = sum(group.replayed for group in groups)
        if self._reward_process is not None:
            counts["left_out"] = sum(bool(group.scores.isnan().all()) for group in groups)
        return groups, counts

    def _sampled(self, rows: Sequence[int]) -> list[Group]:
        """Return a group for each prompt: sampled, scored, and with a replayed success if due."""
        if not rows:
            return []
        size = self.config.num_generations
        prompts = [self._prompts[row] for row in rows for _ in range(size)]
        self._generate_single_turn([prompt.ids for prompt in prompts], None, {}, size)
        ids = [completion.ids for completion in self.written]
        texts = [self._text(*pair) for pair in zip(prompts, ids, strict=True)]
        scores = self.scores_of_groups(prompts, texts, ids, size)
        parts = [slice(start, start + size) for start in range(0, len(ids), size)]
        groups = [
            Group(row, self.written[part], texts[part], scores[part])
            for row, part in zip(rows, parts, strict=True)
        ]
        if self._replay is not None:
            for group in groups:
                self._replay.apply(group)
                if group.replayed:
                    group.texts[0] = self._text(self._prompts[group.row], group.completions[0].ids)
        return groups

    def _text(self, prompt: Prompt, ids: Sequence[int]) -> str:
        """Return the text of a completion, as `eval` and answers have it."""
        return text_of(self.processing_class, prompt.ids, ids, self.eos_token_ids)

    def _input(self, row: int) -> dict[str, Any]:
        """Return a prompt as TRL gets it from the data loader."""
        return {"prompt": self._prompts[row].text, "row": row}

    def _samples(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        shown = islice(self._scored(groups), self.samples_shown)
        return [
            {
                "prompt": _truncated(prompt.text),
                "completion": _truncated(text),
                "rewards": found,
            }
            for prompt, text, found in shown
        ]

    def _scored(self, groups: Sequence[Group]) -> Iterator[tuple[Prompt, str, dict[str, float]]]:
        """Yield the completions of a step: prompt, text, and rewards as TRL logs them."""
        texts = [(group.row, text) for group in groups for text in group.texts]
        for number, (row, text) in enumerate(texts):
            found = {name: self._logs["rewards"][name][number] for name in self.rewards}
            yield self._prompts[row], text, found

    # Events.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" not in logs:
            return
        warning = self._flat_rewards.count(
            is_flat=self._is_flat, reward=self._rollout.get("reward", 0.0)
        )
        if warning is not None:
            self.job.emit("warning", step=self.state.global_step, message=warning)

    def step_fields(self, logs: dict[str, Any]) -> dict[str, Any]:
        fields = {
            **super().step_fields(logs),
            **self._rollout,
            "kl": logs.get("kl"),
            "entropy": logs.get("entropy"),
            "clip_ratio": logs.get("clip_ratio/region_mean"),
            "generation_s": self.generation_s,
            "training_s": self.step_seconds() - self.generation_s,
        }
        if self.rollout_dtype == "int8":
            fields["rollout_drift"] = logs.get(DRIFT)  # nats
        self.generation_s = 0.0
        return fields

    # Evaluation.

    def measure(self) -> dict[str, Any] | None:
        """Return the mean reward of one sampled completion per held-out prompt; None when stopped.

        Completions for which every reward returns None are left out, in `n` too, and counted as
        `unscored`; the reward is NaN, with a warning, when none is left. The seed is fixed, and the
        random state of training is left unchanged.
        """
        was_training = self.model.training
        self.model.eval()
        found: list[float] = []
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            for start in range(0, len(self.held_out), EVAL_BATCH):
                if self.job.stop.is_set():
                    return None
                with self.progress.during("batch of an evaluation"):
                    found += self._rewards_of(self.held_out[start : start + EVAL_BATCH])
        self.generation_s = 0.0
        self.model.train(was_training)
        count = len(self.held_out)
        unscored = count - len(found)
        left_out = {"unscored": unscored, "completions": count} if unscored else {}
        if not found:
            message = f"the held-out reward is unknown: no reward scores any of {count} completions"
            self.job.emit("warning", step=self.state.global_step, message=message)
            return {"reward": math.nan, "n": 0, **left_out}
        interval = interval_of(found)
        return {
            "reward": math.fsum(found) / len(found),
            "n": len(found),
            **left_out,
            **({} if interval is None else {"intervals": {"reward": interval}}),
        }

    def _rewards_of(self, prompts: Sequence[Prompt]) -> list[float]:
        """Return the rewards of one completion per prompt, without completions that have none."""
        with no_deprecations():
            ids, _ = self._generate_single_turn([prompt.ids for prompt in prompts], None, {}, 1)
        completions = [self._text(*pair) for pair in zip(prompts, ids, strict=True)]
        scores = self.scores(prompts, completions, ids, len(ids))
        # Discard values that the rewards logged: they belong to no step.
        self._pending_extra_logs.clear()
        self._pending_metrics.clear()
        found = []
        for row in scores.tolist():
            judged = [
                weight * score
                for weight, score in zip(self.config.reward_weights, row, strict=True)
                if not math.isnan(score)
            ]
            if judged:
                found.append(math.fsum(judged))
        return found

    # Rewards.

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: list[str], completion_ids_list: Any
    ) -> torch.Tensor:
        if self._chosen is not None:
            return torch.cat([group.scores for group in self._chosen])
        rows = [self._prompts[row["row"]] for row in inputs]
        return self.scores(rows, completions, completion_ids_list, len(rows))

    def _log_rewards(self, groups: Sequence[Group]) -> None:
        """Append the completions of this step to the reward log; warn if that fails."""
        if self._reward_log is None:
            return
        lines = [
            {"row": prompt.row, "completion": text, "rewards": found}
            for prompt, text, found in self._scored(groups)
        ]
        step, log = self.state.global_step + 1, self._reward_log
        try:
            self.job.patiently(lambda: log.write(step, lines), log.path.parent)
        except OSError as error:
            if self.job.stop.is_set() and lacks_space(error):  # the step is computed again
                raise
            self.job.emit("warning", step=step, message=f"reward_log: lacks step {step}: {error}")


def _dataset(prompts: Sequence[Prompt], data: str) -> Dataset:
    """Return the dataset of prompts for TRL's sampler.

    Without a given fingerprint it would be pickled to compute one.
    """
    rows = [{"prompt": prompt.text, "row": index} for index, prompt in enumerate(prompts)]
    return Dataset(InMemoryTable.from_pylist(rows), fingerprint=data)


def _truncated(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
