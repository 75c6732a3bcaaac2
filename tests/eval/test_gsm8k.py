"""GSM8K like lm-evaluation-harness: recorded outputs, and the library where it is installed.

`WARMD_LM_EVAL_PYTHON` names the Python of an environment that has lm_eval 0.4.13.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest

from warmd.jobs.eval import gsm8k
from warmd.jobs.eval.options import EvalSpec

COMPLETIONS = [
    " 5 + 6 = 11.\n#### 11",
    "She has $1,234.50 left.\n#### 1,234.50.",
    "#### -7 and then #### 8",
    "The answer is 42.",
    "The answer is 1,000!",
    "the answer is 3.",
    "The answer is 3",
    "The answer is -5.5. Q:",
    "$18",
    "18.",
    "1.2.3,4",
    "no number at all",
    "",
    "....",
    "a - 3 b",
    "#### twelve",
    "####12",
    "#### 12 apples\n#### 13",
    "5 $ and -6",
    "x=7y=8",
    "3/4 of 100 is 75 %",
    "\uff11\uff12 and 9",
    "-$4.00 then $,",
]
ANSWERS = ["So 5+6=11\n#### 11", "#### 1,234.50", "#### 18", "text\n#### -7", "#### 42"]

QUESTIONS = [f"question {n}" for n in range(6)]
EXAMPLES = [(f"question {n}", f"solution {n}") for n in range(50)]

# Made by the program below, with lm_eval 0.4.13.
RECORDED = Path(__file__).with_name("lm_eval_0.4.13.json")

PROGRAM = r"""
import json, sys
from lm_eval.filters.extraction import RegexFilter
from lm_eval.api.metrics import exact_match_fn
from lm_eval.api.samplers import ContextSampler
import lm_eval, yaml
from pathlib import Path

requested = json.load(sys.stdin)
folder = Path(lm_eval.__file__).parent / "tasks" / "gsm8k"
found = {}
for name, file in (("gsm8k", "gsm8k.yaml"), ("gsm8k-cot", "gsm8k-cot.yaml")):
    task = yaml.safe_load((folder / file).read_text())
    (metric,) = task["metric_list"]
    keep = {k: metric[k] for k in ("regexes_to_ignore", "ignore_case", "ignore_punctuation")}
    for one in task["filter_list"]:
        settings = {k: v for k, v in one["filter"][0].items() if k != "function"}
        texts = RegexFilter(**settings).apply([[c] for c in requested["completions"]], [])
        extracted = [text for (text,) in texts]
        right = [
            [
                bool(exact_match_fn(predictions=[e], references=[
                    a.split("####")[-1].strip() if name == "gsm8k-cot" else a
                ], **keep)["exact_match"])
                for a in requested["answers"]
            ]
            for e in extracted
        ]
        found[f"{name} {one['name'].split('-')[0]}"] = {"extracted": extracted, "right": right}
sampler = ContextSampler(requested["examples"], rnd=1234)
found["shots"] = [
    [requested["examples"].index(d) for d in sampler.sample(5)] for _ in requested["questions"]
]
print(json.dumps(found))
"""


def lm_eval() -> dict[str, Any]:
    """What the harness computes, in its own environment."""
    python = os.environ.get("WARMD_LM_EVAL_PYTHON")
    if python is None:
        # Installing lm-eval takes a minute, and its version changes what it computes. Without it
        # everything is compared with what 0.4.13 computed.
        pytest.skip("WARMD_LM_EVAL_PYTHON is not set")
    requested = {
        "completions": COMPLETIONS,
        "answers": ANSWERS,
        "questions": QUESTIONS,
        "examples": EXAMPLES,
    }
    done = subprocess.run(
        [python, "-c", PROGRAM],
        input=json.dumps(requested),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    variants = {"gsm8k": gsm8k.DIRECT, "gsm8k-cot": gsm8k.CHAIN_OF_THOUGHT}
    for task, variant in variants.items():
        for name, one in variant.filters.items():
            extracted = [one.extract(text) for text in COMPLETIONS]
            wanted = found[f"{task} {name}"]
            assert extracted == wanted["extracted"], (task, name)
            right = [[gsm8k.is_correct(e, a) for a in ANSWERS] for e in extracted]
            assert right == wanted["right"], (task, name)


def check_shots(shots: list[list[int]]) -> None:
    prompts = list(gsm8k.prompts(gsm8k.DIRECT, QUESTIONS, EXAMPLES, 5))
    for prompt, places, question in zip(prompts, shots, QUESTIONS, strict=True):
        parts = [f"Question: {EXAMPLES[n][0]}\nAnswer: {EXAMPLES[n][1]}\n\n" for n in places]
        assert prompt == "".join(parts) + f"Question: {question}\nAnswer:"


def test_extraction_comparison_and_examples_equal_the_recorded_ones_of_the_harness():
    recorded = json.loads(RECORDED.read_text())
    check(recorded)
    check_shots(recorded["shots"])


@pytest.mark.slow
def test_the_installed_harness_computes_what_is_recorded():
    found = lm_eval()
    assert found == json.loads(RECORDED.read_text())
    check(found)
    check_shots(found["shots"])


def test_the_prompts_of_both_variants(tmp_path):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    for path, count in ((train, 12), (test, 3)):
        rows = [{"question": f"q{n}", "answer": f"a{n}\n#### {n}"} for n in range(count)]
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    values = {"task": "gsm8k", "dataset": str(test), "examples_dataset": str(train)}
    requested = [q.problem.prompt for q in EvalSpec.parse(values).questions()]
    assert [str(prompt).count("Question: ") for prompt in requested] == [6, 6, 6]
    assert str(requested[0]).endswith("\n\nQuestion: q0\nAnswer:")
    assert requested[0] != str(requested[1]).replace(
        "Question: q1", "Question: q0"
    )  # other examples
    none = EvalSpec.parse({**values, "examples": 0}).questions()
    assert none[1].problem.prompt == "Question: q1\nAnswer:"
    cot = EvalSpec.parse({"task": "gsm8k-cot", "dataset": str(test)}).questions()
    assert str(cot[0].problem.prompt).startswith("Q: There are 15 trees in the grove.")
    assert str(cot[0].problem.prompt).endswith("The answer is 8.\n\nQ: q0\nA:")
    assert [q.identity for q in cot] == [q.identity for q in none]
