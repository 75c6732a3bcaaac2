"""Make the home in which tests/system/test_old_home.py starts the current version.

It has jobs in every state that an update can find, with tiny models and few steps. Run it with the
`warmd` of the version in question, in an environment of that version:

    git worktree add /tmp/warmd-0.1.0 c6cd5e1 && cd /tmp/warmd-0.1.0 && make install
    PATH=$PWD/.venv/bin:$PATH python /PATH/TO/tests/support/make_old_home.py 0.1.0.tar.xz

Run directories and Redis' file hold absolute paths, so the test unpacks to a folder whose path has
the same length as FOLDER and replaces it everywhere.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

FOLDER = Path("/tmp/warmd-old-original")  # as long as what mkdtemp makes: eight characters at last
HOME, PROJECT = FOLDER / "home", FOLDER / "project"
GATE = PROJECT / "gate"  # while it is there, the rewards of `gated` wait at their fifth call
LEASE_S = 10.0  # after which a worker of that version counts as dead
INFER = ("--model", "tiny", "--max-tokens", "6", "--temperature", "0")

CONFIG = f"""\
models: [tiny={PROJECT}/tiny]
workers:
  - train-0=train,threads=1
  - train-1=train,threads=1
  - train-2=train,threads=1
  - infer-0=infer,isolation=resident,slots=4,threads=1
http_port: 0
keep_answers: forever
"""

REWARDS = '''\
"""Reward functions of a user."""

import os
import time

calls = 0


def length(prompts, completions, answers):
    return [len(text) / 10 for text in completions]


def gated(prompts, completions, answers):
    """The same, but from the fifth call on it waits while a file `gate` is there."""
    global calls
    calls += 1
    while calls >= 5 and os.path.exists(os.path.join(os.path.dirname(__file__), "gate")):
        time.sleep(0.01)
    return length(prompts, completions, answers)


def broken(prompts, completions, answers):
    """Raises at the third call."""
    global calls
    calls += 1
    if calls == 3:
        raise ValueError("the reward is broken")
    return length(prompts, completions, answers)
'''


def make_models() -> None:
    """Save a Llama of about a thousand weights, and the configuration of a BERT like it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import BertConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "?", *"0123456789 abcdefghijklmnopqrstuvwxyz"]
    core = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.padding_side = "left"
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(PROJECT / "tiny")
    tokenizer.save_pretrained(PROJECT / "tiny")
    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertConfig(intermediate_size=16, max_position_embeddings=32, **sizes).save_pretrained(
        PROJECT / "bert"
    )


