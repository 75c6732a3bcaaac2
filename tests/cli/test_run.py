"""`warmd run` and `warmd chat` with a real daemon: streamed text, and exit codes."""

from __future__ import annotations

import io
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from daemons import Daemon
from shell import CLEAN_ENVIRON, Done, warmd

CHAT = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Daemon:
    return shared_daemon


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with a chat template."""
    folder = tmp_path_factory.mktemp("talker") / "talker"
    tiny.model(positions=4096).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model without an end token: its completions have as many tokens as asked."""
    folder = tmp_path_factory.mktemp("endless") / "endless"
    model, tokenizer = tiny.model(positions=16384), tiny.tokenizer()
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def run(daemon: Daemon, *arguments: str) -> Done:
    return warmd("run", "--model", "tiny", "--temperature", "0", *arguments, home=daemon.home.path)


def test_run_writes_the_text_and_nothing_else(daemon):
    done = run(daemon, "1+1=", "--max-tokens", "8")
    assert (done.code, done.err) == (0, "")
    result = run(daemon, "1+1=", "--max-tokens", "8", "--json").objects[0]["result"]
    assert done.out.rstrip("\n") == result["choices"][0]["text"].rstrip("\n")


def test_run_and_submit_take_the_prompt_as_argument_option_or_stdin(daemon, monkeypatch):
    by_argument = run(daemon, "--max-tokens", "8", "--", "--help")
    assert run(daemon, "--max-tokens", "8", "--prompt=--help").out == by_argument.out
    type_in(monkeypatch, "--help")
    assert run(daemon, "--max-tokens", "8").out == by_argument.out
    assert run(daemon, "a", "--prompt", "b").is_refusal(2)
    done = warmd("submit", "infer", "1+1=", "--model", "tiny", "--wait", home=daemon.home.path)
    assert done.code == 0
    spec = daemon.client.rundir(done.out.strip()).read_spec()["spec"]
    assert spec["prompt"] == "1+1="


def test_failed_job_ends_run_with_its_reason(daemon, talker):
    # Chats are rendered and counted by the job.
    done = run(daemon, "a" * 4090, "--model", talker, "--chat-template", "--max-tokens", "50")
    assert (done.code, done.out) == (1, "")
    assert "together with the completion: at most" in done.err


def test_prompts_that_do_not_fit_the_model_are_refused(daemon):
    done = run(daemon, "a" * 63, "--max-tokens", "50")
    assert done.is_refusal(2)
    assert "prompt: must have at most 14 tokens (tiny takes 64 together" in done.err
    assert done.err.rstrip().endswith("got 63")
    listed = ("submit", "infer", "--model", "tiny", "--prompts", '["a", [5, 6, 7]]')
    done = warmd(*listed, "--max-tokens", "62", home=daemon.home.path)
    assert done.is_refusal(2)
    assert "prompts: [1] must have at most 2 tokens" in done.err


@pytest.mark.slow
def test_ctrl_c_cancels_the_job(daemon, endless):
    command = [sys.executable, "-m", "warmd.cli", "run", "a", "--model", endless]
    process = subprocess.Popen(
        [*command, "--max-tokens", "16000", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**CLEAN_ENVIRON, "WARMD_HOME": str(daemon.home.path)},
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    job_id = daemon.client.find("-")
    assert job_id in errors
    assert daemon.wait(job_id)["status"] == "stopped"


@pytest.mark.slow
def test_a_loaded_model_may_stand_before_the_prompt(daemon):
    options = ("--temperature", "0", "--max-tokens", "8")
    done = warmd("run", "tiny", "1+1=", *options, home=daemon.home.path)
    assert done.code == 0
    assert done.out == run(daemon, "1+1=", "--max-tokens", "8").out


@pytest.mark.parametrize("words", [["nobody", "1 + 1"], ["tiny", "1", "+"]])
def test_words_that_begin_with_no_loaded_model_are_refused_with_both_spellings(daemon, words):
    done = warmd("run", *words, home=daemon.home.path)
    assert done.is_refusal(2)
    assert f"`warmd run --model {words[0]} {shlex.quote(words[1])}" in done.err
    assert f"`warmd run {shlex.quote(' '.join(words))}" in done.err


def test_chat_includes_the_earlier_messages(daemon, talker, monkeypatch):
    type_in(monkeypatch, "hi\n\nand more\n")
    done = warmd("chat", talker, "--temperature", "0", "--max-tokens", "5", home=daemon.home.path)
    assert (done.code, done.err) == (0, "")
    job = daemon.client.find("-")
    spec = daemon.client.rundir(job).read_spec()["spec"]
    assert [role in spec["messages"] for role in ("hi", "assistant", "and more")] == [True] * 3
    assert spec["reply"] == "message"


def test_chat_with_a_model_without_a_chat_template_is_refused(daemon, monkeypatch):
    type_in(monkeypatch, "hi\n")
    done = warmd("chat", "tiny", home=daemon.home.path)
    assert done.is_refusal(2)
    assert "messages: must go with a chat template, got tiny" in done.err


def test_chat_takes_the_latest_trained_model_that_can(desk, talker, monkeypatch):
    older, job_id, newest = (desk.train() for _ in range(3))
    type_in(monkeypatch, "")
    done = desk.warmd("chat")
    assert done.is_refusal(2)
    assert "model: no trained or loaded model has a chat template: load one: " in done.err
    for one in (older, job_id):
        shutil.copytree(talker, desk.client.rundir(one).path / "model", dirs_exist_ok=True)
    type_in(monkeypatch, "")
    done = desk.warmd("chat")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith(f"Model: {job_id}. `warmd chat MODEL")
    assert newest > job_id


def test_stopped_daemon_is_exit_code_3(tmp_path: Path, talker: str) -> None:
    done = warmd("run", "hi", "--model", talker, home=tmp_path)
    assert done.is_refusal(3)
