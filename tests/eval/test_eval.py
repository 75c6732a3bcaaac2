"""The eval kind: a tiny model measured on data sets made in the test."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from waiting import wait_until

from warmd.cli.view.describe import describe
from warmd.jobs import spec_class
from warmd.jobs.context import RULES
from warmd.jobs.engine import engines
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.eval.journal import Journal
from warmd.jobs.eval.kind import run
from warmd.jobs.eval.likelihood import split, windows
from warmd.jobs.eval.options import EvalSpec
from warmd.jobs.eval.questions import digest
from warmd.jobs.eval.summary import metrics_of, pair
from warmd.jobs.intervals import wilson


@pytest.fixture(scope="module")
def model() -> Any:
    """One for all tests: an engine lives as long as its process."""
    return tiny.model(positions=512)


@pytest.fixture
def job(tmp_path: Path, model: Any) -> tiny.Surroundings:
    return tiny.surroundings(tmp_path / "eval-20261121-184200-x7f2", model)


def evaluate(job: tiny.Surroundings, **options: Any) -> dict[str, Any]:
    spec = EvalSpec.parse(options).located(Path.cwd())
    spec = EvalSpec.parse(orjson.loads(orjson.dumps(spec.to_json())))  # as the horse reads it
    return run(spec, job.ctx)


def rows_of(job: tiny.Surroundings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.ctx.run_dir / "rows.jsonl").read_bytes().splitlines()]


def write(path: Path, *records: Any) -> str:
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return str(path)


def test_the_kind_is_known():
    assert spec_class("eval") is EvalSpec
    assert EvalSpec.queue == "infer"
    assert EvalSpec.is_kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "choice"}, "task: must go with dataset, got choice with dataset none"),
        ({"examples": 3}, "examples: must go with task gsm8k or gsm8k-cot, got 3"),
        ({"task": "gsm8k", "template": "{question}="}, "template: must go with task reward or"),
        ({"template": "?"}, "template: must be as-is, math, qa, or contain {question}, got '?'"),
        ({"repeats": 4}, "repeats: must go with temperature above 0, got 4"),
        ({"repeats": 4, "temperature": 1, "pass_k": [8]}, "pass_k: must be at most 4 (repeats)"),
        ({"maj_k": [1]}, "maj_k: must go with task gsm8k or gsm8k-cot, got 1"),
        ({"system": "s"}, "system: must go with chat_template, got s"),
        ({"reward": ["speed"]}, "reward: must be one of"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, message):
    with pytest.raises(SpecError) as refused:
        EvalSpec.parse(options)
    assert str(refused.value).startswith(message)


def test_completions_are_scored_by_rewards_with_an_interval(job):
    result = evaluate(job, samples=20, max_tokens=4)
    rows = rows_of(job)
    assert [row["row"] for row in rows] == list(range(1, 21))
    assert rows[0].keys() >= {"question", "weights", "prompt", "answer", "completions", "metrics"}
    share = sum(row["metrics"]["reward"] for row in rows) / 20
    metric = result["metrics"]["reward"]
    assert metric == {
        "value": share,
        "low": wilson(share, 20)[0],
        "high": wilson(share, 20)[1],
        "n": 20,
        "unscored": 0,
        "completions": 20,
    }
    assert (result["questions"], result["comparison"]) == (20, None)
    (event,) = job.of_type("eval")
    assert (event["reward"], event["n"]) == (share, 20)
    assert event["intervals"] == {"reward": [*wilson(share, 20)]}
    assert (job.ctx.run_dir / "report.md").read_text().startswith("# reward: demo\n")


SCORES = """
def from_the_third(completions, number, **keywords):
    return [None if one < 3 else one % 2 for one in number]

def none(completions, **keywords):
    return [None for _ in completions]

def of_some(completions, number, **keywords):
    return [None if index % 2 or one == 4 else 1 for index, one in enumerate(number)]
