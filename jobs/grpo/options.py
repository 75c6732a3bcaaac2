"""The options of the GRPO kind, and what is checked of them at submit. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ..errors import JobFailed, SpecError
from ..models import chat_templates
from ..models.architectures import check_generates
from ..models.tokenizer_folder import TokenizerFolder
from ..spec import option, path_of
from ..training.options import (
    MOST_AT_ONCE,
    MOST_ROWS,
    MOST_STEPS,
    MOST_TOKENS,
    TrainingSpec,
)
from ..user_code.modules import own_modules
from . import problems, rewards
from .prompts import NO_TEMPLATE, field_of, messages_of, too_long
from .user_rewards import KeywordReward

LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
MOST_CHARACTERS = 100_000  # of template and system message
MOST_QUESTIONS = 16  # places for it in the template
_CHECK_S = 1.0  # for rendering and counting the tokens of prompts at submit
MICRO_BATCH = 8  # completions, unless the options say otherwise
COMPLETION_LENGTH = 64  # tokens, unless the options or the model's generation config say otherwise


@dataclass(frozen=True, kw_only=True)
class GrpoSpec(TrainingSpec):
    """Every option of a GRPO job."""

    kind: ClassVar[str] = "grpo"
    changeable: ClassVar[tuple[str, ...]] = (*TrainingSpec.changeable, "log_completions")
    judged_by: ClassVar[tuple[str, ...]] = ("loss", "reward", "kl")
    # Advantages are of about 1 and so, around 0, is the loss. A policy that falls apart shows in a
    # penalty or a ratio above that, in nats from the reference, or in tokens picked at random.
    watched: ClassVar[Mapping[str, float]] = {"loss": 1.0, "kl": 1.0, "entropy": 1.0}

    model: str = option("demo", "name of the warm model to train")
    dataset: str = option(
        problems.ARITHMETIC,
        "JSONL file of question/answer or prompt rows, or arithmetic, which is built in",
    )
    samples: int = option(
        80, "distinct prompts to train on, from the top", minimum=1, maximum=MOST_ROWS
    )
    eval_samples: int = option(
        0,
        "held-out prompts whose reward is measured before and after; 0: none",
        minimum=0,
        maximum=MOST_ROWS,
    )
    template: str = option(
        problems.DEFAULT_TEMPLATE, "text that {question} is put into; prompt rows are left alone"
    )
    chat_template: bool = option(False, "give plain prompts to the tokenizer's chat template")
    system: str | None = option(None, "system message that opens a chat")

    epochs: int = option(1, "passes over the prompts", minimum=1, maximum=10**6)
    steps: int | None = option(
        None, "optimizer steps in all, instead of epochs", minimum=1, maximum=MOST_STEPS
    )
    prompts_per_step: int = option(
        1, "prompts whose groups make one optimizer step", minimum=1, maximum=MOST_AT_ONCE
    )
    num_generations: int = option(8, "completions per prompt: the group", minimum=2, maximum=4096)
    num_iterations: int = option(
        1, "optimizer steps on the same completions", minimum=1, maximum=1000
    )
    batch_size: int | None = option(
        None,
        f"completions per micro-step; by default as many as fit, up to {MICRO_BATCH}",
        minimum=1,
        maximum=MOST_AT_ONCE,
    )
    gradient_accumulation: int | None = option(
        None,
        "micro-steps per step; by default what batch_size leaves",
        minimum=1,
        maximum=MOST_AT_ONCE,
    )

    max_prompt_length: int | None = option(
        None,
        "tokens of a prompt, cut from the left; by default a prompt is never cut",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    max_completion_length: int | None = option(
        None,
        "tokens of a completion; by default the model's own max_new_tokens, or "
        f"{COMPLETION_LENGTH}, or what the longest prompt leaves",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    temperature: float = option(1.0, "of the sampling", minimum=0.01, maximum=100)
    top_p: float = option(1.0, "share of probability to sample from", above=0, maximum=1)
    top_k: int = option(
        0, "number of tokens to sample from; 0: all", minimum=0, maximum=MOST_TOKENS
    )
    rollout_dtype: str = option(
        "float32",
        "what completions are written by; int8: rounded weights, on a CPU, and a loss that is "
        "corrected for what that changes",
        choices=("float32", "int8"),
    )

    reward: tuple[str, ...] = option(
        ("correctness",),
        f"{', '.join(rewards.NAMES)} or module:function; =WEIGHT may follow; several are summed",
    )
    custom_min_length: int | None = option(
        None, "reward custom: fewest words", minimum=0, maximum=MOST_TOKENS
    )
    custom_max_length: int | None = option(
        None, "reward custom: most words", minimum=0, maximum=MOST_TOKENS
    )
    custom_required_term: tuple[str, ...] = option((), "reward custom: a term to contain")
    custom_forbidden_term: tuple[str, ...] = option((), "reward custom: a term to avoid")
    custom_format_pattern: str | None = option(
        None, "reward custom: regular expression that earns custom_format_bonus"
    )
    custom_format_bonus: float = option(
        0.5, "reward custom: what the pattern earns", above=0, maximum=1000
    )
    scale_rewards: str = option(
        "group", "what advantages are divided by the spread of", choices=("group", "batch", "none")
    )

    learning_rate: float | None = option(
        None,
        "of AdamW; by default from the model's size: 3e-4 below 1M parameters, 1e-4 below 100M, "
        "else 1e-6",
        above=0,
        maximum=1,
    )
    warmup_steps: int = option(
        0, "steps in which the learning rate rises", minimum=0, maximum=MOST_STEPS
    )
    weight_decay: float = option(0.0, "of AdamW", minimum=0, maximum=10)
    beta: float = option(
        0.0, "weight of the KL term against the starting weights", minimum=0, maximum=1000
    )
    epsilon: float = option(0.2, "clipping of the probability ratio", above=0, maximum=1000)
    epsilon_high: float | None = option(
        None, "the same upwards; by default epsilon", above=0, maximum=1000
    )
    loss_type: str = option("dapo", "formula of the loss, by TRL's name", choices=LOSSES)

    seed: int = option(42, "of sampling and of the prompts' order", minimum=0, maximum=2**32 - 1)
    log_completions: int = option(
        2, "completions shown in each step's event", minimum=0, maximum=1000
    )

    @property
    def steps_total(self) -> int:
        """The optimizer steps of the whole job.

        A step takes `prompts_per_step` prompts. What is left over at the end of an epoch is
        dropped; every epoch is shuffled anew, so that it is another prompt's turn.
        """
        per_epoch = self.samples // self.prompts_per_step * self.num_iterations
        return self.epochs * per_epoch if self.steps is None else self.steps

    @property
    def geometry(self) -> tuple[int, int]:
        """Completions per micro-step and micro-steps per step."""
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
        if self.prompts_per_step > self.samples:
            raise SpecError(
                "prompts_per_step",
                f"must be at most {self.samples} (samples), got {self.prompts_per_step}",
            )
        self._check_geometry()
        self._check_texts()
        if self.rollout_dtype == "int8" and self.loss_type == "vespo":
            raise SpecError("rollout_dtype", "must be float32 with loss_type vespo, got int8")
        if self.system is not None and not self.chat_template:
            raise SpecError("system", "must go with chat_template, got it alone")
        names = [spec.name for spec in self.reward_specs]
        if not names or len(set(names)) < len(names):
            got = ", ".join(names) or "none"
            raise SpecError("reward", f"must be one or more, each once, got {got}")

    def _check_texts(self) -> None:
        """Bound what stands in every prompt, and so once in memory for each of them."""
        for name in ("template", "system"):
            length = len(getattr(self, name) or "")
            if length > MOST_CHARACTERS:
                raise SpecError(name, f"must be at most {MOST_CHARACTERS} characters, got {length}")
        questions = self.template.count("{question}")
        if questions > MOST_QUESTIONS:
            raise SpecError(
                "template",
                f"must have {{question}} at most {MOST_QUESTIONS} times, got {questions}",
            )

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
    def reward_specs(self) -> list[rewards.RewardSpec]:
        """The rewards with their weights. Raises SpecError."""
        return [rewards.parse(text) for text in self.reward]

    def reward_functions(
        self, found: Sequence[problems.Problem]
    ) -> dict[str, rewards.Reward | KeywordReward]:
        """The rewards by name, for such problems; imports a user's own. Raises SpecError."""
        custom = rewards.CustomOptions(
            min_length=self.custom_min_length,
            max_length=self.custom_max_length,
            required_terms=self.custom_required_term,
            forbidden_terms=self.custom_forbidden_term,
            format_pattern=self.custom_format_pattern,
            format_bonus=self.custom_format_bonus,
        )
        columns = problems.columns_of(problem.columns for problem in found)
        return {
            spec.name: rewards.resolve(spec, custom, columns=columns) for spec in self.reward_specs
        }

    @property
    def has_own_rewards(self) -> bool:
        """Whether a reward is a function of the user's."""
        return any(spec.is_own for spec in self.reward_specs)

    def training_problems(self) -> list[problems.Problem]:
        """Read the problems to train on. Raises SpecError."""
        found = problems.load(self.dataset, template=self.template, samples=self.samples)
        self._check_answers(found)
        return found

    def held_out_problems(self) -> list[problems.Problem]:
        """Read the problems to evaluate on: none of those trained on. Raises SpecError."""
        if self.eval_samples == 0:
            return []
        found = problems.load(
            self.dataset,
            template=self.template,
            samples=self.eval_samples,
            part="eval",
            train_samples=self.samples,
        )
        self._check_answers(found)
        return found

    def _check_answers(self, found: Sequence[problems.Problem]) -> None:
        if any(spec.name == "correctness" for spec in self.reward_specs):
            rewards.check_answers(found, self.dataset)

    def located(self, folder: Path) -> Self:
        """Return the same spec with the dataset's path seen from `folder` made absolute.

        Raises SpecError.
        """
        if self.dataset == problems.ARITHMETIC:
            return self
        return replace(self, dataset=str(path_of("dataset", self.dataset, folder)))

    def extended(self, steps: int) -> Self:
        """Return the same spec with another number of steps in all. Raises SpecError."""
        steps = self.options()["steps"].convert(steps)
        return self if steps == self.steps_total else replace(self, steps=steps)

    def check_inputs(self, model_config: Mapping[str, Any] | None) -> None:
        """Check what needs files: data, rewards, trackers, lengths. Raises SpecError.

        `model_config` is the content of the model's config.json, None when it is not at hand.
        """
        super().check_inputs(model_config)
        check_generates(model_config or {})
        training = self.training_problems()
        self.held_out_problems()
        with own_modules([str(Path.cwd())]) if self.has_own_rewards else nullcontext():
            self.reward_functions(training)
        config = model_config or {}
        limit = config.get("text_config", config).get("max_position_embeddings")
        wanted = (self.max_prompt_length or 1) + (self.max_completion_length or 1)
        if limit is not None and wanted > limit:
            raise SpecError(
                "max_completion_length",
                f"must be at most {limit} (the positions of {self.model}) together with the "
                f"prompt, got {wanted}",
            )

    def check_model_files(self, folder: Path) -> None:
        """Check the prompts with the model's tokenizer, for a second at most. Raises SpecError.

        Chats are rendered by the model's template. What there was no time for, and what only
        transformers can read, is checked when the job begins.
        """
        until = time.monotonic() + _CHECK_S
        found = [*self.training_problems(), *self.held_out_problems()]
        has_chats = self.chat_template or any(not isinstance(p.prompt, str) for p in found)
        files = TokenizerFolder(folder)
        if has_chats and files.lacks_chat_template():
            raise SpecError(*NO_TEMPLATE)
        texts = self._texts(found, files.chat_template() if has_chats else None, until)
        limit = files.positions()
        if limit is None or self.max_prompt_length is not None:
            for _ in texts:  # for what the template refuses
                pass
            return
        room = limit - (self.max_completion_length or 1)
        longer = files.longer_than(room, texts, until=until)
        if longer is not None:
            raise SpecError(*too_long(*longer, limit))

    def _texts(
        self,
        found: Sequence[problems.Problem],
        template: chat_templates.FolderTemplate | None,
        until: float,
    ) -> Iterator[tuple[int, str]]:
        """Yield the row and the text of each prompt, while there is time.

        Raises SpecError for a chat that the template refuses.
        """
        for problem in found:
            messages = messages_of(problem, chat_template=self.chat_template, system=self.system)
            if messages is None:
                assert isinstance(problem.prompt, str)
                yield problem.row, problem.prompt
                continue
            if template is None:
                continue
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            field = field_of(problem)
            try:
                text = chat_templates.render(template, messages, field=field, limit_s=left_s)
            except chat_templates.TooSlow:
                return
            except JobFailed as error:
                if isinstance(error.__cause__, chat_templates.Refused):
                    raise SpecError("dataset", str(error).removeprefix("dataset: ")) from None
                return  # something that this environment lacks, perhaps
            yield problem.row, text
