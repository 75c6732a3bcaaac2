"""No option of a training is taken and does nothing: each changes what a job computes or writes.

A job of a few steps is run with and without the option, and everything that it leaves is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlm_jobs
import orjson
import pytest
import sft_jobs
import tiny
from breadth import mostly_slow
from sft_jobs import message, write
from transformers import AutoModelForMaskedLM, AutoTokenizer

from warmd.jobs import run_function, spec_class
from warmd.jobs.errors import SpecError
from warmd.jobs.training.compare import is_timing

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

CUSTOM = {"reward": ["custom"], "custom_min_length": 1, "max_completion_length": 24, "samples": 4}
TESTS = Path(__file__).parents[1]

# Options that a job of a second on one processor does not show, by the tests that do.
ELSEWHERE = {
    "time_limit": "training/test_time_limit.py",
    "deterministic": "training/test_gpu_training.py",  # no effect on a CPU, as its help says
    "processes": "training/test_processes.py",
    "nodes": "system/test_gang_kinds.py",
    "keep": "runs/test_checkpoints.py",
    "keep_best": "training/test_keep_best.py",
    "on_save_error": "runs/test_saving_under_fire.py",
    "on_stall": "work/test_stalls.py",
    "on_divergence": "training/test_trainer.py",
    "report_to": "training/test_trackers.py",
    "reward_timeout": "grpo/test_reward_process.py",
    # Shows only where the entropy crosses its target and back.
    "entropy_coef_min": "grpo/test_options.py",
    "model": "training/test_branching.py",
    "objective": "mlm/test_options.py",
    "tokenizer": "mlm/test_corpus.py",
    "mnm_rate": "mlm/test_masking.py",
    "mnm_weight": "mlm/test_loss.py",
    "mnm_ramp_steps": "support/mlm_jobs.py",  # of all code-graph jobs of mlm/test_loss.py
    "constraint_weight": "mlm/test_loss.py",
    **dict.fromkeys(
        (
            *("environment", "concurrency", "max_turns", "max_turn_length", "stop"),
            *("timeout_reward", "environment_attempts", "environment_step_timeout"),
            *("environment_timeout", "environment_reset_timeout", "environment_memory"),
        ),
        "grpo/test_environments.py",
    ),
    "agent": "environments/test_agents.py",
}

LORA = {"lora": 2, "learning_rate": 1e-3}
# The value of each option that is tried, and the options that it goes with.
Cases = Mapping[str, tuple[Any, dict[str, Any]]]
SHARED: Cases = {
    "learning_rate": (2e-3, {}),
    "steps": (3, {}),
    "batch_size": (4, {}),
    "gradient_accumulation": (2, {}),
    "lr_scheduler": ("constant", {"steps": 3}),
    "warmup_steps": (2, {"steps": 3}),
    "weight_decay": (0.5, {}),
    "max_grad_norm": (1e-3, {}),
    "seed": (7, {}),
    "lora": (2, {}),
    "lora_alpha": (8, LORA),
    "lora_targets": (["q_proj"], LORA),
    "lora_dropout": (0.5, LORA),
    "base_precision": ("int8", LORA),
    "save_every": ("1", {}),
}
ROWS: Cases = {
    "samples": (4, {}),
    "max_length": (8, {}),
    "chat_template": (True, {}),
    "system": ("brief", {"chat_template": True}),
    "columns": (["prompt=other"], {}),
    "skip_bad_rows": (True, {"dataset": "bad.jsonl"}),
    "epochs": (2, {"samples": 4}),
    "eval_samples": (2, {"samples": 6}),
    "eval_dataset": ("other.jsonl", {}),
    "eval_every": (1, {"eval_samples": 2, "samples": 6}),
    "dataset": ("other.jsonl", {}),
}
KINDS: dict[str, Cases] = {
    "sft": {
        **SHARED,
        **ROWS,
        "completion_only_loss": (False, {}),
        "assistant_only_loss": (True, {"dataset": "messages.jsonl"}),
        "template": ("So: {question}", {"dataset": "questions.jsonl"}),
    },
    "dpo": {
        **SHARED,
        **ROWS,
        "loss_type": ("hinge", {}),
        "beta": (1.0, {}),
        "label_smoothing": (0.2, {"loss_type": "robust"}),
    },
    "grpo": {
        **SHARED,
        "batch_size": (2, {}),
        "gradient_accumulation": (4, {}),
        "samples": (3, {}),
        "dataset": ("questions.jsonl", {}),
        "columns": (["prompt=other"], {"dataset": "grpo.jsonl"}),
        "skip_bad_rows": (True, {"dataset": "bad.jsonl", "samples": "all"}),
        "chat_template": (True, {}),
        "system": ("brief", {"chat_template": True}),
        "template": ("So: {question}", {"dataset": "questions.jsonl"}),
        "max_prompt_length": (2, {}),
        "num_generations": (2, {}),
        "max_completion_length": (2, {}),
        "temperature": (0.5, {}),
        "top_k": (5, {}),
        "top_p": (0.5, {}),
        "min_p": (0.5, {}),
        "rollout_dtype": ("int8", {}),
        "resample": (1, {"reward": ["tiny:begins_with_digit"], "num_generations": 2}),
        "replay": (2, {"reward": ["tiny:begins_with_digit"], "epochs": 4, "samples": 2}),
        "reward": (["reasoning"], {}),
        "grader": (
            [
                '{"type": "string_check", "name": "a", "operation": "eq", "input": "1", '
                '"reference": "1"}'
            ],
            {"reward": ["tiny:digit_share"]},
        ),
        "custom_min_length": (50, {"reward": ["custom"], "custom_max_length": 100}),
        # Long enough that some completions have the letter, or two words, and others do not.
        "custom_max_length": (1, CUSTOM),
        "custom_required_term": (["a"], CUSTOM),
        "custom_forbidden_term": (["a"], CUSTOM),
        "custom_format_pattern": ("a", CUSTOM),
        "custom_format_bonus": (3.0, {**CUSTOM, "custom_format_pattern": "a"}),
        "scale_rewards": ("none", {}),
        "multi_objective_aggregation": (
            "normalize_then_sum",
            {"reward": ["tiny:digit_share", "tiny:begins_with_digit=0.5"]},
        ),
        "epochs": (2, {"samples": 2}),
        "prompts_per_step": (2, {}),
        "num_iterations": (2, {"samples": 2}),
        "loss_type": ("grpo", {}),
        "beta": (0.1, {}),
        "epsilon": (0.001, {"num_iterations": 2, "samples": 2}),
        "epsilon_high": (0.001, {"num_iterations": 2, "samples": 2}),
        "delta": (1.002, {"num_iterations": 2, "samples": 2}),
        "importance_sampling_level": ("sequence", {"num_iterations": 2, "samples": 2}),
        "mask_truncated_completions": (True, {"max_completion_length": 20}),
        "top_entropy_quantile": (0.3, {}),
        "off_policy_mask_threshold": (1e-6, {"num_iterations": 2, "samples": 2}),
        "entropy_coef": (0.5, {}),
        "entropy_target": (9.0, {"entropy_coef": 0.1}),
        "entropy_coef_delta": (0.2, {"entropy_target": 9.0, "entropy_coef": 0.1}),
        "entropy_coef_max": (0.1, {"entropy_target": 9.0, "entropy_coef": 0.5}),
        "ref_model_sync_steps": (1, {"beta": 0.5}),
        "ref_model_mixup_alpha": (0.1, {"beta": 0.5, "ref_model_sync_steps": 1}),
        "use_bias_correction_kl": (False, {"beta": 0.5, "num_iterations": 2, "samples": 2}),
        "sapo_temperature_pos": (3.0, {"loss_type": "sapo", "num_iterations": 2, "samples": 2}),
        "sapo_temperature_neg": (3.0, {"loss_type": "sapo", "num_iterations": 2, "samples": 2}),
        "vespo_k_pos": (0.5, {"loss_type": "vespo", "num_iterations": 2, "samples": 2}),
        "vespo_lambda_pos": (0.5, {"loss_type": "vespo", "num_iterations": 2, "samples": 2}),
        "vespo_k_neg": (0.5, {"loss_type": "vespo", "num_iterations": 2, "samples": 2}),
        "vespo_lambda_neg": (0.5, {"loss_type": "vespo", "num_iterations": 2, "samples": 2}),
        "eval_samples": (2, {}),
        "eval_dataset": ("questions.jsonl", {}),
        "eval_every": (1, {"eval_samples": 2}),
        "log_completions": (4, {}),
    },
    "mlm": {
        **SHARED,
        "batch_size": (3, {}),
        "gradient_accumulation": (1, {}),
        "steps": (2, {}),
        "warmup_steps": (2, {}),
        "lora": (2, {"model": "demo"}),
        "lora_alpha": (8, {**LORA, "model": "demo"}),
        "lora_targets": (["query"], {**LORA, "model": "demo"}),
        "lora_dropout": (0.5, {**LORA, "model": "demo"}),
        "base_precision": ("int8", {**LORA, "model": "demo"}),
        "data": ("other.jsonl", {}),
        "vocab_size": (280, {}),
        "seq_len": (16, {}),
        "validation": (0.4, {}),
        "mlm_rate": (0.4, {}),
        "masks": ("static", {"data": "few.jsonl", "steps": 8}),
        "mask_80_10_10": (True, {}),
        "columns": (["text=other"], {}),
        "skip_bad_rows": (True, {"data": "bad.jsonl"}),
        "architecture": ("roberta", {}),
        "layers": (1, {}),
        "hidden_size": (8, {}),
        "heads": (1, {}),
        "ffn_size": (8, {}),
        "dropout": (0.3, {}),
        "mlm_weight": (0.5, {}),
        "eval_dataset": ("other.jsonl", {"validation": 0.0}),
        "eval_every": (1, {}),
        "validation_examples": (3, {"eval_every": 1}),
        "eval_first": (True, {"eval_every": 1}),
    },
}


def test_every_option_is_tried_or_has_its_own_test():
    for kind, cases in KINDS.items():
        known = {name for name, info in spec_class(kind).options().items() if info.former is None}
        assert known - set(cases) <= set(ELSEWHERE), kind
    for name, path in ELSEWHERE.items():
        assert name in (TESTS / path).read_text(), path


PAIRS = [
    {"prompt": f"{n}+{n}=", "completion": str(n), "chosen": f"{n} yes", "rejected": "no" * n}
    for n in range(1, 9)
]
CHATS = [[message("user", f"{n}"), message("assistant", "a")] for n in range(8)]
FILES: dict[str, list[Any]] = {
    "rows.jsonl": [{**row, "other": f"{n}?"} for n, row in enumerate(PAIRS)],
    "grpo.jsonl": [{"prompt": f"{n}", "other": f"{n}?", "answer": "1"} for n in range(8)],
    "other.jsonl": [{**row, "prompt": "so " + row["prompt"], "text": "b c"} for row in PAIRS],
    "bad.jsonl": [*PAIRS, {"prompt": 1}],
    "messages.jsonl": [{"messages": chat} for chat in CHATS],
    "questions.jsonl": [{"question": f"{n}?", "answer": f"{n}"} for n in range(8)],
    "few.jsonl": [{"text": f"number {n}, then {n + 1}"} for n in range(8)],
}
BASES: dict[str, dict[str, Any]] = {
    "sft": {"dataset": "rows.jsonl", "batch_size": 2, "learning_rate": 1e-2},
    "dpo": {"dataset": "rows.jsonl", "batch_size": 2, "learning_rate": 1e-2},
    "grpo": {
        "samples": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "reward": ["tiny:digit_share"],
        "learning_rate": 1e-2,
    },
    "mlm": {
        "objective": "mlm",
        "architecture": "bert",
        "data": "texts.jsonl",
        "vocab_size": 300,
        "seq_len": 32,
        "learning_rate": 3e-3,
        "batch_size": 2,
        "gradient_accumulation": 2,
        "steps": 3,
        "validation": 0.2,
        "eval_every": 2,
    },
}


@cache
def _warm_encoder() -> tuple[Any, Any]:
    """A BERT with its tokenizer, as a job of mlm has made it."""
    folder = _run("mlm", BASES["mlm"])[0] / "model"
    return AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def _run(kind: str, options: dict[str, Any]) -> tuple[Path, list[dict[str, Any]]]:
    """Run a job in a folder of its own; return the folder of its run and its events."""
    home = Path(mkdtemp())
    for name, rows in FILES.items():
        write(home / name, rows)
    folder = home / "runs" / "run"
    if kind == "mlm":
        mlm_jobs.make_home(home)
    folder.mkdir(parents=True)
    warm = sft_jobs.small("llama")
    job = tiny.surroundings(folder, warm)
    job.ctx.models.tokenizer.chat_template = sft_jobs.TEMPLATE  # type: ignore[attr-defined]
    if kind == "mlm" and "model" in options:
        model, tokenizer = _warm_encoder()
        job.ctx.models.warm = deepcopy(model)  # type: ignore[attr-defined]
        job.ctx.models.tokenizer = tokenizer  # type: ignore[attr-defined]
        options = {**options, "tokenizer": "own"}
        options.pop("architecture"), options.pop("vocab_size")
    spec = spec_class(kind).parse(options).located(home)
    spec.check_inputs(None)
    run_function(kind)(spec, job.ctx)
    return folder, job.events


@cache
def left_by(kind: str, options: str) -> str:
    """Return a hash of all that a job leaves, but for times and paths; or why it is refused."""
    try:
        folder, events = _run(kind, orjson.loads(options))
    except SpecError as error:
        return f"refused: {error}"
    found = hashlib.sha256()
    for event in events:
        plain = {k: v for k, v in event.items() if not is_timing(k) and k != "bytes"}
        text = orjson.dumps(plain, default=str, option=orjson.OPT_SORT_KEYS).decode()
        found.update(text.replace(str(folder.parents[1]), "").encode())
    for path in sorted([*folder.glob("model/*"), *folder.glob("completions.jsonl")]):
        if path.is_file() and path.suffix in (".safetensors", ".jsonl"):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


# The others are like these, and take minutes.
QUICK = {
    ("sft", "lora_dropout"),
    ("dpo", "lora_dropout"),
    ("dpo", "label_smoothing"),
    ("grpo", "lora_dropout"),
    ("grpo", "ref_model_mixup_alpha"),
    ("mlm", "lora_dropout"),
}


WIDE = pytest.mark.nightly(
    part="oracles", catches="an option of any kind that is taken and does nothing"
)


@pytest.mark.parametrize(
    ("kind", "name"),
    mostly_slow(
        [
            pytest.param(kind, name, marks=() if (kind, name) in QUICK else WIDE)
            for kind, cases in KINDS.items()
            for name in cases
        ],
        but=[("dpo", "label_smoothing"), ("grpo", "lora_dropout")],
    ),
)
def test_an_option_changes_what_a_job_leaves_or_is_refused(kind, name):
    value, others = KINDS[kind][name]
    base = {**BASES[kind], **others}
    without = left_by(kind, orjson.dumps(base).decode())
    assert not without.startswith("refused") or name == "skip_bad_rows", without
    assert left_by(kind, orjson.dumps({**base, name: value}).decode()) != without


@pytest.mark.parametrize("kind", mostly_slow(KINDS, but=("grpo",)))
def test_two_runs_with_equal_options_leave_the_same(kind):
    base = orjson.dumps(BASES[kind]).decode()
    assert left_by(kind, base) == left_by.__wrapped__(kind, base)
