"""The options of the GRPO kind and their checks at submission. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from ..context import RULES
from ..data import templates
from ..data.former import Former
from ..data.options import Content
from ..data.reader import Reading
from ..data.sources import TAKES, located
from ..engine.options import SamplingSpec
from ..environments import tasks
from ..environments.options import EPISODE_LENGTH, EnvironmentSpec
from ..errors import SpecError
from ..models.architectures import check_generates, positions_in
from ..relations import GIVEN, Relation, goes_with, is_in, never_with
from ..rewards import problems
from ..rewards.prompt_options import PromptsSpec
from ..rewards.prompts import check_chats
from ..spec import HttpMethod, option, override
from ..training.eval_options import EvaluatedSpec
from ..training.options import (
    MOST_AT_ONCE,
    MOST_ROWS,
    MOST_TOKENS,
    TrainingSpec,
)
from .loss_options import LossSpec
from .prompt_checks import check_prompts, unchecked

MICRO_BATCH = 8  # default maximum, in completions
COMPLETION_LENGTH = 64  # default, in tokens


@dataclass(frozen=True)
class Parts:
    """The problems that a job trains on, and those that it is evaluated on."""

    training: list[problems.Problem]
    held_out: list[problems.Problem]
    readings: list[Reading]  # one per data set, with counts of the skipped records


@dataclass(frozen=True, kw_only=True)
class GrpoSpec(LossSpec, PromptsSpec, EvaluatedSpec, EnvironmentSpec, SamplingSpec):
    """Train a causal language model by GRPO: groups of completions or episodes, and rewards."""

    kind: ClassVar[str] = "grpo"
    http: ClassVar[HttpMethod | None] = HttpMethod(
        type="reinforcement",
        training_file="dataset",
        validation_file="eval_dataset",
        builtin_data=problems.ARITHMETIC,
        harmless_text=(
            *("template", "system", "columns"),
            "reward",  # the gateway allows built-in rewards only
            *("custom_required_term", "custom_forbidden_term", "custom_format_pattern"),
        ),
        renamed={"n_epochs": "epochs", "batch_size": "prompts_per_step"},
    )
    changeable: ClassVar[tuple[str, ...]] = (*EvaluatedSpec.changeable, "log_completions")
    judged_by: ClassVar[tuple[str, ...]] = ("loss", "reward", "kl", "eval_reward")
    compared_by: ClassVar[tuple[str, str]] = ("eval_reward", "reward")
    # Advantages have a magnitude of about 1, so the loss varies around 0. A diverging policy has a
    # larger loss, a large KL from the reference (nats), or a high entropy.
    watched: ClassVar[Mapping[str, float]] = {"loss": 1.0, "kl": 1.0, "entropy": 1.0}

    relations: ClassVar[tuple[Relation, ...]] = (
        never_with("epochs", time_limit=GIVEN),
        # The reference of an adapter is the model without it.
        never_with("ref_model_sync_steps", lora=GIVEN),
        # A base model in int8 generates in int8, too.
        never_with("rollout_dtype", when=is_in("int8"), base_precision="int8"),
        never_with("rollout_dtype", when=is_in("int8"), loss_type="vespo"),
        goes_with("stop", environment=GIVEN),
        # An episode is opened by its environment or agent.
        never_with(
            *("chat_template", "system", "max_prompt_length", "nodes"),
            environment=GIVEN,
            agent=GIVEN,
        ),
    )

    dataset: str | None = option(
        None,
        "JSONL, CSV or Parquet file, folder of them or hub data set (owner/name:config:split) of "
        "question/answer or prompt records, or arithmetic (built-in problems); with environment or "
        "agent, of records whose columns it gets",
        group="data",
        default_text=f"{problems.ARITHMETIC}; with environment or agent the seeds from 0 to "
        "samples - 1",
    )
    samples: int | None = option(
        80,
        "number of training prompts, from the start of the dataset; all: every prompt that is not "
        "held out",
        group="data",
        minimum=1,
        maximum=MOST_ROWS,
        none_word="all",
    )
    max_prompt_length: int | None = option(
        None,
        "maximum prompt length in tokens; longer prompts are cut on the left",
        group="data",
        default_text="unlimited",
        minimum=1,
        maximum=MOST_TOKENS,
    )

    model: str = option("demo", "warm model to train", group="model")

    num_generations: int = option(
        8, "completions per prompt (group size)", group="sampling", minimum=2, maximum=4096
    )
    max_completion_length: int | None = option(
        None,
        "maximum completion length in tokens",
        group="sampling",
        default_text=f"max_new_tokens of the model, or {COMPLETION_LENGTH} (with environment "
        f"{EPISODE_LENGTH}), or the positions that the longest prompt leaves",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    temperature: float = override(
        SamplingSpec, "temperature", help="sampling temperature", minimum=0.01
    )
    top_k: int = override(SamplingSpec, "top_k", maximum=MOST_TOKENS)
    min_p: float | None = option(
        None,
        "minimum probability of a token, relative to the most likely one (min-p)",
        group="sampling",
        default_text="no minimum",
        minimum=0,
        maximum=1,
    )
    rollout_dtype: str = option(
        "float32",
        "precision of generation; int8: quantized weights (CPU only); importance sampling in the "
        "loss corrects for the difference",
        group="sampling",
        choices=("float32", "int8"),
    )

    resample: int = option(
        0,
        "maximum rounds of dynamic sampling (DAPO), in which groups whose rewards are all equal "
        "are replaced by groups of the next prompts (0: none)",
        group="sampling",
        minimum=0,
        maximum=1000,
    )
    replay: int = option(
        0,
        "successful completions kept per prompt for experience replay (ARPO: 8); in a group "
        "without success, one of them replaces a completion (0: none)",
        group="sampling",
        minimum=0,
        maximum=1000,
    )

    learning_rate: float | None = override(
        TrainingSpec,
        "learning_rate",
        default_text="by model size: 3e-4 below 1M parameters, 1e-4 below 100M, else 1e-6; with "
        "lora, ten times that",
    )
    epochs: int = option(
        1, "passes over the training prompts", group="optimization", minimum=1, maximum=10**6
    )
    steps: int | None = override(TrainingSpec, "steps", default_text="by epochs")
    prompts_per_step: int = option(
        1,
        "prompts per optimizer step, each with a group of completions",
        group="optimization",
        minimum=1,
        maximum=MOST_AT_ONCE,
    )
    batch_size: int | None = override(
        TrainingSpec,
        "batch_size",
        help="completions per micro-batch",
        default_text=f"as many as fit, up to {MICRO_BATCH}",
    )
    gradient_accumulation: int | None = override(
        TrainingSpec, "gradient_accumulation", default_text="by batch_size"
    )
    num_iterations: int = option(
        1,
        "optimizer steps on the same completions (mu in the GRPO paper)",
        group="optimization",
        minimum=1,
        maximum=1000,
    )
    warmup_steps: int = override(TrainingSpec, "warmup_steps", default=0)

    eval_samples: int = override(
        EvaluatedSpec,
        "eval_samples",
        default=0,
        help="number of held-out prompts on which rewards are measured (0: all of eval_dataset, "
        "or none without one)",
        default_text=None,
    )
    reward_log: str | None = option(
        None,
        "JSONL file, to which each completion is written with its step, row and rewards",
        group="evaluation",
        default_text="none",
        former="the completions are in completions.jsonl of the run directory, and `warmd samples "
        "JOB --json` prints them; --log-completions 1 keeps all steps",
    )
    log_completions: int = option(
        10,
        "keep all completions of every so many steps, besides those of the last five (0: none)",
        group="evaluation",
        minimum=0,
        maximum=10**6,
    )

    @property
    def steps_total(self) -> int | None:
        """The optimizer steps of the whole job; None: planned from the time limit.

        A step takes `prompts_per_step` prompts. The remainder of an epoch is dropped; every epoch
        is shuffled again, so that other prompts are dropped. `samples` must be known: `located`
        counts the prompts of the data set.
        """
        if self.time_limit is not None or self.steps is not None:
            return self.steps
        if self.samples is None:
            raise SpecError("samples", "must be given, or else steps, got neither")
        per_epoch = self.samples // self.prompts_per_step * self.num_iterations
        return self.epochs * per_epoch

    @property
    def steps_per_round(self) -> int:
        return self.num_iterations

    @property
    def most_processes(self) -> int:
        return self.prompts_per_step * self.num_generations

    @property
    def geometry(self) -> tuple[int, int]:
        """Completions per micro-batch, and micro-batches per step."""
        completions = self.prompts_per_step * self.num_generations
        batch_size = self.batch_size
        if batch_size is None and self.gradient_accumulation is not None:
            batch_size = completions // self.gradient_accumulation
        if batch_size is None:
            fitting = range(1, MICRO_BATCH + 1)
            batch_size = max(size for size in fitting if completions % size == 0)
        return batch_size, self.gradient_accumulation or completions // batch_size

    def check(self) -> None:
        super().check()
        if self.samples is not None and self.prompts_per_step > self.samples:
            raise SpecError(
                "prompts_per_step",
                f"must be at most {self.samples} (samples), got {self.prompts_per_step}",
            )
        self._check_geometry()
        templates.check(self.template)

    @classmethod
    def of_stored(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        stored = {"template": templates.MATH, **options}
        # Versions without `time_limit` had the number of completions in an event as this option.
        if "time_limit" not in options:
            stored["log_completions"] = 10 if stored.get("log_completions", 2) else 0
        return stored

    def _check_geometry(self) -> None:
        completions = self.prompts_per_step * self.num_generations
        of_step = f"the {completions} completions of a step (prompts_per_step x num_generations)"
        for name in ("batch_size", "gradient_accumulation"):
            value = getattr(self, name)
            if value is not None and completions % value != 0:
                raise SpecError(name, f"must divide {of_step}, got {value}")
        batch_size, accumulation = self.geometry
        if batch_size * accumulation != completions:
            raise SpecError(
                "gradient_accumulation",
                f"must be {completions // batch_size}, to make {of_step} with a batch_size of "
                f"{batch_size}, got {accumulation}",
            )

    @property
    def data_sets(self) -> list[str]:
        """The data sets that are not built in."""
        found = (self.dataset, self.eval_dataset)
        return [source for source in found if source not in (None, problems.ARITHMETIC)]

    @property
    def source(self) -> str | None:
        """The data set; None for seeds as tasks."""
        if self.dataset is None and self.played is None:
            return problems.ARITHMETIC
        return self.dataset

    def reading(self, rules: int) -> Reading:
        """Return the rules for reading records, with counts of what is skipped, all 0.

        `rules`: the RULES at the submission of the job.
        """
        return Reading(self.column_names, self.skip_bad_rows, Former.of(rules))

    @cached_property
    def parts(self) -> Parts:
        """The problems to train on and those held out, read and checked. Raises SpecError."""
        return self.parts_by(RULES)

    def parts_by(self, rules: int) -> Parts:
        """Return the problems of a job that was submitted with these RULES. Raises SpecError."""
        is_apart = self.eval_dataset is not None
        readings = [self.reading(rules)]
        if self.played is not None:
            return self._tasks_by(rules)
        training, held_out = problems.load_both(
            self.source or problems.ARITHMETIC,
            template=self.template,
            samples=self.samples,
            held_out=0 if is_apart else self.eval_samples,
            reading=readings[0],
            check=self.check_problem,
        )
        if is_apart:
            readings.append(self.reading(rules))
            held_out = problems.load(
                self.eval_dataset or "",
                template=self.template,
                samples=self.eval_samples or None,
                reading=readings[1],
                check=self.check_problem,
                named_by="eval_dataset",
            )
        return Parts(training, held_out, readings)

    def _tasks_by(self, rules: int) -> Parts:
        """Return the tasks of an environment or agent. Raises SpecError."""
        is_apart = self.eval_dataset is not None
        readings = [self.reading(rules)]
        training, held_out = tasks.load_both(
            self.source,
            template=self.template,
            samples=self.samples,
            held_out=0 if is_apart else self.eval_samples,
            reading=readings[0],
        )
        if is_apart:
            readings.append(self.reading(rules))
            held_out = tasks.load(
                self.eval_dataset,
                template=self.template,
                samples=self.eval_samples or None,
                reading=readings[1],
                named_by="eval_dataset",
            )
        return Parts(training, held_out, readings)

    def first_prompt(self) -> Content | None:
        if self.played is not None:  # it opens each episode
            return None
        return self.rendered_prompt(
            replace(
                self, samples=1, prompts_per_step=1, eval_samples=0, eval_dataset=None
            ).parts.training[0]
        )

    def cut_at(self, positions: int | None) -> int | None:
        return self.max_prompt_length or positions

    def located(self, folder: Path) -> Self:
        """Return the spec with data sets and paths, seen from `folder`, made absolute.

        `samples` becomes a number: a file that grows later must not change the job. Raises
        SpecError, also where that number does not fit the other options.
        """
        spec = self
        for name in ("dataset", "eval_dataset"):
            source = getattr(self, name)
            if source not in (None, problems.ARITHMETIC):
                takes = f"{TAKES} or {problems.ARITHMETIC}"
                changes: dict[str, Any] = {name: located(name, source, folder, takes)}
                spec = replace(spec, **changes)
        if spec.samples is None:
            spec = replace(spec, samples=len(spec.parts.training))
            spec.check()
        return spec

    def extended(self, steps: int) -> Self:
        """Return the spec with another total number of steps. Raises SpecError."""
        steps = self.options()["steps"].convert(steps)
        return self if steps == self.steps_total else replace(self, steps=steps)

    def check_inputs(self, model_config: Mapping[str, Any] | None) -> None:
        """Check everything that needs files: data, rewards, trackers, lengths. Raises SpecError.

        `model_config` is the content of the model's config.json, None when it is not available.
        """
        super().check_inputs(model_config)
        check_generates(model_config or {})
        training = self.parts.training
        if self.played is not None:
            self.check_played([*training, *self.parts.held_out])
        else:
            self.check_rewards([*training, *self.parts.held_out], scored=len(training))
        config = model_config or {}
        limit = positions_in(config)
        if limit is not None:
            self._check_positions(limit)

    def _check_positions(self, limit: int) -> None:
        """Check that the lengths of prompt and completion fit into the positions of the model."""
        prompt = self.max_prompt_length or 1
        if prompt >= limit:
            raise SpecError(
                "max_prompt_length",
                f"must be below {limit} (the positions of {self.model}), got {prompt}",
            )
        if (self.max_completion_length or 1) > limit - prompt:
            raise SpecError(
                "max_completion_length",
                f"must be at most {limit - prompt} ({self.model} has {limit} positions, the prompt "
                f"takes {prompt}), got {self.max_completion_length}",
            )

    def check_chats(self, folder: Path) -> None:
        if self.played is not None:
            return
        found = [*self.parts.training, *self.parts.held_out]
        check_chats(found, folder, chat_template=self.chat_template, system=self.system)

    def check_model_files(self, folder: Path) -> str | None:
        """Check prompts with the tokenizer of the model, for at most 1 s. Raises SpecError.

        Returns how many were left to the job.
        """
        if self.played is not None:
            return None
        problems = [*self.parts.training, *self.parts.held_out]
        left = check_prompts(
            problems,
            folder,
            chat_template=self.chat_template,
            system=self.system,
            max_prompt_length=self.max_prompt_length,
            max_completion_length=self.max_completion_length,
        )
        return unchecked(left, len(problems))
