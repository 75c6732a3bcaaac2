#!/usr/bin/env python3
"""A GRPO job as a stand-alone TRL script, for `cold_and_warm.py`.

    python tests/benchmarks/cold_grpo.py MODEL DATASET OUTPUT --steps N --threads N

Fair settings: float32 and no recomputation; TRL's defaults, bf16 and recomputation, are three times
slower on a CPU. Prints the seconds that each part took as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

begun = time.perf_counter()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl.trainer.grpo_config import GRPOConfig  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

from warmd.jobs.data.templates import MATH  # noqa: E402
from warmd.jobs.rewards import problems, rewards  # noqa: E402

seconds = {"imports": time.perf_counter() - begun}


class FirstStep(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Notes when the first step is done."""

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        seconds.setdefault("first_step", time.perf_counter() - mark)


def math_reward(completions: list[str], **_: object) -> list[float | None]:
    """The reward that warmd calls math."""
    return [rewards.score_math(text) for text in completions]


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model")
parser.add_argument("dataset")
parser.add_argument("output")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--threads", type=int, required=True)
args = parser.parse_args()
torch.set_num_threads(args.threads)

mark = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(args.model)
seconds["model"] = time.perf_counter() - mark

mark = time.perf_counter()
rows = problems.load(args.dataset, template=MATH, samples=args.steps)
dataset = Dataset.from_list([{"prompt": row.prompt} for row in rows])
seconds["data"] = time.perf_counter() - mark

mark = time.perf_counter()
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=dataset,
    reward_funcs=math_reward,
    args=GRPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=24,
        learning_rate=1e-4,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_steps=args.steps,
        disable_tqdm=True,
        seed=7,
    ),
    callbacks=[FirstStep()],
)
seconds["trainer"] = time.perf_counter() - mark

mark = time.perf_counter()
trainer.train()
trainer.save_model(args.output)
seconds["steps_after_first"] = time.perf_counter() - mark - seconds["first_step"]
sys.stderr.write(json.dumps(seconds) + "\n")