def make_project() -> None:
    """Make a user's project: models, rewards, data and a configured home."""
    PROJECT.mkdir(parents=True)
    HOME.mkdir()
    make_models()
    (HOME / "config.yaml").write_text(CONFIG)
    (PROJECT / "rewards.py").write_text(REWARDS)
    write_rows("rows.jsonl", [{"prompt": f"{n} and {n}", "answer": "1"} for n in range(12)])
    write_rows("texts.jsonl", [{"text": f"number {n} then {n + 1}"} for n in range(40)])
    write_rows("prompts.jsonl", [{"prompt": f"{n} or"} for n in range(6)])


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    (PROJECT / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def warmd(*words: str) -> str:
    """Run a command in the project's folder; return what it prints."""
    done = subprocess.run(
        ["warmd", *words],
        cwd=PROJECT,
        env={**os.environ, "WARMD_HOME": str(HOME), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode not in (0, 1):  # 1: the job failed
        raise SystemExit(f"warmd {' '.join(words)}: exit code {done.returncode}")
    return done.stdout.strip()


def submit_grpo(reward: str, samples: int, *words: str) -> str:
    options = {
        "--model": "tiny",
        "--dataset": "rows.jsonl",
        "--reward": f"rewards:{reward}",
        "--samples": str(samples),
        "--num-generations": "2",
        "--max-completion-length": "4",
        "--save-every": "2",
        "--keep": "1",
    }
    return warmd("submit", "grpo", *(word for pair in options.items() for word in pair), *words)


def submit_mlm(steps: int, *words: str) -> str:
    options = {
        "--objective": "mlm",
        "--architecture": "bert",
        "--data": "texts.jsonl",
        "--vocab-size": "300",
        "--seq-len": "16",
        "--validation": "0.2",
        "--batch-size": "2",
        "--steps": str(steps),
        "--keep": "1",
    }
    return warmd("submit", "mlm", *(word for pair in options.items() for word in pair), *words)


def events(job: str) -> list[dict[str, Any]]:
    try:
        lines = (HOME / "runs" / job / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
    except (FileNotFoundError, json.JSONDecodeError):
        return []


def has(job: str, type: str, step: int = 0) -> bool:
    return any(e["type"] == type and (e["step"] or 0) >= step for e in events(job))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("not so after 60 s")
        time.sleep(0.005)


def job_at_the_gate() -> str:
    """Submit a job of ten steps; return when it is in its fifth and the fourth is saved."""
    job = submit_grpo("gated", 10)
    wait_until((HOME / "runs" / job / "checkpoints" / "checkpoint-4").exists)
    return job


def ask_by_http() -> str:
    url = json.loads(warmd("status", "--json"))["http"]["url"]
    body = {"model": "tiny", "prompt": "1 and", "max_tokens": 6, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["id"]).removeprefix("cmpl-")  # the job


def processes() -> dict[str, int]:
    """The daemon's processes by name."""
    status = json.loads(warmd("status", "--json"))
    found = {worker["name"]: worker["pid"] for worker in status["workers"]}
    return {**found, "supervisor": supervisor_pid()}


def supervisor_pid() -> int:
    return int(json.loads((HOME / "daemon.json").read_text())["pid"])


def horse(job: str) -> int:
    return int((HOME / "runs" / job / "lock").read_bytes().split()[0])


def make_jobs() -> dict[str, str]:
    """Make all jobs; return their ids by what the test calls them. The daemon is killed at last."""
    warmd("start")
    jobs = {
        "finished": submit_grpo("length", 6),
        "failed": submit_grpo("broken", 6),
        "mlm": submit_mlm(6),
    }
    for job in jobs.values():
        warmd("tail", job)
    warmd("load", f"encoder={HOME}/runs/{jobs['mlm']}/model")
    encode = warmd("submit", "encode", "--model", "encoder", "--text", "number 3", "--text", "then")
    answer = warmd("submit", "infer", "1 and 2", *INFER)
    for job in (encode, answer):
        warmd("tail", job)
    jobs |= {"encode": encode, "answer": answer, "http": ask_by_http()}

    GATE.touch()
    jobs["stopped"], jobs["released"] = (job_at_the_gate() for _ in range(2))
    warmd("cancel", jobs["stopped"])
    warmd("pause", jobs["released"], "--release")
    GATE.unlink()
    wait_until(lambda: has(jobs["stopped"], "stopped") and has(jobs["released"], "paused"))

    jobs["interrupted_mlm"] = submit_mlm(400, "--save-every", "20", "--eval-every", "0")
    wait_until(lambda: has(jobs["interrupted_mlm"], "checkpoint", 20))
    os.kill(horse(jobs["interrupted_mlm"]), signal.SIGSTOP)
    GATE.touch()
    jobs["held"] = job_at_the_gate()
    warmd("pause", jobs["held"])
    GATE.unlink()
    wait_until(lambda: has(jobs["held"], "paused"))
    GATE.touch()
    jobs["interrupted"] = job_at_the_gate()

    jobs["queued"] = submit_grpo("length", 4)
    jobs["canceled"] = submit_grpo("length", 4)
    warmd("cancel", jobs["canceled"])
    jobs["deferred"] = submit_grpo("length", 4, "--after", jobs["interrupted"])
    jobs["late"] = submit_grpo("length", 4, "--in", "3650d")  # the longest
    pids = processes()
    os.kill(pids["infer-0"], signal.SIGSTOP)
    files = ("--input", "prompts.jsonl", "--output", "answers.jsonl")
    jobs["unanswered"] = warmd("submit", "infer", *INFER, *files)
    jobs["scheduled"] = submit_grpo("length", 4, "--in", "5s")
    # No process renews leases now: let them expire here, whatever the clock of the test machine.
    for pid in (pids.pop("supervisor"), *pids.values()):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(LEASE_S + 5)
    return jobs


def kill_everything() -> None:
    """Kill the daemon, as a power cut would. Redis ends last: what has expired is in its file."""
    supervisor = psutil.Process(supervisor_pid())
    doomed = [*supervisor.parents()[:1], supervisor, *supervisor.children(recursive=True)]
    for process in doomed:
        process.kill()
    psutil.wait_procs(doomed, timeout=10)


def pack(target: str) -> None:
    """Write what a test needs, without what names this machine, to a tar file."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.name in ("home/logs", "home/sockets", "project/gate"):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    for lock in HOME.glob("runs/*/lock"):  # pid, start and boot id of a horse that has ended
        lock.write_bytes(b"")
    with tarfile.open(target, "w:xz", preset=9) as file:
        for folder in (HOME, PROJECT):
            file.add(folder, folder.name, filter=anonymous)


def main() -> None:
    """Make the home and its archive; print its size."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    make_project()
    jobs = make_jobs()
    kill_everything()
    (PROJECT / "jobs.json").write_text(json.dumps(jobs, indent=2) + "\n")
    pack(sys.argv[1])
    sys.stdout.write(f"{sys.argv[1]}: {os.path.getsize(sys.argv[1])} bytes\n")


if __name__ == "__main__":
    main()
