"""The GRPO kind: a model writes a group of completions per prompt and learns from their rewards.

Here are its options and its course; `grpo_trainer.py` holds the trainer, which needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from . import problems, rewards
from .architectures import check_can_generate, check_generates
from .context import Context, WarmModel
from .errors import JobFailed, SpecError
from .prompts import NO_TEMPLATE, Prompt, completion_room, encode, too_long
from .spec import option, path_of
from .tokenizer_folder import TokenizerFolder
from .training import MOST_AT_ONCE, MOST_ROWS, MOST_STEPS, MOST_TOKENS, TrainingSpec
from .user_modules import own_modules
from .user_rewards import KeywordReward

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

    from .grpo_trainer import GroupTrainer

LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
MOST_CHARACTERS = 100_000  # of template and system message
MOST_QUESTIONS = 16  # places for it in the template
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

        What is left is checked when the job begins, and so are chats, which need the template.
        """
        found = [*self.training_problems(), *self.held_out_problems()]
        is_chat = any(not isinstance(problem.prompt, str) for problem in found)
        files = TokenizerFolder(folder)
        if (self.chat_template or is_chat) and files.lacks_chat_template():
            raise SpecError(*NO_TEMPLATE)
        limit = files.positions()
        if limit is None or self.max_prompt_length is not None or self.chat_template:
            return
        room = limit - (self.max_completion_length or 1)
        texts = [(p.row, p.prompt) for p in found if isinstance(p.prompt, str)]
        longer = files.longer_than(room, texts)
        if longer is not None:
            raise SpecError(*too_long(*longer, limit))


def run(spec: GrpoSpec, ctx: Context) -> dict[str, Any]:
    """Train until done or `ctx.stop`; go on from the latest checkpoint when there is one.

    Returns steps, the rewards before and after on held-out problems (None without any), the
    folder of the model and the last step's metrics. Raises Stopped and JobFailed.
    """
    from .compute.aten_overrides import ONEDNN, fast_kernels, recorded_choice

    checkpoint = ctx.checkpoints.latest()
    begun = time.perf_counter()
    warm = ctx.models.take(spec.model)
    check_can_generate(warm.model)
    training, held_out = spec.training_problems(), spec.held_out_problems()
    prompts = _encode(spec, warm, training)
    eval_prompts = _encode(spec, warm, held_out)
    num_cut = sum(prompt.is_cut for prompt in prompts + eval_prompts)
    if num_cut:
        ctx.emit("truncated", prompts=num_cut, max_prompt_length=spec.max_prompt_length)
    config = _config(spec, ctx, warm, prompts + eval_prompts)
    data = {
        "data": problems.fingerprint(training + held_out),
        "columns": problems.columns_fingerprint(training + held_out),
    }
    data_done = time.perf_counter()
    functions = spec.reward_functions(training)
    trainer = _trainer(spec, ctx, warm, config, prompts, functions, data)
    seconds = {"data_s": data_done - begun, "trainer_s": time.perf_counter() - data_done}
    gemm = recorded_choice(ctx.run_dir / "gemm", ctx.device)
    _announce(spec, ctx, trainer, checkpoint, gemm, seconds)

    with fast_kernels(onednn=gemm == ONEDNN):
        if checkpoint is None and eval_prompts:
            trainer.check_weights()
            trainer.reward_before = _evaluate(ctx, trainer, eval_prompts, "before")
        trainer.train_to_end(checkpoint)
        reward_after = _evaluate(ctx, trainer, eval_prompts, "after") if eval_prompts else None
    trainer.save_final_model(ctx.run_dir / "model")
    return {
        "steps": trainer.state.global_step,
        "reward_before": trainer.reward_before,
        "reward_after": reward_after,
        "model": "model",
        "metrics": {k: v for k, v in trainer.last_metrics.items() if k != "samples"},
    }


def _encode(spec: GrpoSpec, warm: WarmModel, found: Sequence[problems.Problem]) -> list[Prompt]:
    return encode(
        found,
        warm.tokenizer,
        chat_template=spec.chat_template,
        system=spec.system,
        max_length=spec.max_prompt_length,
    )


