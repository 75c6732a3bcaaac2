"""GRPO trainers on tiny models, TRL's and warmd's, and what they log."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import tiny
import torch
from datasets import Dataset
from sft_jobs import with_adapter
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from warmd.jobs.grpo.packed_trainer import PackedTrainer

CLOCK = ("step_time", "runtime", "per_second")


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

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        cumulated = probabilities.cumsum(-1, dtype=torch.float64)
        uniform = torch.rand(len(probabilities), dtype=torch.float64)[:, None]
        return torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)


def digits(completions: list[str], **_: Any) -> list[float]:
    return tiny.digit_share([], completions, [])


def trainer(kind: type[GRPOTrainer], folder: Any, model: Any, **options: Any) -> Any:
    """A trainer of 5 steps on a copy of `model`, which is the reference where there is a beta.

    `lora`: the config of an adapter to train, which TRL makes from its seed.
    """
    # TRL loads the reference from disk, so both are given one after they are made.
    beta, syncs = options.pop("beta", 0.0), options.pop("sync_ref_model", False)
    lora = options.pop("lora", None)
    reward = options.pop("reward", digits)
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        # Plain descent: AdamW divides by the gradient's size, and so makes of a weight that
        # learns nothing but rounding one that moves like the others.
        "optim": "sgd",
        "learning_rate": 0.1,
        "use_cpu": True,
    }
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=5,
        bf16=False,
        activation_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=3,
        **usual | options,
    )
    prompts = [{"prompt": f"{number}+{number * 7}="} for number in range(12)]
    policy = copy.deepcopy(model).requires_grad_(True)
    if lora is not None:
        policy = with_adapter(policy, lora, config.seed)
    made = kind(
        model=policy,
        args=config,
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_list(prompts),
        reward_funcs=reward,
    )
    reference = copy.deepcopy(model)
    config.sync_ref_model = syncs
    if beta and lora is not None:
        config.beta = made.beta = beta
    elif beta and isinstance(made, PackedTrainer):
        made.set_reference(reference, beta)
    elif beta:
        config.beta = made.beta = beta
        add_fused_lm_head(reference, temperature=made.temperature)
        made.ref_model = reference
        if syncs:
            made.add_callback(SyncRefModelCallback(reference, made.accelerator))
    return made


def train(made: Any) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Train and return what was logged at each step, and the weights."""
    logged: list[dict[str, Any]] = []
    log = made.log

    def keep(logs: dict[str, Any], *rest: Any) -> None:
        log(logs, *rest)
        kept = {k: v for k, v in logs.items() if not any(word in k for word in CLOCK)}
        # TRL logs None for a mean of nothing.
        logged.append({k: math.nan if v is None else v for k, v in kept.items()})

    made.log = keep
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        made.train()
    trained = (weight for weight in made.model.parameters() if weight.requires_grad)
    return logged, [weight.detach() for weight in trained]
