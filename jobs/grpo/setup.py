"""Builds a GRPO job: its rewards or environment, its task and its loop.

Imports torch, transformers and trl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from ..compute.levels import levels, why_not
from ..context import Context, WarmModel
from ..environments.options import EPISODE_LENGTH
from ..environments.playing import playing
from ..environments.tasks import task_of
from ..errors import JobFailed
from ..models.architectures import positions_in
from ..models.chat_templates import shown_prompt
from ..models.generation_settings import end_tokens
from ..models.vocabulary import Vocabulary
from ..rewards import problems, rewards
from ..rewards.prompts import Prompt, completion_room, encode
from ..rewards.reward_calls import RewardCalls
from ..rewards.user_rewards import KeywordReward
from ..sequences.attention import can_pack
from ..training.arguments import UNPLANNED, common_arguments, in_float32, scorer_of
from ..training.begin import by_size
from ..training.determinism import kept_settings
from ..training.loop import Training
from ..training.lora import chosen_learning_rate, with_adapter
from ..training.reference import weight_sharing_clone
from .completion_source import CompletionSource
from .episode_source import EpisodeSource
from .evaluation import HeldOut
from .judge import Judge
from .options import COMPLETION_LENGTH, GrpoSpec, Parts
from .reward_process import RewardProcess
from .reward_sources import EnvironmentSources, Sources
from .rollouts import GroupSampler, Source
from .sampler import Sampler
from .step import Reinforcement


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a job trains on: completions of prompts, or episodes of tasks.

    `source` returns what samples and judges them, by a model. `rewards`: the names of the scores.
    `sources`: the files of what judges. `about`: fields of the event `begin`.
    """

    source: Callable[[Any, Sampler], Source]
    config: GRPOConfig
    rewards: Sequence[str]
    sources: Sources | EnvironmentSources
    about: Mapping[str, Any] = field(default_factory=dict)


def completions_of(
    spec: GrpoSpec,
    ctx: Context,
    warm: WarmModel,
    parts: Parts,
    vocabulary: Vocabulary,
    stack: ExitStack,
) -> Setup:
    """Return the completions of prompts; the stack ends what calls the rewards."""
    prompts = encoded(spec, warm, parts.training, vocabulary)
    held_out = encoded(spec, warm, parts.held_out, vocabulary)
    num_cut = sum(prompt.is_cut for prompt in prompts + held_out)
    if num_cut:
        ctx.emit("truncated", prompts=num_cut, max_prompt_length=spec.max_prompt_length)
    config = config_of(spec, ctx, warm, prompts + held_out)
    with kept_settings():  # of torch, which the modules of rewards may change
        functions = spec.reward_functions(parts.training)
    calls = stack.enter_context(reward_calls(spec, functions, prompts + held_out))

    def source(model: Any, sampler: Sampler) -> CompletionSource:
        return CompletionSource(
            args=config,
            model=model,
            tokenizer=warm.tokenizer,
            sampler=sampler,
            judge=Judge(ctx, calls, len(functions)),
            prompts=prompts,
            held_out=held_out,
        )

    return Setup(
        source=source,
        config=config,
        rewards=list(functions),
        sources=Sources(functions.values()),
        about={"first_prompt": shown_prompt(prompts[0].text)},
    )


def episodes_of(
    spec: GrpoSpec, ctx: Context, warm: WarmModel, parts: Parts, stack: ExitStack
) -> Setup:
    """Return the episodes of tasks; the stack ends the processes that play them."""
    config = config_of(spec, ctx, warm, ())
    assert spec.played is not None
    option, name = spec.played
    made = stack.enter_context(
        playing(
            spec,
            ctx,
            warm,
            ends=end_tokens(warm.model, warm.tokenizer),
            tasks=[task_of(one) for one in parts.training],
            sampling={
                "temperature": spec.temperature,
                "top_p": spec.top_p,
                "top_k": spec.top_k,
                "min_p": spec.min_p or 0.0,
            },
            most_tokens=int(config.max_completion_length or 0),
            episodes=spec.prompts_per_step * spec.num_generations,
        )
    )

    def source(model: Any, sampler: Sampler) -> EpisodeSource:
        return EpisodeSource(
            ctx=ctx,
            args=config,
            model=model,
            tokenizer=warm.tokenizer,
            sampler=sampler,
            playing=made,
            option=option,
            stop=spec.stop,
            held_out=[task_of(one) for one in parts.held_out],
        )

    return Setup(
        source=source,
        config=config,
        rewards=[option],
        sources=EnvironmentSources(made.pool),
        about={
            option: name,
            "interface": made.pool.interface,
            "tasks": len(parts.training),
            "concurrency": made.pool.size,
        },
    )


def reward_calls(
    spec: GrpoSpec,
    functions: Mapping[str, rewards.Reward | KeywordReward],
    prompts: Sequence[Prompt],
) -> AbstractContextManager[RewardCalls | RewardProcess]:
    """Return what calls the rewards: with a time limit a process, before this one computes."""
    if spec.reward_timeout is None:
        return RewardCalls(functions, prompts)
    return RewardProcess(functions, prompts, spec.reward_timeout)


