"""Make the homes in which tests/system/test_interrupted_homes.py starts the current version.

They have jobs in every state that an update can find, with tiny models and few steps; one keeps its
runs in a bucket. What the version in question makes of them is recorded: it finishes a copy. Run it
in an environment of that version:

    git worktree add /tmp/warmd-cc9358c cc9358c && cd /tmp/warmd-cc9358c && make install
    .venv/bin/python /PATH/TO/tests/support/make_old_home.py 0.1.0-cc9358c.tar.xz

The processor is limited as in processor_sums.py, so that other processors can compute the same
bits. tests/homes/0.1.0.tar.xz is of c6cd5e1; an earlier state of this file made it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import string
import sys
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import processor_sums

os.environ |= {**processor_sums.CAPS, "HF_HUB_OFFLINE": "1", "AWS_REGION": "us-east-1"}

import torch
from old_homes import ORIGINAL, OldHome, save_bucket
from s3_servers import s3_server
from waiting import wait_until

from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs import spec_class

PROJECT = ORIGINAL / "project"
EXPECTED = ORIGINAL / "expected"
GATE = PROJECT / "gate"  # while it is there, the rewards of `gated` wait at their sixth call
LEASE_S = 10.0  # after which a worker of that version counts as dead

WORKERS = 9  # of the queue train: the jobs that are interrupted, or held while they are paused
TRAIN = "".join(f"  - train-{n}=train,threads=1\n" for n in range(WORKERS))
CONFIG = f"""\
models: [tiny={PROJECT}/tiny]
workers:
{TRAIN}  - infer-0=infer,isolation=resident,slots=4,threads=1
http_port: off
keep_answers: forever
"""
CLOUD = f"""\
models: [tiny={PROJECT}/tiny]
workers: ["train-0=train,threads=1", "train-1=train,threads=1"]
http_port: off
runs: s3://runs/old
"""

REWARDS = '''\
"""Reward functions of a user."""

import os
import time

calls = 0


def vowels(prompts, completions, answers):
    """The share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / 8 for text in completions]


def rare(prompts, completions, answers):
    """Whether one of three letters occurs: in most groups never."""
    return [float(any(letter in text for letter in "qwy")) for text in completions]


def gated(prompts, completions, answers):
    """The same as vowels, but from the sixth call on it waits while a file `gate` is there."""
    global calls
    calls += 1
    while calls >= 6 and os.path.exists(os.path.join(os.path.dirname(__file__), "gate")):
        time.sleep(0.01)
    return vowels(prompts, completions, answers)


def broken(prompts, completions, answers):
    """Raises at the third call."""
    global calls
    calls += 1
    if calls == 3:
        raise ValueError("the reward is broken")
    return vowels(prompts, completions, answers)
