"""No option of an inference is taken and does nothing: each changes the answers or scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
from sft_jobs import write

from warmd.jobs import run_function, spec_class
from warmd.jobs.errors import JobFailed, SpecError

TESTS = Path(__file__).parents[1]
CHAT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Options that are tried by tests of their own.
ELSEWHERE = {
    "infer": {
        **dict.fromkeys(("input", "output"), "infer/test_infer.py"),
        **dict.fromkeys(("image", "thumbnail", "max_pixels"), "engine/test_vision.py"),
        **dict.fromkeys(("actions", "screen"), "models/test_gui_actions.py"),
        "json_schema": "engine/test_json_schemas.py",
        "regex": "engine/test_regexes.py",
        **dict.fromkeys(
            ("tools", "chat_template_kwargs", "reasoning_effort"), "infer/test_chat_inputs.py"
        ),
        **dict.fromkeys(("reply", "tool_choice"), "infer/test_forced_calls.py"),
        "parallel_tool_calls": "gateway/test_chat_inputs.py",
        "template": "data/test_trained_prompts.py",
        "thinking_token_budget": "infer/test_thinking.py",
        **dict.fromkeys(
            ("add_special_tokens", "add_generation_prompt"), "infer/test_prompt_tokens.py"
        ),
        "precision": "engine/test_scheduler.py",
        "model": "infer/test_infer.py",
    },
    "eval": {
        **dict.fromkeys(("examples", "examples_dataset"), "eval/test_gsm8k.py"),
        **dict.fromkeys(
            ("concurrency", "max_turns", "timeout_reward", "environment_attempts"),
            "eval/test_environments.py",
        ),
        **dict.fromkeys(
            ("environment_timeout", "environment_reset_timeout", "environment_step_timeout"),
            "grpo/test_environments.py",
        ),
        "environment_memory": "grpo/test_environments.py",
        "agent": "environments/test_agents.py",
        "maj_k": "eval/test_eval.py",
        "task": "eval/test_gsm8k.py",
        "reward_timeout": "eval/test_eval.py",
        "against": "eval/test_eval.py",
        "precision": "engine/test_scheduler.py",
        "model": "eval/test_eval.py",
    },
    "encode": {
        **dict.fromkeys(spec_class("encode").options(), "encode/test_encode.py"),
        **dict.fromkeys(("query", "passage_length"), "encode/test_cross_encoder.py"),
    },
}
SAMPLED = {"temperature": 1.0}
PLAYED = {"environment": "demo:higher-lower", "dataset": None, "samples": 3}
CASES: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "infer": {
        "prompt": ("2+2=", {}),
        "messages": ('[{"role": "user", "content": "1"}]', {"prompt": None}),
        "prompts": ('["a", "b"]', {"prompt": None}),
        "echo": (True, {}),
        "chat_template": (True, {}),
        "system": ("brief", {"chat_template": True}),
        "max_tokens": (3, {}),
        "temperature": (1.5, {}),
        "n": (2, SAMPLED),
        "stop": (["1", "a", "e", "=", "?", "Q", "z"], SAMPLED),
        "seed": (5, SAMPLED),
        "logprobs": (2, {}),
        "frequency_penalty": (2.0, {}),
        "presence_penalty": (2.0, {}),
        "top_p": (0.1, SAMPLED),
        "top_k": (1, SAMPLED),
        "min_p": (1.0, SAMPLED),
        "logit_bias": ('{"7": 100}', {}),
        "token_ids": (True, {}),
    },
    "eval": {
        "dataset": ("other.jsonl", {}),
        "samples": (3, {}),
        "template": ("So: {question}", {"dataset": "questions.jsonl"}),
        "chat_template": (True, {}),
        "system": ("brief", {"chat_template": True}),
        "columns": (["prompt=other"], {}),
        "skip_bad_rows": (True, {"dataset": "bad.jsonl"}),
        "temperature": (1.5, {}),
        "max_tokens": (3, {}),
        "stop": (["1", "a", "e", "=", "?", "Q", "z"], SAMPLED),
        "repeats": (2, SAMPLED),
        "seed": (5, SAMPLED),
        "top_p": (0.1, SAMPLED),
        "top_k": (1, SAMPLED),
        "reward": (["reasoning"], {}),
        "grader": (
            '{"type": "string_check", "name": "a", "operation": "eq", "input": "1", '
            '"reference": "1"}',
            {"reward": ["grader"]},
        ),
        "custom_min_length": (50, {"reward": ["custom"], "custom_max_length": 100}),
        "custom_max_length": (1, {"reward": ["custom"]}),
        "custom_required_term": ([*"abcdefgh"], {"reward": ["custom"]}),
        "custom_forbidden_term": (["a"], {"reward": ["custom"]}),
        "custom_format_pattern": (".", {"reward": ["custom"]}),
        "custom_format_bonus": (3.0, {"reward": ["custom"], "custom_format_pattern": "."}),
        "pass_k": ([2], {**SAMPLED, "repeats": 2}),
        "environment": ("demo:higher-lower", {"dataset": None, "samples": 3}),
        "max_turn_length": (2, PLAYED),
    },
}
FILES: dict[str, list[Any]] = {
    "rows.jsonl": [{"prompt": f"{n}=", "other": f"{n}?", "answer": "1"} for n in range(6)],
    "other.jsonl": [{"prompt": f"so {n}=", "answer": "1"} for n in range(6)],
    "bad.jsonl": [{"prompt": "1", "answer": "1"}, {"prompt": 1}],
    "questions.jsonl": [{"question": f"{n}?", "answer": f"{n}"} for n in range(6)],
}
BASES: dict[str, dict[str, Any]] = {
    "infer": {"prompt": "1+1=", "max_tokens": 12, "temperature": 0, "seed": 1},
    "eval": {"dataset": "rows.jsonl", "max_tokens": 12},
}
TIMES = {"timings", "seconds", "eval_s", "ratings"}


@pytest.fixture(scope="module")
def model() -> Any:
    """One for all tests: an engine lives as long as its process."""
    return tiny.model(positions=512)


def left_by(kind: str, options: dict[str, Any], folder: Path, model: Any) -> Any:
    """Run a job and return all that it leaves, but for times; or the message of its refusal."""
    folder.mkdir(parents=True)
    for name, rows in FILES.items():
        write(folder / name, rows)
    job = tiny.surroundings(folder / "run", model)
    job.ctx.models.tokenizer.chat_template = CHAT  # type: ignore[attr-defined]
    given = {name: value for name, value in options.items() if value is not None}
    try:
        spec = spec_class(kind).parse(given).located(folder)
        result = run_function(kind)(spec, job.ctx)
    except (SpecError, JobFailed) as error:
        return str(error)
    answered = folder / "run" / "rows.jsonl"
    texts = answered.read_text() if answered.exists() else ""
    kept = {name: value for name, value in result.items() if name not in TIMES}
    text = orjson.dumps(kept, option=orjson.OPT_SORT_KEYS).decode()
    return text.replace(str(folder), ""), texts


def test_every_option_is_tried_or_has_its_own_test():
    for kind, elsewhere in ELSEWHERE.items():
        assert spec_class(kind).options().keys() == elsewhere.keys() | CASES.get(kind, {}).keys()
        for name, path in elsewhere.items():
            assert name in (TESTS / path).read_text(), (name, path)


QUICK = ("dataset", "samples", "repeats", "temperature", "reward", "pass_k")  # of an evaluation
WIDE = pytest.mark.nightly(
    part="oracles", catches="an option of an evaluation that is taken and does nothing"
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if kind == "infer" or name in QUICK else WIDE)
        for kind, cases in CASES.items()
        for name in cases
    ],
)
def test_an_option_changes_what_is_left_or_is_refused(tmp_path, model, kind, name):
    value, others = CASES[kind][name]
    base = {**BASES[kind], **others}
    without = left_by(kind, base, tmp_path / "without", model)
    changed = left_by(kind, {**base, name: value}, tmp_path / "with", model)
    assert changed != without
    assert isinstance(changed, tuple) or changed.startswith(f"{name}: "), changed


@pytest.mark.parametrize("kind", BASES)
def test_two_runs_with_equal_options_leave_the_same(tmp_path, model, kind):
    one, other = (left_by(kind, BASES[kind], tmp_path / name, model) for name in ("a", "b"))
    assert isinstance(one, tuple), one
    assert one == other