def encoded(
    spec: GrpoSpec,
    warm: WarmModel,
    found: Sequence[problems.Problem],
    vocabulary: Vocabulary,
) -> list[Prompt]:
    return encode(
        found,
        warm.tokenizer,
        vocabulary,
        chat_template=spec.chat_template,
        system=spec.system,
        max_length=spec.max_prompt_length,
    )


def config_of(
    spec: GrpoSpec, ctx: Context, warm: WarmModel, prompts: Sequence[Prompt]
) -> GRPOConfig:
    if spec.rollout_dtype == "int8" and ctx.device != "cpu":
        raise JobFailed(f"rollout_dtype: must be float32 on a GPU ({ctx.device}), got int8")
    if warm.tokenizer.eos_token_id is None:
        raise JobFailed(f"model: the tokenizer of {spec.model} has no end-of-sequence token")
    batch_size, accumulation = spec.geometry
    limit = positions_in(warm.model.config)
    if spec.played is None:
        max_completion_length = completion_room(
            prompts,
            limit=limit,
            requested=spec.max_completion_length,
            default=warm.model.generation_config.max_new_tokens or COMPLETION_LENGTH,
        )
    else:  # the environment or agent decides how long a prompt is
        most = spec.max_completion_length or EPISODE_LENGTH
        max_completion_length = most if limit is None else min(most, limit - 1)
    return GRPOConfig(
        **common_arguments(spec, ctx),
        max_steps=UNPLANNED if spec.steps_total is None else spec.steps_total,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_generations=spec.num_generations,
        num_iterations=spec.num_iterations,
        max_completion_length=max_completion_length,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        reward_weights=[reward.weight for reward in spec.reward_specs]
        if spec.played is None
        else [1.0],
        learning_rate=chosen_learning_rate(
            spec,
            ctx,
            # Small models need larger rates; 1e-3 diverged even for the smallest.
            by_size(warm.model.num_parameters(), 3e-4, 1e-4, 1e-6),
            most=_MOST_FOR_LORA,
        ),
        warmup_steps=spec.warmup_steps,
        **spec.loss_arguments(),
    )


# With 3e-3 the reward of the demo model fell to 0.1 after two of three seeds (docs/lora.md).
_MOST_FOR_LORA = 1e-3


def training_of(
    spec: GrpoSpec,
    ctx: Context,
    warm: WarmModel,
    setup: Setup,
    data: Mapping[str, str],
    *,
    measures: bool = True,
) -> tuple[Reinforcement, Training]:
    """Return the task of a job and its loop; `measures`: whether held-out tasks are evaluated."""
    config = setup.config
    model, reference = in_float32(warm.model), None
    if spec.lora is not None:
        model = with_adapter(warm, model, spec)  # the reference is the model without it
    else:
        if spec.beta > 0:
            # The warm model is the reference; the policy shares its weights until the first update.
            reference, model = model.requires_grad_(False).eval(), weight_sharing_clone(model)
        model.requires_grad_(True)
    packs = can_pack(model)
    rollout_dtype = _rollout_dtype(spec, ctx)
    if not packs:
        _check_padded(spec, model)
    scorer = scorer_of(
        *(model, ctx, warm.tokenizer, config),
        rows=config.per_device_train_batch_size,
        temperature=config.temperature,
        samples=spec.lora is None,
    )
    sampler = Sampler(
        model,
        warm.tokenizer,
        config,
        rollout_dtype=rollout_dtype,
        keeps_logps=spec.replay > 0,
    )
    source = setup.source(model, sampler)
    task = Reinforcement(
        ctx=ctx,
        args=config,
        model=model,
        reference=reference,
        groups=GroupSampler(
            source, config, ranks=ctx.ranks, resample=spec.resample, replay=spec.replay
        ),
        scorer=scorer,
        rewards=setup.rewards,
        data=data,
    )
    measured = None
    if measures and source.num_held_out:
        measured = HeldOut(ctx=ctx, model=model, task=task)
    training = Training(
        ctx=ctx,
        spec=spec,
        args=config,
        model=model,
        tokenizer=warm.tokenizer,
        task=task,
        measured=measured,
        eval_every=spec.eval_every,
        on_step=task.trained,
        before_update=task.before_update,
        differences_since=task.differences_since,
        about=setup.sources.about,
    )
    if measured is not None:
        measured.during = training.progress.during
    return task, training


def _check_padded(spec: GrpoSpec, model: Any) -> None:
    """Refuse what needs packs, for a model that has none."""
    kind = f"for a {model.config.model_type} of this config"
    if spec.rollout_dtype == "int8":
        raise JobFailed(f"rollout_dtype: must be float32 {kind}, got int8")
    if spec.replay:
        raise JobFailed(f"replay: must be 0 {kind}, got {spec.replay}")


def _rollout_dtype(spec: GrpoSpec, ctx: Context) -> str:
    """Return the precision of generation: float32 where the processor has no int8 kernels."""
    if spec.rollout_dtype == "int8" and levels().int8 is None:
        ctx.emit("warning", message=f"rollout_dtype: {why_not('int8')}")
        return "float32"
    return spec.rollout_dtype
