"""One side of the GRPO benchmark: times some steps of TRL's or warmd's trainer.

    python -m warmd.jobs.bench.grpo trl|warmd WORK FOLDER STEPS

FOLDER holds the model (`model.py`); prompts are random words. Each side has its own process, so
that its memory can be measured. Prints one JSON object. Imports torch and trl.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl.trainer import utils as trl_utils
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from ..compute.frozen_int8 import quantize_linears
from ..grpo.completion_source import CompletionSource
from ..grpo.judge import Judge
from ..grpo.options import GrpoSpec
from ..grpo.rollouts import GroupSampler
from ..grpo.sampler import Sampler
from ..grpo.step import Reinforcement
from ..rewards.prompts import Prompt
from ..rewards.reward_calls import RewardCalls
from ..rewards.user_rewards import KeywordReward
from ..training.arguments import scorer_of
from ..training.loop import Training
from ..training.reference import weight_sharing_clone
from . import machine, model
from .training import Clock, context, main, own_loop, settings
from .works import GRPO, GrpoWork


def _trainer(side: str, work: GrpoWork, folder: Path, steps: int, output: str, clock: Clock) -> Any:
    config = GRPOConfig(
        **settings(output, steps),
        per_device_train_batch_size=work.generations // work.accumulation,
        gradient_accumulation_steps=work.accumulation,
        num_generations=work.generations,
        max_completion_length=work.completion,
        temperature=0.7,
        top_p=0.9,
        loss_type="bnpo",
        reward_weights=[1.0],
        learning_rate=2e-6,
    )
    prompts = model.prompts(work.shape, work.prompt, steps)
    tokenizer, adapter = model.tokenizer(work.shape), _adapter(work)
    reference = model.read(folder) if work.beta and adapter is None else None
    if side == "warmd":
        # As in a GRPO job: the reference model has the warm weights, the policy shares them.
        policy = model.read(folder) if reference is None else weight_sharing_clone(reference)
        if work.base_precision == "int8":
            quantize_linears(policy, kept=policy.get_output_embeddings())
        if adapter is None:
            policy.requires_grad_(True)
        else:
            policy = get_peft_model(policy, adapter)
        config.beta = work.beta
        return _training(work, output, config, policy, reference, tokenizer, prompts, clock)
    policy = model.read(folder)
    if adapter is None:
        policy.requires_grad_(True)
    else:  # TRL wraps it: a model with an adapter would get a second one as its reference
        config.beta = work.beta
    trainer: Any = GRPOTrainer(
        model=policy,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        reward_funcs=_rewards,
        peft_config=adapter,
    )
    if reference is not None:
        config.beta = trainer.beta = work.beta
        if hasattr(trl_utils, "add_fused_lm_head"):  # from TRL 1.15 on
            trl_utils.add_fused_lm_head(reference, temperature=trainer.temperature)
        trainer.ref_model = reference
    return trainer


def _training(
    work: GrpoWork,
    output: str,
    config: GRPOConfig,
    policy: Any,
    reference: Any,
    tokenizer: Any,
    texts: Sequence[str],
    clock: Clock,
) -> Training:
    ctx = context(output, machine.device())
    prompts = [
        Prompt(text, tokenizer(text)["input_ids"], None, number, False, {}, None)
        for number, text in enumerate(texts)
    ]
    rewards = {"order": KeywordReward("order", _rewards)}
    source = CompletionSource(
        args=config,
        model=policy,
        tokenizer=tokenizer,
        sampler=Sampler(policy, tokenizer, config, rollout_dtype=work.rollout_dtype),
        judge=Judge(ctx, RewardCalls(rewards, prompts), len(rewards)),
        prompts=prompts,
    )
    task = Reinforcement(
        ctx=ctx,
        args=config,
        model=policy,
        reference=reference,
        groups=GroupSampler(source, config),
        scorer=scorer_of(policy, ctx, tokenizer, config, temperature=config.temperature),
        rewards=list(rewards),
        data={},
    )
    spec = GrpoSpec(save_every="1000000")
    return own_loop(
        *(ctx, spec, config, policy, tokenizer, task, clock), before_update=task.before_update
    )


def _adapter(work: GrpoWork) -> LoraConfig | None:
    if work.lora is None:
        return None
    return LoraConfig(
        r=work.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _rewards(completions: Sequence[str], **_: Any) -> list[float | None]:
    """Return a different reward for every completion, so that every one has an advantage."""
    return [float(index) for index, _ in enumerate(completions)]


if __name__ == "__main__":
    main(GRPO, _trainer)
