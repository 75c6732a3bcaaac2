"""Trainings by GRPO on tiny models, TRL's and warmd's, and what they log."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from sft_jobs import with_adapter
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer import grpo_trainer, utils as trl_utils
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from warmd.jobs.compute.aten_overrides import fast_kernels
from warmd.jobs.grpo.batch import completion_order
from warmd.jobs.grpo.completion_source import CompletionSource
from warmd.jobs.grpo.judge import Judge
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.grpo.rollouts import GroupSampler
from warmd.jobs.grpo.sampler import Sampler
from warmd.jobs.grpo.step import Reinforcement
from warmd.jobs.keyed_numbers import uniform
from warmd.jobs.rewards.prompts import Prompt
from warmd.jobs.rewards.reward_calls import RewardCalls
from warmd.jobs.rewards.user_rewards import KeywordReward
from warmd.jobs.sequences.attention import can_pack
from warmd.jobs.sequences.scoring import Scorer
from warmd.jobs.training.arguments import KEPT_ACTIVATIONS, pad_id, router_coefficient
from warmd.jobs.training.loop import Training

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "AdamW": {"optim": "adamw_torch_fused", "learning_rate": 1e-3},
    "beta": {"beta": 0.1},
    "workload": {
        "loss_type": "bnpo",
        "beta": 0.1,
        "num_generations": 2,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "temperature": 0.7,
        "top_p": 0.9,
    },
    "two prompts a step": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "iterations": {"num_iterations": 2},
    "iterations with beta": {
        "num_iterations": 2,
        "beta": 0.1,
        "loss_type": "grpo",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    },
    "top-k": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "batch scale": {"scale_rewards": "batch", "per_device_train_batch_size": 8},
}
CASES |= {
    loss: {
        "loss_type": loss,
        "num_iterations": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    for loss in ("dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
}

SMALL = {
    "vocab_size": 80,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small(architecture: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SMALL | changes)
    return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


class SharedSampler:
    """torch, as transformers.generate sees it, but with tokens drawn as warmd draws them."""

    numbers: Any = None  # (B, T) of the current step
    position = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @classmethod
    def begin(cls, rows: list[int], step: int, seed: int, size: int, length: int) -> None:
        """Begin the completions of a step: `size` for each prompt."""
        found = [
            uniform(length, use="completion", seed=seed, step=step, row=row, sample=sample)
            for row in rows[::size]
            for sample in range(size)
        ]
        cls.numbers, cls.position = torch.tensor(np.stack(found)), 0

    @classmethod
    def multinomial(cls, probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        cumulated = probabilities.cumsum(-1, dtype=torch.float64)
        drawn = cls.numbers[:, cls.position, None]
        cls.position += 1
        return torch.searchsorted(cumulated, drawn * cumulated[:, -1:], right=True)


class Stock(GRPOTrainer):
    """TRL's trainer, which draws tokens and the order within a step as warmd does."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        texts = [prompt["prompt"] for prompt in self.train_dataset]  # type: ignore[union-attr]
        tokenizer: Any = self.processing_class
        known = [tokenizer(text)["input_ids"] for text in texts]
        config: Any = self.args
        SharedSampler.begin(
            [known.index(ids) for ids in prompt_ids],
            self.state.global_step,
            config.seed,
            config.num_generations,
            config.max_completion_length,
        )
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        def shuffled(batch: dict[str, Any]) -> dict[str, Any]:
            count = len(batch["prompt_ids"])
            step = self.state.global_step
            order = completion_order(count, seed=self.args.seed, step=step)
            return {
                name: value[order] if value.ndim else value
                for name, value in batch.items()
                if value is not None
            }

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpo_trainer, "shuffle_sequence_dict", shuffled)
            return super()._prepare_inputs(generation_batch)


def digits(completions: list[str], **_: Any) -> list[float]:
    return tiny.digit_share([], completions, [])


def trainer(side: str, folder: Any, model: Any, **options: Any) -> Any:
    """A training of 5 steps on a copy of `model`, which is the reference where there is a beta.

    `side`: TRL's trainer ("trl"), or warmd's own loop. `lora`: the config of an adapter to train,
    which TRL makes from its seed. `most_tokens`: of a pack. `rollout_dtype`: of warmd's sampler.
    """
    beta, syncs = options.pop("beta", 0.0), options.pop("sync_ref_model", False)
    lora = options.pop("lora", None)
    reward = options.pop("reward", digits)
    rewards = reward if isinstance(reward, list) else [reward]
    own = {name: options.pop(name) for name in ("most_tokens", "rollout_dtype") if name in options}
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        # Plain descent: AdamW divides by the gradient's size, and so makes of a weight that
        # learns nothing but rounding one that moves like the others.
        "optim": "sgd",
        "learning_rate": 0.1,
        "reward_weights": [1.0] * len(rewards),
    }
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=5,
        bf16=False,
        **KEPT_ACTIVATIONS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=3,
        use_cpu=True,
        **usual | options,
    )
    prompts = [f"{number}+{number * 7}=" for number in range(12)]
    policy = copy.deepcopy(model).requires_grad_(True)
    if lora is not None:
        policy = with_adapter(policy, lora, config.seed)
    reference = copy.deepcopy(model) if beta and lora is None else None
    if side == "warmd":
        config.beta, config.sync_ref_model = beta, syncs
        return _training(folder, policy, reference, config, prompts, rewards, **own)
    made: Any = Stock(
        model=policy,
        args=config,
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        reward_funcs=rewards,
    )
    # TRL loads the reference from disk, so it is given one after it is made.
    config.beta, config.sync_ref_model = beta, syncs
    made.beta = beta
    if reference is not None:
        if hasattr(trl_utils, "add_fused_lm_head"):  # from TRL 1.15 on
            trl_utils.add_fused_lm_head(reference, temperature=made.temperature)
        made.ref_model = reference
        if syncs:
            made.add_callback(SyncRefModelCallback(reference, made.accelerator))
    return made


