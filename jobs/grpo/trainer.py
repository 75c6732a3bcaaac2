"""TRL's GRPOTrainer on a warm model: resumes exactly, loads no model, emits sampled completions.

GRPO: Shao et al. 2024, arXiv:2402.03300. Imports trl: only `run` of the GRPO kind imports it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.utils import RepeatSampler

from ..context import Context
from ..engine.sampling import NotFiniteError
from ..errors import JobFailed, Stopped
from ..packing.passes import stored_number
from ..training.options import TrainingSpec
from ..training.trainer import JobTrainer
from ..user_code.modules import SOURCES, changed, digests
from .packed_trainer import DRIFT, PackedTrainer
from .problems import columns_of
from .prompts import Prompt
from .rewards import Reward
from .user_rewards import KeywordReward, PositionalReward

SHOWN_CHARACTERS = 200  # of a prompt or completion in an event
EVAL_BATCH = 16
FLAT_STEPS = 20  # steps without a difference of rewards in any group, after which a warning comes


class EpochSampler(RepeatSampler):
    """TRL's RepeatSampler, with an order that depends on (seed, epoch) only.

    The original draws permutations from a generator that is not in the checkpoint, so a resumed
    run would start with the order of the first epoch.
    """

    def set_epoch(self, epoch: int) -> None:
        """Set the generator to its state at the start of `epoch` in an uninterrupted run."""
        self.generator.manual_seed(self.seed or 0)
        for _ in range(epoch):
            torch.randperm(self.num_samples, generator=self.generator)


class GroupTrainer(JobTrainer, PackedTrainer):
    """A GRPOTrainer inside a job.

    `reference` is the frozen model of the KL term (beta > 0). `rewards` are by name; their
    weights are the config's `reward_weights`, in the same order. `data` has fingerprints of the
    prompts ("data") and of the other columns that rewards see ("columns"): a resume on other
    data is refused.
    """

    model: Any
    processing_class: Any
    _buffered_inputs: Any
    _pending_extra_logs: Any
    _pending_metrics: Any
    _logs: dict[str, Any]

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
    ) -> None:
        self.config: Any = config
        self.rewards = rewards
        self.data = dict(data)
        self._prompts = list(prompts)
        self._has_own_rewards = any(
            isinstance(reward, PositionalReward | KeywordReward) for reward in rewards.values()
        )
        self._sources = digests() if self._has_own_rewards else {}
        self.samples_shown = samples_shown
        self.reward_before: float | None = None
        self._prompt_ids = {prompt.text: prompt.ids for prompt in prompts}
        self._flat_steps = 0  # consecutive steps without a group of unequal rewards
        self._is_flat = False  # whether the latest completions have no such group
        self._rollout: dict[str, Any] = {}  # event fields of the current completions
        # With beta > 0, GRPOTrainer would load the reference model from disk.
        beta, config.beta = config.beta, 0.0
        super().__init__(
            job=job,
            spec=spec,
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=_dataset(prompts, data["data"]),
            reward_funcs=self._reward_funcs(),
        )
        if rollout_dtype == "int8" and self.most_tokens is None:
            raise JobFailed(
                f"rollout_dtype: must be float32 for a {self.model.config.model_type} of this "
                "config, got int8"
            )
        self.rollout_dtype = rollout_dtype
        if self.most_tokens is not None:
            self.most_tokens = stored_number(job.run_dir / "pack_tokens", self.most_tokens)
        config.beta = beta
        if reference is not None:
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
        is_reused = self._step % cycle != 0
        return {
            **super().job_state(),
            **self.data,
            "reward_before": self.reward_before,
            "micro_steps": self._step,
            "completions": self._buffered_inputs if is_reused else None,
            "rollout": self._rollout,
            "flat_steps": self._flat_steps,
        }

    def load_job_state(self, state: dict[str, Any]) -> None:
        super().load_job_state(state)
        # Checkpoints of earlier versions have no "columns": rewards had no access to them.
        if any(state.get(name, digest) != digest for name, digest in self.data.items()):
            raise JobFailed("dataset: its rows are not those that the checkpoint was trained on")
        self.reward_before = state["reward_before"]
        self._step = state["micro_steps"]
        self._buffered_inputs = self._prepare_input(state["completions"])
        self._rollout = state["rollout"]
        self._flat_steps = state.get("flat_steps", 0)

    def about(self) -> dict[str, Any]:
        if not self._has_own_rewards:
            return super().about()
        self._sources = digests(self._sources)
        return {**super().about(), SOURCES: self._sources}

    def _warn_of_differences(self, checkpoint: Path) -> None:
        super()._warn_of_differences(checkpoint)
        files = changed(self.job.checkpoints.about(checkpoint).get(SOURCES, {}))
        if files:
            self.job.emit(
                "warning",
                message=f"reward: changed since {checkpoint.name}: {', '.join(files)}; the steps "
                "from here on are not those of an undisturbed run",
                files=files,
            )

    # Generation.

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [self._prompt_ids[prompt] for prompt in prompts], None, {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return cast(Any, super())._generate_single_turn(*args, **kwargs)
        except (NotFiniteError, RuntimeError) as error:
            if isinstance(error, NotFiniteError) or "probability tensor" in str(error):
                self.check_weights()  # names the weights when they are the cause
                step = self.state.global_step + 1
                raise JobFailed(
                    f"step {step}: the model's probabilities are nan or infinite"
                ) from error
            raise

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with _no_deprecations():
            batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        metrics = {name: values[-1] for name, values in self._metrics["train"].items() if values}
        self._is_flat = metrics.get("frac_reward_zero_std") == 1
        self._rollout = {
            "reward": metrics["reward"],
            "reward_std": metrics["reward_std"],
            "rewards": {name: metrics[f"rewards/{name}/mean"] for name in self.rewards},
            "completion_length": metrics["completions/mean_length"],
            "clipped": metrics["completions/clipped_ratio"],
            "tokens": int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()),
            "samples": self._samples(),
        }
        return batch

    def _samples(self) -> list[dict[str, Any]]:
        shown = range(min(self.samples_shown, len(self._logs["prompt"])))
        return [
            {
                "prompt": _truncated(self._logs["prompt"][i]),
                "completion": _truncated(self._logs["completion"][i]),
                "rewards": {name: self._logs["rewards"][name][i] for name in self.rewards},
            }
            for i in shown
        ]

    # Events.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs:
            self._warn_of_equal_rewards()

    def _warn_of_equal_rewards(self) -> None:
        """Warn once when groups of equal rewards, whose advantages are 0, have come for long."""
        self._flat_steps = self._flat_steps + 1 if self._is_flat else 0
        if self._flat_steps == FLAT_STEPS:
            self.job.emit(
                "warning",
                step=self.state.global_step,
                message=f"nothing is being learned: for {FLAT_STEPS} steps, all completions of "
                f"each group had the same reward (now {self._rollout['reward']:.4g}), so every "
                "advantage is 0. The task may be too hard or too easy for this model, or the "
                "reward does not match its output: see `warmd samples`",
            )

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

    def mean_reward(self, prompts: Sequence[Prompt]) -> float:
        """Return the mean reward of one sampled completion per prompt.

        Completions for which every reward returns None do not count; NaN when none counts. The
        seed is fixed, and the random state of training is left unchanged. Raises Stopped between
        two batches on a stop request.
        """
        self.model.eval()
        found: list[float] = []
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            for start in range(0, len(prompts), EVAL_BATCH):
                if self.job.stop.is_set():
                    raise Stopped(self.state.global_step)
                with self.progress.during("batch of an evaluation"):
                    found += self._rewards_of(prompts[start : start + EVAL_BATCH])
        self.generation_s = 0.0
        return math.fsum(found) / len(found) if found else math.nan

    def _rewards_of(self, prompts: Sequence[Prompt]) -> list[float]:
        """Return the rewards of one completion per prompt, without those that have none."""
        with _no_deprecations():
            ids, _ = self._generate_single_turn([prompt.ids for prompt in prompts], None, {}, 1)
        completions = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        scores = self._scores(prompts, completions, ids)
        # Discard what the rewards logged: it belongs to no step.
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
        rows = [self._prompts[row["row"]] for row in inputs]
        return self._scores(rows, completions, completion_ids_list)

    def _scores(
        self, rows: Sequence[Prompt], completions: list[str], completion_ids: Sequence[list[int]]
    ) -> torch.Tensor:
        """Return the score of each completion by each reward: (B, R) float32, NaN for None.

        `rows`: the prompt of each completion.
        """
        inputs = [{"row": row} for row in rows]
        prompts = [row.text for row in rows]
        scores: torch.Tensor = cast(Any, super())._calculate_rewards(
            inputs, prompts, completions, completion_ids
        )
        return scores

    def _reward_funcs(self) -> list[Any]:
        """Return the rewards with TRL's signature; the column `row` has the Prompt."""
        columns = columns_of(prompt.columns for prompt in self._prompts)
        return [_as_trl_reward(name, reward, columns) for name, reward in self.rewards.items()]