'''

GRPO: dict[str, Any] = {
    "model": "tiny",
    "dataset": "questions.jsonl",
    "template": "Q: {question} A:",
    "samples": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 3e-3,
    "save_every": 3,
    "keep": 1,
    "reward": ["rewards:vowels"],
}
REPLAY: dict[str, Any] = {"replay": 4, "reward": ["rewards:rare"], "learning_rate": 1e-3}
SFT: dict[str, Any] = {
    "model": "tiny",
    "dataset": "questions.jsonl",
    "template": "Q: {question} A:",
    "samples": 24,
    "eval_samples": 8,
    "batch_size": 4,
    "learning_rate": 3e-3,
    "save_every": 3,
    "keep": 1,
}
DPO: dict[str, Any] = {
    "model": "tiny",
    "dataset": "pairs.jsonl",
    "batch_size": 4,
    "learning_rate": 3e-3,
    "save_every": 3,
    "keep": 1,
}
MLM: dict[str, Any] = {
    "objective": "mlm",
    "architecture": "bert",
    "data": "texts.jsonl",
    "vocab_size": 300,
    "seq_len": 40,
    "validation": 0.2,
    "batch_size": 2,
    "eval_every": 0,
    "steps": 12,
    "save_every": 3,
    "keep": 1,
}
EVAL: dict[str, Any] = {
    "model": "tiny",
    "dataset": "questions.jsonl",
    "template": "Q: {question} A:",
    "samples": 12,
    "max_tokens": 8,
    "temperature": 1.0,
    "reward": ["rewards:vowels"],
}
GROUPS = {"sweep", "curriculum"}
KINDS = {"grpo": GRPO, "sft": SFT, "dpo": DPO, "mlm": MLM, "eval": EVAL}


def make_models() -> None:
    """Save a Llama of 3,000 weights, and the configuration of a BERT like it.

    Its tokens are single bytes, so a text has one tokenization. The first dimension of all hidden
    states is about 1: by it no special token is ever sampled, but for the end, which follows `z`
    mostly. So no completion has fewer than two tokens, and their lengths differ.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import BertConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ("<pad>", "<bos>", "<eos>")
    # The byte-level alphabet shows a space as Ġ.
    letters = "Ġ" + string.ascii_letters + string.digits + string.punctuation
    core = Tokenizer(models.BPE({w: n for n, w in enumerate((*special, *letters))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    config = LlamaConfig(
        vocab_size=len(special) + len(letters),
        hidden_size=12,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        known, head = model.model.embed_tokens.weight, model.lm_head.weight
        end, z = 2, 3 + letters.index("z")
        known[:, 0], known[:, 1] = 3, 0
        known[z, 1] = 6
        head[:, 0], head[:, 1] = 0, 0
        head[: len(special), 0] = -8
        head[end, 1] = 12
        head[z, 0] = 0.8
        for letter in string.ascii_uppercase + string.digits + string.punctuation:
            head[3 + letters.index(letter), 0] = -2
    model.save_pretrained(PROJECT / "tiny")
    tokenizer.save_pretrained(PROJECT / "tiny")
    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertConfig(intermediate_size=16, max_position_embeddings=64, **sizes).save_pretrained(
        PROJECT / "bert"
    )


def make_project() -> None:
    """Make a user's project: models, rewards, data and two configured homes."""
    PROJECT.mkdir(parents=True)
    make_models()
    (PROJECT / "rewards.py").write_text(REWARDS)
    for name, content in (("home", CONFIG), ("cloud", CLOUD)):
        (ORIGINAL / name).mkdir(mode=0o700)
        (ORIGINAL / name / "config.yaml").write_text(content)
    questions = [{"question": f"what is {n} and {n % 7}", "answer": words(n)} for n in range(40)]
    pairs = [
        {"prompt": f"say {n}:", "chosen": f" {words(n)}", "rejected": f" {words(n + 5)} no"}
        for n in range(40)
    ]
    write_rows("questions.jsonl", questions)
    write_rows("pairs.jsonl", pairs)
    write_rows("texts.jsonl", [{"text": f"number {n} is {words(n)}"} for n in range(50)])


def words(number: int) -> str:
    """Some words, at least two letters."""
    every = ["area", "ease", "idea", "oboe", "aura", "eerie", "onion", "audio", "queue", "ouija"]
    return " ".join(every[: number % 3 + 1][::-1]) + every[number % 10]


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    (PROJECT / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


class Maker(OldHome):
    """Makes the jobs of one home."""

    def make(self, name: str, kind: str, *, after: str | None = None, **options: Any) -> str:
        """Submit a job and note its id by its name here."""
        values = {**KINDS[kind], **options}
        if kind == "grpo":
            values["reward_log"] = str(PROJECT / f"{name}.rewards.jsonl")
        with contextlib.chdir(PROJECT):
            spec = spec_class(kind).parse(values)
            before = None if after is None else self.jobs[after]
            self.jobs[name] = self.client.jobs.submit(spec, Queueing(after=before))
        return self.jobs[name]

    def rundir(self, name: str) -> RunDir:
        return RunDir(self.home.runs / self.jobs[name])

    def freeze(self, job_id: str, step: int) -> None:
        """Suspend the process of a job soon after it has saved a step."""
        rundir = RunDir(self.home.runs / job_id)

        def is_saved() -> bool:
            found = [int(path.name.partition("-")[2]) for path in rundir.checkpoints.glob("c*-*")]
            return max(found, default=0) >= step

        wait_until(is_saved, timeout_s=60)
        holder = rundir.holder()
        assert holder is not None, f"{job_id} has ended: more steps"
        os.kill(holder, signal.SIGSTOP)

    def has(self, name: str, type: str) -> bool:
        return any(event["type"] == type for event in self.logged(name))

    def note(self) -> None:
        """Write the ids of the jobs for the test."""
        path = PROJECT / "jobs.json"
        every = json.loads(path.read_bytes())
        path.write_text(json.dumps({**every, self.home.path.name: self.jobs}, indent=2) + "\n")

    def cut_power(self) -> None:
        """Kill all; no process renews leases before, so that they have expired in Redis' file."""
        redis = self.pid("redis") if "redis" in self.status() else None
        for process in self.processes():
            if process.pid != redis:
                with contextlib.suppress(Exception):
                    process.suspend()
        time.sleep(LEASE_S + 5)
        self.kill_everything()
        self.client.close()


def make_local(home: Maker) -> None:
    """Make the jobs of the home with local runs."""
    home.start()
    for kind in ("grpo", "sft", "dpo", "mlm", "eval"):
        home.make(f"finished_{kind}", kind)
    home.make("failed", "grpo", reward=["rewards:broken"])
    for name in list(home.jobs):
        home.wait(home.jobs[name])

    home.make("stopped", "sft", epochs=6)
    home.make("released_grpo", "grpo", epochs=4, **REPLAY)
    home.make("released_mlm", "mlm", steps=36)
    for name in ("stopped", "released_grpo", "released_mlm"):
        wait_until(partial(home.has, name, "checkpoint"), timeout_s=60)
    home.client.jobs.cancel(home.jobs["stopped"])
    for name in ("released_grpo", "released_mlm"):
        home.client.jobs.pause(home.jobs[name], release=True)
    for name in ("stopped", "released_grpo", "released_mlm"):
        last = "stopped" if name == "stopped" else "paused"
        wait_until(partial(home.has, name, last), timeout_s=60)

    home.make("held_dpo", "dpo", epochs=4)
    wait_until(lambda: home.has("held_dpo", "checkpoint"), timeout_s=60)
    home.client.jobs.pause(home.jobs["held_dpo"])
    wait_until(lambda: home.has("held_dpo", "paused"), timeout_s=60)

    interrupted: dict[str, tuple[str, dict[str, Any]]] = {
        "replay": ("grpo", {"epochs": 5, **REPLAY}),
        "lora": ("grpo", {"epochs": 3, "lora": 2, "beta": 0.05}),
        "ranks": ("grpo", {"epochs": 3, "processes": 2}),
        "sft": ("sft", {"epochs": 5}),
        "dpo": ("dpo", {"epochs": 3}),
        "mlm": ("mlm", {"steps": 30}),
    }
    for name, (kind, options) in interrupted.items():
        home.freeze(home.make(name, kind, **options), 18 if "replay" in options else 6)

    given: dict[str, Any] = {"sweep": {"learning_rate": ["1e-3", "1e-2"]}, "halving": 2}
    with contextlib.chdir(PROJECT):
        home.jobs["sweep"] = home.client.groups.submit_sweep("sft", {**SFT, "epochs": 6}, given)
        stages = [
            {"name": "good", "epochs": 4, "learning_rate": 3e-2},
            {"name": "broken", "epochs": 4, "learning_rate": 0.5},
            {"name": "last", "epochs": 2, "learning_rate": 1e-3, "gate": False},
        ]
        gate = {**EVAL, "samples": 30, "most_samples": 30}
        gate.pop("model")
        values = {**SFT, "samples": 24}
        values.pop("eval_samples")
        home.jobs["curriculum"] = home.client.groups.submit_curriculum(
            "sft", values, {"stages": stages, "gate": gate}
        )
    freeze_groups(home)

    GATE.touch()
    home.make("eval", "eval", reward=["rewards:gated"])
    rows = home.rundir("eval").path / "rows.jsonl"
    wait_until(lambda: rows.exists() and len(rows.read_bytes().splitlines()) >= 5, timeout_s=60)

    for kind in ("grpo", "sft"):
        home.make(f"queued_{kind}", kind)
    home.make("deferred", "mlm", after="mlm")
    home.make("canceled", "grpo")
    home.client.jobs.cancel(home.jobs["canceled"])
    home.make("queued_eval", "eval", samples=6)


def freeze_groups(home: Maker) -> None:
    """Suspend a survivor of the sweep after its rung, and the curriculum's second stage."""

    def survivor() -> str | None:
        found = home.client.groups.sweep(home.jobs["sweep"])
        kept = [point for decision in found["decisions"] for point in decision["kept"]]
        return found["points"][kept[0]]["jobs"][0]["id"] if kept else None

    def second_stage() -> str | None:
        attempts = home.client.groups.curriculum(home.jobs["curriculum"])["attempts"]
        return attempts[1]["job"] if len(attempts) > 1 else None

    one: str = wait_until(survivor, timeout_s=90)
    step = home.client.groups.sweep(home.jobs["sweep"])["rungs"][0] + 3
    home.freeze(one, step)
    home.freeze(wait_until(second_stage, timeout_s=90), 3)


def make_cloud(home: Maker) -> None:
    """Make the jobs of the home with runs in a bucket."""
    home.start()
    home.make("cloud_finished", "dpo")
    home.wait(home.jobs["cloud_finished"])
    home.make("fetched", "grpo", epochs=5, **REPLAY)
    home.make("local", "sft", epochs=5)
    remote = home.client.remote
    assert remote is not None
    for name, step in (("local", 6), ("fetched", 18)):
        home.freeze(home.jobs[name], step)
    for name in ("local", "fetched"):
        wait_until(partial(has_stored, home, name, 6), timeout_s=60)
    home.make("cloud_queued", "mlm")


def has_stored(home: Maker, name: str, step: int) -> bool:
    """Whether a checkpoint of this step, or of a later one, is in the bucket."""
    from warmd.daemon.store import index

    remote = home.client.remote
    assert remote is not None
    return max(index.read(remote.bucket, home.jobs[name]).checkpoints(), default=0) >= step


def pack(target: str) -> None:
    """Write what a test needs, without what names this machine, to a tar file."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.name.endswith("/__pycache__"):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(target, "w:xz", preset=9) as file:
        for folder in sorted(ORIGINAL.iterdir()):
            file.add(folder, folder.name, filter=anonymous)


def finish(home: Maker) -> dict[str, Any]:
    """Let this version finish all; return the outcomes and keep the weights."""
    home.start()
    found = home.finish_all()
    for name, job_id in found["weights"].items():
        shutil.copy(home.weights(job_id), EXPECTED / f"{name}.safetensors")
    home.stop()
    home.client.close()
    return found


def check(home: Maker) -> None:
    """Refuse jobs whose results later corrections change, such as completions of a single token."""
    for name in home.jobs.keys() - GROUPS:
        resumed = False
        replayed = {False: 0, True: 0}  # before and after the interruption
        for event in home.logged(name):
            assert event["type"] not in ("truncated", "warning", "reward_failed"), (name, event)
            resumed |= event["type"] == "begin" and bool(event.get("resumed_from"))
            if event["type"] == "begin":
                assert event["compute"]["instructions"] == "AVX2", event
                assert event.get("gemm", "onednn") == "onednn", event  # faster than COMPATIBLE
            if event["type"] == "lengths":
                assert event["truncated"] == event["dropped"] == 0, (name, event)
            if event["type"] == "step":
                replayed[resumed] += event.get("replayed", 0)
        log = PROJECT / f"{name}.rewards.jsonl"
        lines = log.read_bytes().splitlines() if log.exists() else []
        texts = [json.loads(line)["completion"] for line in lines]
        assert all(texts), name  # a completion without text is only the end token
        if name in ("replay", "released_grpo", "fetched"):
            assert replayed[True], (name, replayed)  # of what the checkpoint has, too
            assert len({len(text) for text in texts}) > 4


def main() -> None:
    """Make the homes and their archive; print its size."""
    target = Path(sys.argv[1]).absolute()
    shutil.rmtree(ORIGINAL, ignore_errors=True)
    make_project()
    (PROJECT / "jobs.json").write_text("{}")
    with s3_server() as server:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.proxy.port}"
        home, cloud = Maker(ORIGINAL), Maker(ORIGINAL, "cloud")
        try:
            for one, make in ((home, make_local), (cloud, make_cloud)):
                make(one)
                one.cut_power()
                one.note()
            shutil.rmtree(cloud.home.runs / cloud.jobs["fetched"])
            save_bucket(server, ORIGINAL / "bucket")
            GATE.unlink()
            for lock in ORIGINAL.glob("*/runs/*/lock"):  # pid and boot id of a horse that has ended
                lock.write_bytes(b"")
            for name in ("home", "cloud"):
                for folder in ("logs", "sockets"):
                    shutil.rmtree(ORIGINAL / name / folder)
            original = Path(f"{ORIGINAL}.made")
            shutil.rmtree(original, ignore_errors=True)
            shutil.copytree(ORIGINAL, original, symlinks=True)
            EXPECTED.mkdir()
            outcomes = {}
            for name in ("home", "cloud"):
                old = Maker(ORIGINAL, name)
                outcomes[name] = finish(old)
                check(old)
            document = {**processor_sums.here(), "outcomes": outcomes}
            (EXPECTED / "expected.json").write_text(json.dumps(document, indent=1) + "\n")
            shutil.move(EXPECTED, original / "expected")
            shutil.rmtree(ORIGINAL)
            original.rename(ORIGINAL)
        finally:
            home.close()
            cloud.close()
    pack(str(target))
    sys.stdout.write(f"{target}: {os.path.getsize(target)} bytes\n")


if __name__ == "__main__":
    main()