def _training(
    folder: Any,
    model: Any,
    reference: Any,
    config: Any,
    texts: list[str],
    rewards: list[Any],
    *,
    most_tokens: int = 4096,
    rollout_dtype: str = "float32",
) -> Training:
    ctx = tiny.surroundings(folder / "run", model).ctx
    tokenizer = tiny.tokenizer()
    prompts = [
        Prompt(text, tokenizer(text)["input_ids"], None, number, False, {}, None)
        for number, text in enumerate(texts)
    ]
    functions = {one.__name__: KeywordReward(one.__name__, one) for one in rewards}
    packs = can_pack(model)
    scorer = Scorer(
        most_tokens=most_tokens if packs else None,
        pad_id=pad_id(model, tokenizer),
        rows=config.per_device_train_batch_size,
        temperature=config.temperature,
        router_coefficient=router_coefficient(model, config),
    )
    source = CompletionSource(
        args=config,
        model=model,
        tokenizer=tokenizer,
        sampler=Sampler(model, tokenizer, config, rollout_dtype=rollout_dtype),
        judge=Judge(ctx, RewardCalls(functions, prompts), len(functions)),
        prompts=prompts,
    )
    task = Task(
        ctx=ctx,
        args=config,
        model=model,
        reference=reference,
        groups=GroupSampler(source, config, ranks=ctx.ranks),
        scorer=scorer,
        rewards=list(functions),
        data={"data": "", "columns": ""},
    )
    return Training(
        ctx=ctx,
        spec=GrpoSpec(save_every="1000"),
        args=config,
        model=model,
        tokenizer=tokenizer,
        task=task,
        on_step=task.trained,
        before_update=task.before_update,
    )


class Task(Reinforcement):
    """Keeps the metrics of each step, by TRL's names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: list[dict[str, float]] = []

    def fields(self, batch: Any, sums: Mapping[str, float]) -> dict[str, Any]:
        self.kept.append(dict(sums))
        return super().fields(batch, sums)


def train(made: Any) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Train and return what was logged at each step, and the weights."""
    logged: list[dict[str, Any]] = []
    if isinstance(made, Training):
        made.run(None)
        emitted = made.ctx.emit.__self__.events  # type: ignore[attr-defined]
        names = ("loss", "grad_norm", "learning_rate")
        of_steps = [event for event in emitted if event["type"] == "step"]
        kept: Any = made.task
        for step, sums in zip(of_steps, kept.kept, strict=True):
            logged.append({**sums, **{name: step[name] for name in names}})
    else:
        log = made.log

        def keep(logs: dict[str, Any], *rest: Any) -> None:
            log(logs, *rest)
            named = {k: v for k, v in logs.items() if k not in ("step_time", "epoch")}
            # TRL logs None for a mean of nothing.
            logged.append({k: v for k, v in named.items() if v is not None})

        made.log = keep
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
            made.train()
        del logged[-1]  # the summary
    trained = (weight for weight in made.model.parameters() if weight.requires_grad)
    return logged, [weight.detach() for weight in trained]


def assert_same(folder: Any, model: Any, **options: Any) -> Training:
    """Train with TRL and in warmd's loop; compare all that is logged, and the weights."""
    theirs, their_weights = train(trainer("trl", folder, model, **options))
    made: Training = trainer("warmd", folder, model, **options)
    starts = [w.detach().clone() for w in made.model.parameters() if w.requires_grad]
    with fast_kernels():  # as in a job
        ours, our_weights = train(made)
    assert len(ours) == len(theirs) == 5
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=2e-5, abs=2e-6, nan_ok=True)
    moved = max(
        float((weight - start).abs().max())
        for weight, start in zip(their_weights, starts, strict=True)
    )
    assert moved > 0
    for our_weight, their_weight in zip(our_weights, their_weights, strict=True):
        torch.testing.assert_close(our_weight, their_weight, rtol=0, atol=2e-4 * moved)
    return made