def _config(spec: GrpoSpec, ctx: Context, warm: WarmModel, prompts: Sequence[Prompt]) -> GRPOConfig:
    import torch
    from trl.trainer.grpo_config import GRPOConfig

    from .compute.device import has_bfloat16

    if spec.rollout_dtype == "int8" and ctx.device != "cpu":
        raise JobFailed(f"rollout_dtype: must be float32 on a GPU ({ctx.device}), got int8")
    if warm.tokenizer.eos_token_id is None:
        raise JobFailed(f"model: the tokenizer of {spec.model} has no end-of-sequence token")
    batch_size, accumulation = spec.geometry
    max_completion_length = completion_room(
        prompts,
        limit=getattr(warm.model.config.get_text_config(), "max_position_embeddings", None),
        asked=spec.max_completion_length,
        usual=warm.model.generation_config.max_new_tokens or COMPLETION_LENGTH,
    )
    return GRPOConfig(
        output_dir=str(ctx.run_dir),
        run_name=ctx.job_id,
        max_steps=spec.steps_total,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_generations=spec.num_generations,
        num_iterations=spec.num_iterations,
        max_completion_length=max_completion_length,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        reward_weights=[reward.weight for reward in spec.reward_specs],
        scale_rewards=spec.scale_rewards,
        learning_rate=spec.learning_rate or _usual_learning_rate(warm.model.num_parameters()),
        lr_scheduler_type=spec.lr_scheduler,
        warmup_steps=spec.warmup_steps,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_grad_norm,
        beta=spec.beta,
        epsilon=spec.epsilon,
        epsilon_high=spec.epsilon_high,
        loss_type=spec.loss_type,
        seed=spec.seed,
        save_strategy="no",  # JobTrainer saves, by spec.save_every
        report_to=[tracker for tracker in spec.report_to if tracker != "none"],
        use_cpu=ctx.device == "cpu",
        # TRL's defaults, bf16 and recomputed activations, are three times slower on a CPU.
        bf16=has_bfloat16(torch.device(ctx.device)),
        activation_checkpointing=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
    )


def _usual_learning_rate(num_parameters: int) -> float:
    # Small models bear, and need, far larger steps; 1e-3 undid even the smallest.
    if num_parameters < 1e6:
        return 3e-4
    return 1e-4 if num_parameters < 1e8 else 1e-6


def _trainer(
    spec: GrpoSpec,
    ctx: Context,
    warm: WarmModel,
    config: GRPOConfig,
    prompts: Sequence[Prompt],
    functions: Mapping[str, rewards.Reward | KeywordReward],
    data: Mapping[str, str],
) -> GroupTrainer:
    import torch

    from .grpo_trainer import GroupTrainer
    from .packed_trainer import twin

    model, reference = warm.model, None
    weights = (*model.parameters(), *model.buffers())
    if any(weight.is_floating_point() and weight.dtype != torch.float32 for weight in weights):
        model = model.float()  # goes over every module, also where there is nothing to do
    if spec.beta > 0:
        # The warm weights stay as they are; what is trained is copied from them when it changes.
        reference, model = model.requires_grad_(False).eval(), twin(model)
    return GroupTrainer(
        job=ctx,
        spec=spec,
        config=config,
        model=model.requires_grad_(True),
        reference=reference,
        tokenizer=warm.tokenizer,
        prompts=prompts,
        rewards=functions,
        data=data,
        rollout_dtype=_rollout_dtype(spec, ctx),
        samples_shown=spec.log_completions,
    )


def _rollout_dtype(spec: GrpoSpec, ctx: Context) -> str:
    """The precision of completions: float32 where the processor does not serve int8."""
    from .compute.levels import levels, why_not

    if spec.rollout_dtype == "int8" and levels().int8 is None:
        ctx.emit("warning", message=f"rollout_dtype: {why_not('int8')}")
        return "float32"
    return spec.rollout_dtype


def _announce(
    spec: GrpoSpec,
    ctx: Context,
    trainer: GroupTrainer,
    checkpoint: Path | None,
    gemm: str,
    seconds: dict[str, Any],
) -> None:
    import torch

    from .checkpointing import step_of
    from .compute.levels import compute_summary

    batch_size, accumulation = spec.geometry
    ctx.emit(
        "begin",
        steps_total=spec.steps_total,
        resumed_from=None if checkpoint is None else step_of(checkpoint),
        model=spec.model,
        parameters=trainer.model.num_parameters(),
        device=str(trainer.config.device),
        threads=torch.get_num_threads(),
        gemm=gemm,
        num_generations=spec.num_generations,
        batch_size=batch_size,
        gradient_accumulation=accumulation,
        max_completion_length=trainer.config.max_completion_length,
        pack_tokens=trainer.most_tokens,  # in one pass of the model; None: by padded batches
        learning_rate=trainer.config.learning_rate,
        rollout_dtype=trainer.rollout_dtype,
        **compute_summary(ctx.device),
        **seconds,
    )


def _evaluate(ctx: Context, trainer: GroupTrainer, prompts: Sequence[Prompt], phase: str) -> float:
    reward = trainer.mean_reward(prompts)
    ctx.emit("eval", step=trainer.state.global_step, phase=phase, reward=reward, n=len(prompts))
    return reward