def _dataset(prompts: Sequence[Prompt], data: str) -> Dataset:
    """Return the dataset of prompts for TRL's sampler.

    Without a given fingerprint it would be pickled to compute one.
    """
    rows = [{"prompt": prompt.text, "row": index} for index, prompt in enumerate(prompts)]
    return Dataset(InMemoryTable.from_pylist(rows), fingerprint=data)


@contextmanager
def _no_deprecations() -> Iterator[None]:
    # TRL 1.16 uses an attribute that transformers 5.23 deprecates, at every generation.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        yield


def _as_trl_reward(name: str, reward: Reward | KeywordReward, columns: Sequence[str]) -> Any:
    def by_position(
        prompts: list[str], completions: list[str], row: list[Prompt], **_: Any
    ) -> list[float]:
        assert not isinstance(reward, KeywordReward)
        return reward(prompts, completions, [one.answer for one in row])

    def by_keywords(row: list[Prompt], **keywords: Any) -> list[float | None]:
        assert isinstance(reward, KeywordReward)
        return reward(**_as_trl_passes(row, columns, keywords))

    async def asynchronously(row: list[Prompt], **keywords: Any) -> list[float | None]:
        assert isinstance(reward, KeywordReward)
        return await reward.asynchronously(**_as_trl_passes(row, columns, keywords))

    score: Any = by_position
    if isinstance(reward, KeywordReward):
        score = asynchronously if reward.is_async else by_keywords
    score.__name__ = name
    return score


def _as_trl_passes(
    rows: Sequence[Prompt], columns: Sequence[str], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords that TRL would pass for a dataset with all columns.

    Chats are lists of messages in TRL, and so are their completions.
    """
    texts = keywords["completions"]
    chats = [row.messages is not None for row in rows]
    prompts = [row.text if row.messages is None else row.messages for row in rows]
    completions = [
        [{"role": "assistant", "content": text}] if is_chat else text
        for text, is_chat in zip(texts, chats, strict=True)
    ]
    return {
        **{
            name: [row.columns.get(name) for row in rows]
            for name in columns
            if name != "completion"
        },
        **keywords,
        "prompts": prompts,
        "completions": completions,
    }


def _truncated(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
