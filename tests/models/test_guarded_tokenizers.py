"""A tokenizer whose rules explode fails one request, and no other thread waits for it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from daemons import Daemon
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from warmd.jobs import spec_class
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.models import guarded_tokenizers
from warmd.jobs.models.pretrained_tokenizer import read_tokenizer
from warmd.jobs.models.tokenizer_folder import TokenizerFolder

HARMFUL = "a" * 30 + "b"
# Each match stays below the limit of the library, and there are many.
SLOW = ("a" * 17 + "b ") * 2000
EXPRESSION = r"(?=(a+)+$)x|(a+)+$"


def written(folder: Path, expression: str) -> Path:
    core = Tokenizer(models.WordLevel({"?": 0, "a": 1, "<end>": 2}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=core, unk_token="?", eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        HARMFUL,
        *(pytest.param(text, marks=pytest.mark.slow) for text in (SLOW, ["a", SLOW])),
        HARMFUL + "<end>",
    ],
)
def test_rules_that_explode_fail_the_request_by_name_and_take_the_next_one(tmp_path, text):
    tokenizer = read_tokenizer(written(tmp_path, EXPRESSION))
    with pytest.raises(JobFailed, match=f"tokenizer: the rules of {tmp_path} must split 'aaaa"):
        tokenizer(text)
    assert tokenizer("a")["input_ids"] == [1]


def test_other_threads_run_while_rules_explode(tmp_path):
    tokenizer = read_tokenizer(written(tmp_path, EXPRESSION))
    tokenizer("a")
    is_over, ticks = threading.Event(), []

    def tick() -> None:
        while not is_over.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        with pytest.raises(JobFailed, match="of a processor"):
            tokenizer(SLOW)
    finally:
        is_over.set()
        thread.join()
    # Held up by the library itself, the thread would have no turn at all.
    assert len(ticks) >= 10


def test_a_guarded_tokenizer_is_saved_and_read_again_as_what_it_is(tmp_path):
    tokenizer = read_tokenizer(written(tmp_path / "one", EXPRESSION))
    tokenizer.save_pretrained(tmp_path / "two")
    one, two = (
        json.loads((tmp_path / name / "tokenizer_config.json").read_text())["tokenizer_class"]
        for name in ("one", "two")
    )
    assert one == two
    assert read_tokenizer(tmp_path / "two")("a")["input_ids"] == [1]


@pytest.mark.slow
def test_a_submission_is_refused_by_the_same_rules(tmp_path):
    encode = TokenizerFolder(written(tmp_path, EXPRESSION)).encoder()
    assert encode is not None
    assert encode("a") == [1]
    with pytest.raises(SpecError, match="model: must have a usable tokenizer"):
        encode(SLOW)


@pytest.mark.parametrize("expression", [*sorted(guarded_tokenizers._USUAL), r"\p{N}{1,3}", " {2,}"])
def test_usual_rules_cost_no_process(tmp_path, expression):
    tokenizer = read_tokenizer(written(tmp_path, expression))
    assert guarded_tokenizers.rules_of(tokenizer.backend_tokenizer) is None
    assert "__call__" not in vars(type(tokenizer)) or type(tokenizer).__module__ != (
        guarded_tokenizers.__name__
    )


@pytest.mark.parametrize("expression", ["(a+)+", "a*b", r"(\w|\d)+", "a{1,1000}", r"(a)\1", "a+?"])
def test_other_rules_are_tried(expression):
    assert not guarded_tokenizers.is_usual(expression)


def test_a_tokenizer_without_expressions_is_not_changed(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    assert guarded_tokenizers.rules_of(read_tokenizer(tmp_path).backend_tokenizer) is None


@pytest.mark.slow
def test_a_job_whose_prompt_explodes_fails_by_name_and_the_next_one_completes(
    shared_daemon: Daemon, tmp_path
):
    folder = written(tmp_path / "model", EXPRESSION)
    tiny.model().save_pretrained(folder)

    def ended(prompt: str) -> dict[str, Any]:
        values = {"prompt": prompt, "model": str(folder), "max_tokens": 2, "temperature": 0}
        spec = spec_class("infer").parse(values)
        return shared_daemon.wait(shared_daemon.client.jobs.submit(spec))

    failed = ended(HARMFUL)
    assert failed["status"] == "failed"
    assert "tokenizer: the rules of" in failed["error"]
    assert ended("a a")["status"] == "finished"
