"""Every kind of training and its precisions as jobs of a daemon, and that each resumes exactly."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from own_daemon import own_daemon

from warmd.configs.precision import PRECISIONS
from warmd.daemon.client.client import Client
from warmd.jobs import spec_class

from . import DEVICE, fact

SHORT = {"steps": 6, "save_every": "2", "learning_rate": 1e-4}
BERT = {
    **{"model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": 300},
}


def jobs(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield description, kind and options of each job; files are made in `folder`."""
    sums = [(f"{n}+{2 * n}=", str(3 * n), str(3 * n + 1)) for n in range(32)]
    answers = _write(folder / "sft.jsonl", [{"prompt": p, "completion": a} for p, a, _ in sums])
    pairs = [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in sums]
    preferences = _write(folder / "dpo.jsonl", pairs)
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"{n} and {2 * n} are {3 * n}, as anyone knows" for n in range(99)))
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_bytes(orjson.dumps(BERT))
    masked = {"data": str(text), "architecture": str(folder / "bert"), "seq_len": 32}
    yield "SFT", "sft", {"dataset": answers}
    yield "SFT, adapter", "sft", {"dataset": answers, "lora": 4, "lora_dropout": 0.1}
    yield "DPO", "dpo", {"dataset": preferences}
    yield "MLM", "mlm", {**masked, "objective": "mlm", "tokenizer": "train", "vocab_size": 300}
    yield "GRPO, KL and replay", "grpo", {"beta": 0.1, "replay": 2, "num_iterations": 2}
    yield "GRPO, adapter", "grpo", {"lora": 4}


def check(client: Client, folder: Path) -> None:
    """Train each of them, and verify its resume; answer requests of other kinds."""
    for name, kind, options in jobs(folder):
        events = run(client, kind, {**SHORT, **options})
        devices = {event["device"] for event in events if event["type"] == "started"}
        fact(f"{name}: computes on", sorted(devices), DEVICE, devices == {DEVICE})
        ended(name, events)
        if events[-1]["type"] == "finished":
            verify(client, name, events[-1]["job"])
    for precision in PRECISIONS:
        options = {"prompt": "17+58=", "precision": precision, "max_tokens": 8}
        ended(f"request in {precision}", run(client, "infer", options))
    ended("evaluation", run(client, "eval", {"samples": 8, "max_tokens": 8}))


def run(client: Client, kind: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a job, with its id."""
    job_id = client.jobs.submit(spec_class(kind).parse(options))
    return [event | {"job": job_id} for event in client.jobs.follow(job_id) if event is not None]


def ended(name: str, events: list[dict[str, Any]]) -> None:
    """Report whether a job has finished, or why not."""
    last = events[-1]
    found = str(last.get("error") or last.get("message") or last["type"])[:200]
    fact(f"{name}: ended", found, "finished", last["type"] == "finished")


def verify(client: Client, name: str, job_id: str) -> None:
    """Report whether a resume of the job is exact."""
    command = [sys.executable, "-m", "warmd.cli", "--home", str(client.config.home)]
    done = subprocess.run(
        [*command, "checkpoints", "verify", "--resume", job_id, "--steps", "4"],
        capture_output=True,
        text=True,
    )
    verdict = (done.stdout or done.stderr).strip().splitlines()[-1]
    fact(f"{name}: checkpoints verify --resume", verdict, "is exact", done.returncode == 0)


def _write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return str(path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, own_daemon("demo=builtin:demo") as own:
        check(own, Path(made))
