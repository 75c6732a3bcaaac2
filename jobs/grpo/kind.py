"""The GRPO kind: train on groups of sampled completions and their rewards (arXiv:2402.03300).

`options.py` has its options, `task.py` the steps and the loss, which need torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..context import Context, WarmModel, step_of
from ..data import left_out
from ..data.reader import report_former, report_shared, report_skipped, report_splits
from ..errors import JobFailed
from ..models.architectures import check_can_generate, positions_in
from ..models.chat_templates import shown_prompt
from ..models.generation_settings import of_rollouts_words
from ..models.pretrained_tokenizer import appended_end_words
from ..models.vocabulary import Vocabulary
from ..rewards import problems, rewards
from ..rewards.prompts import Prompt, completion_room, encode
from ..rewards.reward_calls import RewardCalls
from ..rewards.user_rewards import KeywordReward
from ..sequences.padding import check_padding
from ..training.begin import announce, by_size, run_to_end
from ..training.same_inputs import require_same
from . import completions
from .completions import Completions
from .options import COMPLETION_LENGTH, GrpoSpec
from .reward_log import RewardLog
from .reward_sources import Sources

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

    from ..training.loop import Training
    from .reward_process import RewardProcess
    from .step import Reinforcement


def run(spec: GrpoSpec, ctx: Context) -> dict[str, Any]:
    """Train until done or `ctx.stop`; resume from the latest checkpoint when there is one.

    Returns steps, the mean reward on held-out problems before and after (None without any), the
    folder of the model and the metrics of the last step. Raises Stopped and JobFailed.
    """
    from ..training.determinism import kept_settings

    checkpoint = ctx.checkpoints.latest()
    begun = time.perf_counter()
    warm = ctx.models.take(spec.model)
    check_can_generate(warm.model)
    parts = spec.parts_by(ctx.rules)
    training_set, held_out = parts.training, parts.held_out
    report_splits(ctx.emit, "dataset", *spec.data_sets, former=parts.readings[0].former)
    for reading in parts.readings:
        report_former(ctx.emit, reading.former)
        report_skipped(ctx.emit, reading)
    if spec.eval_dataset is not None:  # within a data set, prompts are distinct
        seen = {problems.key_of(problem) for problem in training_set}
        num_shared = sum(problems.key_of(problem) in seen for problem in held_out)
        report_shared(ctx.emit, num_shared, len(held_out))
    vocabulary = Vocabulary.of(spec.model, warm.model, warm.tokenizer)
    check_padding(warm)
    prompts = encoded(spec, warm, training_set, vocabulary)
    eval_prompts = encoded(spec, warm, held_out, vocabulary)
    num_cut = sum(prompt.is_cut for prompt in prompts + eval_prompts)
    if num_cut:
        ctx.emit("truncated", prompts=num_cut, max_prompt_length=spec.max_prompt_length)
    config = config_of(spec, ctx, warm, prompts + eval_prompts)
    data = {
        "data": problems.fingerprint(training_set + held_out),
        "columns": problems.columns_fingerprint(training_set + held_out),
    }
    data_done = time.perf_counter()
    with kept_settings():  # of torch, which the modules of rewards may change
        functions = spec.reward_functions(training_set)
    sources = Sources(functions.values())
    with reward_calls(spec, functions, prompts + eval_prompts) as calls:
        task, training = training_of(
            spec, ctx, warm, config, prompts, eval_prompts, calls, functions, data, sources
        )
        require_same(ctx.ranks, "dataset", {"rows": data["data"], "columns": data["columns"]})
        require_same(ctx.ranks, "reward", sources.digests)
        batch_size, accumulation = spec.geometry
        gemm = announce(
            training,
            checkpoint,
            model=spec.model,
            num_generations=spec.num_generations,
            batch_size=batch_size,
            gradient_accumulation=accumulation,
            max_completion_length=config.max_completion_length,
            pack_tokens=task.scorer.most_tokens,  # per forward pass; None: padded batches
            rollout_dtype=task.groups.sampler.rollout_dtype,
            first_prompt=shown_prompt(prompts[0].text),
            keeps_completions=kept_completions(spec.log_completions),
            left_out=left_out.of_job("dataset", *spec.data_sets, readings=parts.readings),
            data_s=data_done - begun,
            trainer_s=time.perf_counter() - data_done,
        )
        for words in spec.loss_warnings():
            ctx.emit("warning", message=words)
        if warm.appended_end is not None:
            ctx.emit("warning", message=f"model: {appended_end_words(warm.appended_end)}")
        for words in of_rollouts_words(warm.unapplied):
            ctx.emit("warning", message=f"model: {words}")
        steps = spec.steps_total
        if checkpoint is not None and (steps is None or step_of(checkpoint) < steps):
            sources.warn_of_changes(ctx, checkpoint)
        with (
            _completions(spec, ctx, checkpoint) as task.completions,
            _reward_log(spec, ctx, checkpoint) as task.reward_log,
        ):
            run_to_end(training, checkpoint, gemm)
    before = task.reward_before if training.before is None else training.before["reward"]
    return {
        "steps": training.step,
        "reward_before": before,
        "reward_after": None if training.last_eval is None else training.last_eval["reward"],
        "model": "model",
        "metrics": {k: v for k, v in training.last_metrics.items() if k != "samples"},
        **training.planned,
    }


def reward_calls(
    spec: GrpoSpec,
    functions: Mapping[str, rewards.Reward | KeywordReward],
    prompts: Sequence[Prompt],
) -> AbstractContextManager[RewardCalls | RewardProcess]:
    """Return what calls the rewards: with a time limit a process, before this one computes."""
    from .reward_process import RewardProcess

    if spec.reward_timeout is None:
        return RewardCalls(functions, prompts)
    return RewardProcess(functions, prompts, spec.reward_timeout)


def kept_completions(every: int) -> dict[str, int] | None:
    """Return what the event `begin` tells of the completions that are kept; None for none."""
    if every == 0:
        return None
    return {"every": every, "latest": completions.LATEST, "most_bytes": completions.MOST_BYTES}


def _completions(
    spec: GrpoSpec, ctx: Context, checkpoint: Path | None
) -> AbstractContextManager[Completions | None]:
    if ctx.ranks.rank > 0:
        return nullcontext()
    step = 0 if checkpoint is None else step_of(checkpoint)
    path, every = ctx.run_dir / completions.FILE, spec.log_completions
    kept = ctx.patiently(lambda: Completions(path, every=every, step=step), ctx.run_dir)
    return closing(kept)


def _reward_log(
    spec: GrpoSpec, ctx: Context, checkpoint: Path | None
) -> AbstractContextManager[RewardLog | None]:
    if spec.reward_log is None or ctx.ranks.rank > 0:
        return nullcontext()
    step = 0 if checkpoint is None else step_of(checkpoint)
    return RewardLog(Path(spec.reward_log), ctx.job_id, step=step)


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
    from trl.trainer.grpo_config import GRPOConfig

    from ..training.arguments import UNPLANNED, common_arguments
    from ..training.lora import chosen_learning_rate

    if spec.rollout_dtype == "int8" and ctx.device != "cpu":
        raise JobFailed(f"rollout_dtype: must be float32 on a GPU ({ctx.device}), got int8")
    if warm.tokenizer.eos_token_id is None:
        raise JobFailed(f"model: the tokenizer of {spec.model} has no end-of-sequence token")
    batch_size, accumulation = spec.geometry
    max_completion_length = completion_room(
        prompts,
        limit=positions_in(warm.model.config),
        requested=spec.max_completion_length,
        default=warm.model.generation_config.max_new_tokens or COMPLETION_LENGTH,
    )
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
        reward_weights=[reward.weight for reward in spec.reward_specs],
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
    config: GRPOConfig,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    calls: RewardCalls | RewardProcess,
    functions: Mapping[str, rewards.Reward | KeywordReward],
    data: Mapping[str, str],
    sources: Sources,
) -> tuple[Reinforcement, Training]:
    from ..sequences.attention import can_pack
    from ..training.arguments import in_float32, scorer_of
    from ..training.loop import Training
    from ..training.lora import with_adapter
    from ..training.reference import weight_sharing_clone
    from .evaluation import HeldOut
    from .rollouts import GroupSampler, Judge
    from .sampler import Sampler
    from .step import Reinforcement

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
    )
    groups = GroupSampler(
        ctx=ctx,
        args=config,
        model=model,
        tokenizer=warm.tokenizer,
        sampler=Sampler(
            model,
            warm.tokenizer,
            config,
            rollout_dtype=rollout_dtype,
            keeps_logps=spec.replay > 0,
        ),
        judge=Judge(ctx, calls, len(functions)),
        prompts=prompts,
        resample=spec.resample,
        replay=spec.replay,
    )
    task = Reinforcement(
        ctx=ctx,
        args=config,
        model=model,
        reference=reference,
        groups=groups,
        scorer=scorer,
        rewards=list(functions),
        data=data,
    )
    measured = HeldOut(ctx=ctx, model=model, task=task, prompts=held_out)
    training = Training(
        ctx=ctx,
        spec=spec,
        args=config,
        model=model,
        tokenizer=warm.tokenizer,
        task=task,
        measured=measured if held_out else None,
        eval_every=spec.eval_every,
        on_step=task.trained,
        before_update=task.before_update,
        differences_since=task.differences_since,
        about=sources.about,
    )
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
    from ..compute.levels import levels, why_not

    if spec.rollout_dtype == "int8" and levels().int8 is None:
        ctx.emit("warning", message=f"rollout_dtype: {why_not('int8')}")
        return "float32"
    return spec.rollout_dtype