"""


@pytest.fixture
def scored(tmp_path, model, monkeypatch):
    """Make a job whose rewards do not score every completion."""
    lines = ({"prompt": f"{n}+{n}=", "answer": str(2 * n), "number": n} for n in range(1, 7))
    write(tmp_path / "numbers.jsonl", *lines)
    (tmp_path / "partial.py").write_text(SCORES)
    monkeypatch.chdir(tmp_path)

    def make(name: str) -> tiny.Surroundings:
        found = tiny.surroundings(tmp_path / name, model)
        found.ctx = replace(found.ctx, code_folders=(str(tmp_path),))
        return found

    return make


def test_completions_that_no_reward_scores_are_left_out_and_counted(scored):
    job = scored("one")
    options = {"dataset": "numbers.jsonl", "max_tokens": 2}
    result = evaluate(job, reward=["partial:from_the_third"], **options)
    metric = result["metrics"]["reward"]
    assert (metric["value"], metric["n"], metric["unscored"], metric["completions"]) == (
        0.5,
        4,
        2,
        6,
    )
    assert (metric["low"], metric["high"]) == wilson(0.5, 4)
    (event,) = job.of_type("eval")
    assert (event["n"], event["unscored"], event["completions"]) == (4, 2, 6)
    assert "unscored: 2 of 6" in describe({"time": 0, **event})
    assert (
        "| reward | 0.5 | 0.15 to 0.85 | 4 (unscored: 2 of 6) |"
        in (job.ctx.run_dir / "report.md").read_text()
    )
    assert [row["metrics"] for row in rows_of(job)[:3]] == [{}, {}, {"reward": 1.0}]


def test_a_comparison_uses_the_questions_that_both_models_have_a_score_for(scored):
    options = {"dataset": "numbers.jsonl", "max_tokens": 2}
    evaluate(scored("first"), reward=["partial:from_the_third"], **options)
    second = scored("second")
    result = evaluate(second, reward=["correctness"], against="first", **options)
    found = result["comparison"]["reward"]
    assert (found["n"], found["unscored"]) == (4, 2)
    assert found["words"].endswith("; unscored by one of both: 2 of 6 questions")
    third = scored("third")
    result = evaluate(third, reward=["partial:from_the_third"], against="second", **options)
    assert result["comparison"]["reward"]["unscored"] == 2
    with pytest.raises(JobFailed, match="first has no question of this evaluation that both"):
        evaluate(scored("fourth"), reward=["correctness"], against="first", samples=2, **options)


def test_a_comparison_that_an_earlier_version_submitted_says_by_which_test_it_is(scored):
    options = {"dataset": "numbers.jsonl", "max_tokens": 2}
    evaluate(scored("first"), **options)
    for name, rules in (("old", 1), ("new", RULES)):
        job = scored(name)
        job.ctx = replace(job.ctx, rules=rules)
        evaluate(job, against="first", **options)
        messages = [event["message"] for event in job.of_type("warning")]
        assert len(messages) == (rules == 1)
        assert all("Student's paired t test; the version that submit" in one for one in messages)


def test_a_metric_of_several_completions_uses_those_that_have_a_score(scored):
    job = scored("repeats")
    options = {
        "dataset": "numbers.jsonl",
        "samples": 4,
        "max_tokens": 2,
        "repeats": 4,
        "temperature": 1.0,
        "pass_k": [2, 3],
    }
    result = evaluate(job, reward=["partial:of_some"], **options)
    metrics = result["metrics"]
    assert (metrics["reward"]["n"], metrics["reward"]["unscored"]) == (3, 10)
    assert metrics["pass@2"] == {**metrics["reward"], "unscored": 0, "completions": 0}
    assert "pass@3" not in metrics  # no question has three scored completions


def test_an_evaluation_without_any_score_fails(scored):
    with pytest.raises(JobFailed) as failed:
        evaluate(
            scored("none"),
            reward=["partial:none"],
            dataset="numbers.jsonl",
            samples=3,
            max_tokens=2,
        )
    wanted = "reward: must score at least one completion, got None for each of 3"
    assert str(failed.value) == wanted


def test_a_job_of_an_earlier_version_says_from_which_question_on_it_leaves_out(scored):
    options = {"dataset": "numbers.jsonl", "max_tokens": 2, "reward": ["partial:of_some"]}
    for name, rules in (("old", 1), ("new", RULES)):
        evaluate(scored(name), **options)
        path = scored(name).ctx.run_dir / "rows.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
        job = scored(name)
        job.ctx = replace(job.ctx, rules=rules)
        evaluate(job, **options)
        messages = [event["message"] for event in job.of_type("warning")]
        expected = "completions that no reward scores are left out from question 4 on; an earlier "
        assert messages == [f"{expected}version counted them as 0"][: 2 - rules]


def test_a_stopped_job_resumes_at_the_next_row_with_equal_rows(tmp_path, model):
    options = {"samples": 40, "max_tokens": 8, "repeats": 2, "temperature": 1.0}
    straight = tiny.surroundings(tmp_path / "straight", model)
    wanted = evaluate(straight, **options)
    job = tiny.surroundings(tmp_path / "stopped", model)
    with pytest.raises(Stopped):
        stop_at(job, 7, options)
    first = rows_of(job)
    assert 0 < len(first) < 40
    with (job.ctx.run_dir / "rows.jsonl").open("ab") as file:
        file.write(b'{"row": torn')
    job.stop.clear()
    found = evaluate(job, **options)
    assert rows_of(job) == rows_of(straight)
    assert found["metrics"] == wanted["metrics"]
    assert found["timings"]["questions"] == 40 - len(first)


def stop_at(job: tiny.Surroundings, rows: int, options: dict[str, Any]) -> None:
    """Run until the journal has so many rows."""
    import threading

    def watch() -> None:
        path = job.ctx.run_dir / "rows.jsonl"
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= rows)
        job.stop.set()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        evaluate(job, **{**options, "max_tokens": 8})
    finally:
        thread.join()


def test_a_row_is_in_the_journal_once_though_the_disk_fails_to_flush_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Journal(path, [], None) as journal:
        kept, null = os.dup(journal.fileno()), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, journal.fileno())  # it takes every row, and refuses fdatasync
        count = 0

        def append_until_a_flush_is_due() -> bool:
            nonlocal count
            journal.append({"row": count})
            count += 1
            try:
                journal.sync_if_due()
            except OSError:
                return True
            return False

        wait_until(append_until_a_flush_is_due)
        assert [row["row"] for row in journal.rows] == list(range(count))
        os.dup2(kept, journal.fileno())
        for descriptor in (kept, null):
            os.close(descriptor)


def test_rows_of_other_questions_are_begun_again(job):
    evaluate(job, samples=5, max_tokens=2)
    path = job.ctx.run_dir / "rows.jsonl"
    rows = rows_of(job)
    rows[2]["question"] = "0" * 64
    write(path, *rows)
    evaluate(job, samples=5, max_tokens=2)
    assert any("begun again" in event["message"] for event in job.of_type("warning"))
    assert rows_of(job)[2]["question"] != "0" * 64


def test_a_prompt_without_room_fails_the_job_with_its_row(job, tmp_path):
    data = write(tmp_path / "d.jsonl", {"prompt": "1" * 600, "answer": "1"})
    with pytest.raises(JobFailed, match="the prompt of row 1 has 600 tokens and demo takes 512"):
        evaluate(job, dataset=data)


def test_several_rewards_are_summed_by_weight(job):
    result = evaluate(job, samples=5, max_tokens=4, reward=["correctness", "general=0.5"])
    assert list(result["metrics"]) == ["reward", "correctness", "general"]
    for row in rows_of(job):
        (scores,) = [one["scores"] for one in row["completions"]]
        assert scores["reward"] == scores["correctness"] + 0.5 * scores["general"]


# --- Likelihoods


def log_likelihood(model: Any, context: str, continuation: str) -> float:
    """By transformers."""
    tokenizer = tiny.tokenizer()
    whole = tokenizer(context + continuation)["input_ids"]
    begin = len(tokenizer(context)["input_ids"])
    with torch.inference_mode():
        rows = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(rows[place - 1][whole[place]]) for place in range(begin, len(whole)))


def test_choices_are_compared_by_the_log_likelihoods_of_transformers(job, tmp_path, model):
    records: list[dict[str, Any]] = [
        {"question": f"{n}+{n}?", "choices": [str(2 * n), "cat", "a b c"], "answer": answer}
        for n, answer in ((1, 0), (2, "cat"), (3, "C"))
    ]
    result = evaluate(job, task="choice", dataset=write(tmp_path / "c.jsonl", *records))
    rows = rows_of(job)
    right = [0, 1, 2]
    for row, record, answer in zip(rows, records, right, strict=True):
        sums = [
            log_likelihood(model, record["question"], f" {choice}") for choice in record["choices"]
        ]
        assert [one["logprob"] for one in row["choices"]] == pytest.approx(sums, abs=1e-3)
        best = max(range(3), key=sums.__getitem__)
        by_length = max(range(3), key=lambda i: sums[i] / len(record["choices"][i]))
        assert row["metrics"] == {
            "accuracy": float(best == answer),
            "accuracy_normalized": float(by_length == answer),
        }
    assert result["metrics"]["accuracy"]["n"] == 3


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "1"}, "must be an object with choices"),
        ({"question": "1", "choices": ["a"], "answer": 0}, "choices: must be a list of 2 to 26"),
        ({"question": "1", "choices": ["a", "b"], "answer": 2}, "answer: must be an index below 2"),
        ({"question": "1", "choices": ["a", "b"]}, "answer: must be an index below 2"),
    ],
)
def test_a_record_without_choices_is_named(tmp_path, record, message):
    spec = EvalSpec.parse({"task": "choice", "dataset": write(tmp_path / "c.jsonl", record)})
    with pytest.raises(SpecError, match=r"c\.jsonl, line 1") as refused:
        spec.questions()
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("options", "record", "left_out"),
    [
        ({"task": "perplexity"}, {"text": "words", "id": 3}, "; columns (records): id (2)"),
        ({"task": "reward"}, {"prompt": "1+1=", "answer": "2"}, ""),
        ({"task": "choice"}, {"question": "a?", "choices": ["x", "y"], "answer": 0}, ""),
    ],
)
def test_what_is_not_evaluated_is_counted_in_the_begin_event(
    job, tmp_path, options, record, left_out
):
    data = tmp_path / "rows.jsonl"
    line = orjson.dumps(record)
    data.write_bytes(b"\n".join((line, b"", b"{}", b" ", line)))
    evaluate(job, dataset=str(data), skip_bad_rows=True, **options)
    [begin] = job.of_type("begin")
    assert begin["left_out"] == f"blank lines: 2; unusable records: 1{left_out}"


def test_perplexity_is_that_of_all_texts_together(job, tmp_path, model):
    texts = ["the cat sat on the mat", "1+1=2", "x" * 700]
    data = write(tmp_path / "t.jsonl", *({"text": text} for text in texts))
    result = evaluate(job, task="perplexity", dataset=data)
    rows = rows_of(job)
    assert [row["tokens"] for row in rows] == [len(text) for text in texts]
    short = [log_likelihood(model, "<bos>", text) for text in texts[:2]]
    tokenizer = tiny.tokenizer()
    with torch.inference_mode():
        for row, text in zip(rows[:2], texts, strict=False):
            ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            wanted = sum(float(logits[i][token]) for i, token in enumerate(ids[1:]))
            assert row["logprob"] == pytest.approx(wanted, abs=1e-3)
    assert len(short) == 2
    bits = -sum(row["logprob"] for row in rows) / math.log(2) / sum(map(len, texts))
    found = {name: metric["value"] for name, metric in result["metrics"].items()}
    assert found["bits_per_byte"] == pytest.approx(bits)
    assert found["byte_perplexity"] == pytest.approx(2**bits)
    assert found["token_perplexity"] == pytest.approx(2**bits)  # a token per byte


def gpt2(*, positions: int) -> Any:
    """A model with a table of positions, which the engine runs by its own forward pass."""
    torch.manual_seed(0)
    size = len(tiny.tokenizer())
    config = GPT2Config(vocab_size=size, n_positions=positions, n_embd=16, n_layer=2, n_head=2)
    config.eos_token_id = config.bos_token_id = None
    return GPT2LMHeadModel(config).requires_grad_(False).eval()


@pytest.mark.parametrize("make", [tiny.model, gpt2])
def test_the_windows_of_long_texts_use_all_positions_of_the_model(tmp_path, make):
    """As lm-evaluation-harness with transformers: the last token of a window is no input."""
    model = make(positions=32)
    job = tiny.surroundings(tmp_path / "eval", model)
    text = "the cat sat on the mat " * 4
    evaluate(job, task="perplexity", dataset=write(tmp_path / "t.jsonl", {"text": text}))
    ids = tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]
    wanted = 0.0
    for window, first in windows(ids, tiny.tokenizer().bos_token_id, 32):
        assert len(window) - 1 <= 32
        with torch.inference_mode():
            rows = model(torch.tensor([window[:-1]])).logits[0].log_softmax(-1)
        wanted += sum(float(rows[i - 1][window[i]]) for i in range(first, len(window)))
    (row,) = rows_of(job)
    assert (row["tokens"], row["logprob"]) == (len(ids), pytest.approx(wanted, abs=1e-3))


def test_a_choice_may_fill_all_positions_before_its_last_token(job, tmp_path, model):
    frame = len(tiny.tokenizer()("Question: \nAnswer: ab")["input_ids"])
    longest, longer = ("x" * (512 + 1 - frame + n) for n in (0, 1))
    record = {"question": longest, "choices": ["ab", "cd"], "answer": 0}
    how = {"task": "choice", "template": "Question: {question}\nAnswer:"}
    evaluate(job, **how, dataset=write(tmp_path / "c.jsonl", record))
    (row,) = rows_of(job)
    assert all(math.isfinite(choice["logprob"]) for choice in row["choices"])
    with pytest.raises(JobFailed, match=r"row 1 has 514 tokens .* takes 512 before the last one"):
        evaluate(job, **how, dataset=write(tmp_path / "d.jsonl", {**record, "question": longer}))


@pytest.mark.parametrize("task", ["choice", "perplexity"])
def test_a_model_with_nan_fails_instead_of_choosing_the_first(tmp_path, task):
    broken = tiny.model(positions=512)
    broken.model.norm.weight.fill_(float("nan"))
    job = tiny.surroundings(tmp_path / "eval-20261121-184200-x7f3", broken)
    record = {"question": "1+1=", "text": "1+1=2", "choices": ["2", "3"], "answer": 0}
    with pytest.raises(JobFailed, match="model: NaN or Inf in its logits"):
        evaluate(job, task=task, dataset=write(tmp_path / "c.jsonl", record))


def test_windows_predict_every_token_once_with_as_much_context_as_fits():
    ids = list(range(10, 21))
    found = list(windows(ids, 1, 4))
    assert [token for window, first in found for token in window[first:]] == ids
    assert [len(window) for window, _ in found] == [5, 5, 5]
    assert found[0] == ([1, 10, 11, 12, 13], 1)
    assert found[-1] == ([16, 17, 18, 19, 20], 2)
    assert list(windows([7], 1, 4)) == [([1, 7], 1)]


def test_blanks_at_the_end_of_a_context_count_to_the_continuation(job):
    warm = job.ctx.models.take("demo")
    assert split(warm, "ab ", "c") == (warm.tokenizer("ab c")["input_ids"], 2)


# --- Comparisons


def test_an_evaluation_is_compared_with_another_question_by_question(tmp_path, model):
    one = tiny.surroundings(tmp_path / "eval-20261121-184200-aaaa", model)
    evaluate(one, samples=30, max_tokens=3)
    other = tiny.surroundings(tmp_path / "eval-20261121-184201-bbbb", tiny.model(3, positions=512))
    result = evaluate(other, samples=20, max_tokens=3, against=one.ctx.run_dir.name)
    found = result["comparison"]["reward"]
    rows = [rows_of(one)[:20], rows_of(other)]
    before, after = ([row["metrics"]["reward"] for row in part] for part in rows)
    assert found["n"] == 20
    assert found["difference"] == pytest.approx((sum(after) - sum(before)) / 20)
    assert found["gained"] == sum(b > a for a, b in zip(before, after, strict=True))
    assert found["verdict"] == "undecided"
    assert found["words"].startswith("undecided: ")
    assert "## Compared with eval-20261121-184200-aaaa" in (
        (other.ctx.run_dir / "report.md").read_text()
    )


@pytest.mark.parametrize(
    "count",
    [
        2,
        pytest.param(
            40,
            marks=pytest.mark.nightly(
                part="oracles", catches="a comparison of real completions that decides too often"
            ),
        ),
    ],
)
def test_no_comparison_of_a_model_with_itself_fails(tmp_path, model, count):
    (tmp_path / "halves.py").write_text(
        "def length(prompts, completions, answers):\n"
        "    return [0.1 * len(set(text)) for text in completions]\n"
    )
    rewards = ["halves:length=0.3", "general=0.1"]
    options: dict[str, Any] = {"samples": 12, "max_tokens": 4, "temperature": 1, "reward": rewards}
    first: str | None = None
    decided = 0
    for number in range(count + 1):
        job = tiny.surroundings(tmp_path / f"eval-20261121-184200-{number:04}", model)
        job.ctx = replace(job.ctx, code_folders=(str(tmp_path),))
        result = evaluate(job, **options, seed=number // 2, against=first)
        first = job.ctx.run_dir.name
        orjson.dumps(result)
        if result["comparison"] is not None:
            decided += result["comparison"]["reward"]["verdict"] != "undecided"
    assert decided <= count * 0.15


def test_the_interval_of_a_perplexity_is_not_that_of_the_lengths():
    rows: list[dict[str, Any]] = [
        {"metrics": {"bits_per_byte": 2.0 + (n % 3) / 100}, "bytes": size, "words": 1, "tokens": 1}
        for n, size in enumerate([20, 2600, 40, 1300, 90, 700, 30, 2000, 55, 350])
    ]
    found = metrics_of(rows)["bits_per_byte"]
    assert found.low is not None
    assert found.high is not None
    assert 2.0 < found.low < found.value < found.high < 2.03
    better = [
        {**row, "metrics": {"bits_per_byte": row["metrics"]["bits_per_byte"] - 0.1}} for row in rows
    ]
    for number, row in enumerate([*rows, *better]):
        row["question"] = str(number % 10)
    pairing = pair(rows, better)
    assert pairing is not None
    compared = pairing.comparisons["bits_per_byte"]
    assert (compared.verdict, compared.gained) == ("better", 10)
    assert (compared.low, compared.high) == pytest.approx((-0.1, -0.1))


def test_a_comparison_without_common_questions_fails(tmp_path, model):
    one = tiny.surroundings(tmp_path / "one", model)
    evaluate(one, samples=2, max_tokens=1)
    data = write(tmp_path / "d.jsonl", {"prompt": "9", "answer": "1"})
    other = tiny.surroundings(tmp_path / "other", model)
    with pytest.raises(JobFailed, match="against: one has no question"):
        evaluate(other, dataset=data, max_tokens=1, against="one")
    with pytest.raises(JobFailed, match="against: gone has no rows"):
        evaluate(other, dataset=data, max_tokens=1, against="gone")


def test_a_comparison_of_rewards_beyond_floats_which_earlier_versions_accepted_fails(
    tmp_path, model
):
    for name, value in (("one", 1.7e308), ("other", -1.7e308)):
        job = tiny.surroundings(tmp_path / name, model)
        evaluate(job, samples=2, max_tokens=1)
        path = job.ctx.run_dir / "rows.jsonl"
        rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        for row in rows:
            row["metrics"] = dict.fromkeys(row["metrics"], value)
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    with pytest.raises(JobFailed, match="against: one cannot be compared with: values differ by"):
        evaluate(job, samples=2, max_tokens=1, against="one")


def test_the_report_shows_questions_that_became_right_or_wrong():
    from warmd.jobs.eval.report import report

    def row(number: int, score: float) -> dict[str, Any]:
        return {
            "row": number,
            "question": str(number),
            "weights": "w",
            "prompt": f"question {number}",
            "answer": "7",
            "completions": [{"text": f"says {score:g}"}],
            "metrics": {"reward": score},
        }

    before, after = [row(1, 0.0), row(2, 1.0)], [row(1, 1.0), row(2, 0.0)]
    pairing = pair(before, after)
    text = report(
        title="t",
        about={"job": "a|b"},
        metrics=metrics_of(after),
        rows=after,
        against="other",
        pairing=pairing,
    )
    assert "- job: a\\|b" in text
    gained, lost = text.split("## From wrong to right: 1")[1].split("## From right to wrong: 1")
    assert "    question 1" in gained
    assert "    says 0" in gained.split("after")[0]
    assert "    question 2" in lost


def test_the_identity_of_questions_is_that_of_their_content(tmp_path):
    data = write(tmp_path / "d.jsonl", {"question": "1+1", "answer": "2"})
    copy = write(tmp_path / "e.jsonl", {"question": "1+1", "answer": "2", "id": 3})
    other = write(tmp_path / "f.jsonl", {"question": "1+1", "answer": "3"})
    plain, templated, copied, changed = (
        digest(EvalSpec.parse(options).questions())
        for options in (
            {"dataset": data},
            {"dataset": data, "template": "Q: {question}"},
            {"dataset": copy},
            {"dataset": other},
        )
    )
    assert plain == templated == copied != changed


def test_a_question_is_asked_as_it_is_and_the_begin_event_shows_the_prompt(job, tmp_path):
    evaluate(job, dataset=write(tmp_path / "d.jsonl", {"question": "1+1?", "answer": "2"}))
    assert job.of_type("begin")[0]["first_prompt"] == "1+1?"
    assert [row["prompt"] for row in rows_of(job)] == ["1+1?"]


def test_the_engine_is_the_one_of_inference(job, model):
    evaluate(job, samples=1, max_tokens=1)
    warm = job.ctx.models.take("demo")
    assert engines.engine_of(warm) is engines.engine_of(warm)
    assert (id(model), "native") in engines._engines


# --- Functions of users


REWARDS = """
import os

def length(prompts, completions, answers):
    print("not among the answers")
    return [float(len(text)) for text in completions]

def process(prompts, completions, answers):
    return [float(os.getpid()) for _ in completions]

def broken(prompts, completions, answers):
    raise ValueError("no")

def hanging(prompts, completions, answers):
    import time
    time.sleep(60)  # longer than `reward_timeout`: its process is killed

async def column(completions, number, **kwargs):
    return [float(number[0]) for _ in completions]
"""


@pytest.fixture
def own(job: tiny.Surroundings, tmp_path: Path) -> tiny.Surroundings:
    (tmp_path / "evalrewards.py").write_text(REWARDS)
    job.ctx = replace(job.ctx, code_folders=(str(tmp_path),))
    return job


def test_user_functions_run_in_a_separate_process(own, tmp_path):
    data = write(tmp_path / "d.jsonl", {"prompt": "1+1=", "number": 7})
    names = ["evalrewards:length", "evalrewards:process", "evalrewards:column"]
    evaluate(own, dataset=data, reward=names, max_tokens=5)
    (row,) = rows_of(own)
    (completion,) = row["completions"]
    assert completion["scores"]["evalrewards:length"] == len(completion["text"])
    assert completion["scores"]["evalrewards:process"] != os.getpid()
    assert completion["scores"]["evalrewards:column"] == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "reward evalrewards:broken failed at .*evalrewards.py:12: ValueError: no"),
        ("hanging", r"took longer than 0.5 s \(reward_timeout\) for row 1"),
        ("missing", "evalrewards:missing must be a function of evalrewards"),
    ],
)
def test_a_function_that_fails_ends_the_evaluation_with_its_reason(own, name, message):
    with pytest.raises(JobFailed, match=message):
        evaluate(own, samples=2, reward=[f"evalrewards:{name}"], max_tokens=2, reward_timeout=0.5)
