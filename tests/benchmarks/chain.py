#!/usr/bin/env python3
"""SFT, DPO, GRPO and LoRA GRPO, each from the previous model: uninterrupted, killed, over HTTP.

    python tests/benchmarks/chain.py MODEL DATASET [--seed 0]

MODEL is the folder of a small model, DATASET a JSONL file of question/answer records (GSM8K). SFT
trains on 200 of them; DPO prefers their answers to those of the SFT model; GRPO continues with the
result, first with all weights, then with an adapter. Each job runs twice: once straight, and once
with its work horse killed with SIGKILL and then the whole daemon. Both must agree bit for bit in
the final model, the last checkpoint and the events of all steps. The three methods of OpenAI's API
(supervised, dpo, reinforcement) then train the same chain by OpenAI's client, in OpenAI's file
formats, with validation files and two graders. Exits with 1 unless all of it holds.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import openai
import orjson
from daemons import Daemon
from own_daemon import api_of

from warmd.configs.config import WorkerConfig
from warmd.jobs import spec_class
from warmd.jobs.training.compare import compare_checkpoints, compare_events

NUM_SFT, NUM_PAIRS, NUM_PROMPTS, NUM_HELD_OUT = 200, 96, 48, 16
TEMPLATE = "{question}\nAnswer:"
SFT = {"samples": NUM_SFT, "eval_samples": NUM_HELD_OUT, "save_every": 4}
DPO = {"samples": NUM_PAIRS, "eval_samples": NUM_HELD_OUT, "save_every": 2}
GRPO = {
    **{"samples": NUM_PROMPTS, "eval_samples": NUM_HELD_OUT, "save_every": 2},
    **{"num_generations": 4, "prompts_per_step": 4, "max_completion_length": 32},
}
REWARDS = ("reasoning", "correctness=2")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# A grader in Python is a function of the daemon's own machine, named by the setting http_graders.
GRADER_MODULE = """
def shortness(sample, item):
    return 1 / (1 + len(sample["output_text"]) / 100)
"""

Record = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        chain = Chain(Path(folder), args.model, args.dataset, random.Random(args.seed))
        try:
            chain.daemon.start()
            chain.run()
            chain.run_over_http()
        finally:
            chain.daemon.close()
    log(f"{len(chain.problems)} problems")
    return 1 if chain.problems else 0


def log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Chain:
    """The jobs of one home."""

    def __init__(self, folder: Path, model: Path, dataset: Path, generator: random.Random) -> None:
        self.folder = folder
        self.dataset = dataset
        self.problems: list[str] = []
        self._generator = generator
        (folder / "grading_of_chain.py").write_text(GRADER_MODULE)
        os.environ["PYTHONPATH"] = str(folder)  # of the daemon, which imports the grader
        with dataset.open("rb") as lines:
            self.records: list[Record] = [orjson.loads(line) for line in lines]
        self.daemon = Daemon(
            folder / "home",
            with_chat_template(model, folder / "model"),
            workers=(
                WorkerConfig(name="train-0", queue="train"),
                WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=32),
            ),
            http_port=0,
            http_graders=("grading_of_chain:shortness",),
        )

    # By the client of the command line.

    def run(self) -> None:
        """Train the chain, each job uninterrupted and killed."""
        sft = self._both("sft", "tiny", dataset=self.dataset, template=TEMPLATE, **SFT)
        pairs = self._write("pairs.jsonl", self._pairs(sft))
        dpo = self._both("dpo", sft, dataset=pairs, **DPO)
        rewarded = {"dataset": self.dataset, "template": TEMPLATE, "reward": REWARDS, **GRPO}
        grpo = self._both("grpo", dpo, **rewarded)
        self._both("grpo", grpo, lora=4, **rewarded)

    def _both(self, kind: str, origin: str, **options: Any) -> str:
        """Train uninterrupted and killed, from the result of `origin`; return the uninterrupted
        job."""
        straight = self._submit(kind, origin, options)
        begun = time.monotonic()
        self._finished(straight)
        seconds = time.monotonic() - begun
        killed = self._submit(kind, origin, options)
        self._kill(killed)
        self._finished(killed)
        found = self._differences(straight, killed)
        name = f"{kind} with LoRA" if "lora" in options else kind
        self.problems += [f"{name}: {problem}" for problem in found]
        starts = self.daemon.events(killed, "begin")
        resumes = ", ".join(str(event["resumed_from"]) for event in starts[1:])
        steps = self.daemon.events(straight, "begin")[0]["steps_total"]
        log(
            f"{name}: {steps} steps in {seconds:.1f} s; {len(starts) - 1} kills, resumed from "
            f"{resumes}: {'; '.join(found) or 'equal'}"
        )
        return straight

    def _submit(self, kind: str, origin: str, options: Mapping[str, Any]) -> str:
        values = {name: str(v) if isinstance(v, Path) else v for name, v in options.items()}
        init = None if origin == "tiny" else self.daemon.client.models.weights(origin)
        values["model"] = origin if init is None else init.name
        return self.daemon.client.jobs.submit(spec_class(kind).parse(values), init=init)

    def _finished(self, job_id: str) -> None:
        job = self.daemon.wait(job_id, timeout_s=300)
        if job["status"] != "finished":
            sys.exit(f"{job_id} {job['status']}: {job['error']}")

    def _kill(self, job_id: str) -> None:
        """Kill the horse in the first half of the job, and the daemon in the second."""
        steps = self._await_step(job_id, 1)
        half = steps // 2
        self._await_step(job_id, self._generator.randint(2, half))
        time.sleep(self._generator.uniform(0, 0.2))
        self.daemon.kill("horse")
        self._await_step(job_id, self._generator.randint(half + 1, steps - 2))
        time.sleep(self._generator.uniform(0, 0.2))
        self.daemon.kill_everything()
        self.daemon.start()

    def _await_step(self, job_id: str, step: int) -> int:
        """Wait until a step has been reported; return the number of steps of the job."""
        while not any(e["step"] >= step for e in self.daemon.events(job_id, "step")):
            time.sleep(0.01)
        return int(self.daemon.events(job_id, "begin")[0]["steps_total"])

    def _differences(self, straight: str, killed: str) -> list[str]:
        runs = [self.daemon.client.rundir(job) for job in (straight, killed)]
        found = []
        for part in ("model", "checkpoints"):
            folders = [run.path / part for run in runs]
            if part == "checkpoints":
                folders = [max(f.glob("checkpoint-*"), key=step_of) for f in folders]
            found += [
                f"{part}/{name}: {why}"
                for name, why in compare_checkpoints(*folders).items()
                # An adapter names its base model by path, which is in the run directory.
                if why and not why.startswith("base_model_name_or_path")
            ]
        events = [self.daemon.events(job) for job in (straight, killed)]
        _, difference = compare_events(*events)
        found += [difference] if difference else []
        begins = [event for event in events[1] if event["type"] == "begin"]
        found += [] if len(begins) == 3 else [f"{len(begins) - 1} kills, not 2"]
        steps = [event["step"] for event in events[1] if event["type"] == "step"]
        once = steps == list(range(1, len(steps) + 1))
        return found + ([] if once else ["a step is not reported exactly once"])

    def _pairs(self, model: str) -> list[Record]:
        """Return records that prefer the answers of the dataset to those of a model."""
        records = self.records[: NUM_PAIRS + NUM_HELD_OUT]
        prompts = [TEMPLATE.replace("{question}", record["question"]) for record in records]
        requested = self._write("requests.jsonl", [{"prompt": prompt} for prompt in prompts])
        answers = self.folder / "answers.jsonl"
        spec = spec_class("infer").parse(
            {
                **{"input": str(requested), "output": str(answers), "model": model},
                **{"max_tokens": 40, "seed": 1},
            }
        )
        self._finished(self.daemon.client.jobs.submit(spec))
        done = [orjson.loads(line) for line in answers.read_bytes().splitlines()]
        return [
            {
                "prompt": prompt,
                "chosen": " " + record["answer"],
                "rejected": answer["choices"][0]["text"].rstrip() or " ?",
            }
            for prompt, record, answer in zip(prompts, records, done, strict=True)
        ]

    def _write(self, name: str, records: Iterable[Record]) -> Path:
        path = self.folder / name
        path.write_bytes(lines_of(records))
        return path

    # By OpenAI's client.

    def run_over_http(self) -> None:
        """Train the chain by requests, each from the model that the last one trained."""
        with openai.OpenAI(base_url=api_of(self.daemon.client), api_key="unused") as client:
            rows = self.records[: NUM_PROMPTS + NUM_HELD_OUT]
            model = self._tuned(client, "tiny", "supervised", map(chat_of, rows), n_epochs=1)
            requested = [(row, self._answer(client, model, row)) for row in rows]
            pairs = [preference_of(row, answer) for row, answer in requested]
            model = self._tuned(client, model, "dpo", pairs, n_epochs=1, beta=0.1)
            sizes = {"num_generations": 4, "max_completion_length": 24}
            for grader in graders():
                items = map(item_of, rows)
                model = self._tuned(
                    client, model, "reinforcement", items, grader=grader, n_epochs=1, **sizes
                )
            self._answer(client, model, rows[0])

    def _tuned(
        self,
        client: openai.OpenAI,
        model: str,
        type: str,
        records: Iterable[Record],
        *,
        grader: Record | None = None,
        **hyperparameters: Any,
    ) -> str:
        """Train by one method and wait for the end; return the name of the trained model."""
        rows = list(records)
        train, held_out = (
            client.files.create(file=("rows.jsonl", lines_of(part)), purpose="fine-tune").id
            for part in (rows[:NUM_PROMPTS], rows[NUM_PROMPTS:])
        )
        settings = {"hyperparameters": {"batch_size": 4, **hyperparameters}}
        settings |= {} if grader is None else {"grader": grader}
        method: Any = {"type": type, type: settings}
        begun = time.monotonic()
        job = client.fine_tuning.jobs.create(
            model=model, training_file=train, validation_file=held_out, method=method
        )
        while job.status in ("queued", "running", "validating_files"):
            time.sleep(0.1)
            job = client.fine_tuning.jobs.retrieve(job.id)
        name = type if grader is None else f"{type} by {grader['type']}"
        if job.status != "succeeded" or job.fine_tuned_model is None:
            sys.exit(f"{name} {job.status}: {job.error}")
        events = list(client.fine_tuning.jobs.list_events(job.id, limit=100))
        metrics = [event.data for event in events if event.type == "metrics"]
        checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
        if not (metrics and checkpoints):
            self.problems.append(f"{name}: {len(metrics)} metrics, {len(checkpoints)} checkpoints")
        log(
            f"HTTP, {name}: {time.monotonic() - begun:.1f} s, {len(metrics)} metrics, "
            f"{len(checkpoints)} checkpoints; {events[0].message}"
        )
        return job.fine_tuned_model

    def _answer(self, client: openai.OpenAI, model: str, row: Record) -> str:
        done = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": row["question"]}],
            max_tokens=24,
            seed=1,
        )
        return (done.choices[0].message.content or "").strip() or "?"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def lines_of(records: Iterable[Record]) -> bytes:
    return b"".join(orjson.dumps(record) + b"\n" for record in records)


def with_chat_template(model: Path, folder: Path) -> Path:
    """Copy a model; return the copy, whose tokenizer has a chat template."""
    shutil.copytree(model, folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)  # the model may be read-only
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


# OpenAI's records.


def asked_by_user(row: Record) -> Record:
    return {"role": "user", "content": row["question"]}


def chat_of(row: Record) -> Record:
    """Return a record of the method supervised."""
    answer = {"role": "assistant", "content": row["answer"]}
    return {"messages": [asked_by_user(row), answer]}


def preference_of(row: Record, answer: str) -> Record:
    """Return a record of the method dpo."""
    return {
        "input": {"messages": [asked_by_user(row)]},
        "preferred_output": [{"role": "assistant", "content": row["answer"]}],
        "non_preferred_output": [{"role": "assistant", "content": answer}],
    }


def item_of(row: Record) -> Record:
    """Return a record of the method reinforcement."""
    answer = row["answer"].rpartition("#### ")[2]
    return {"messages": [asked_by_user(row)], "reference_answer": answer}


def graders() -> list[Record]:
    """Return a grader of formulas, and one with a function of this machine."""
    text, reference = "{{sample.output_text}}", "{{item.reference_answer}}"
    contains = {
        **{"type": "string_check", "name": "contains", "operation": "ilike"},
        **{"input": text, "reference": reference},
    }
    similar = {
        **{"type": "text_similarity", "name": "similar", "evaluation_metric": "fuzzy_match"},
        **{"input": text, "reference": reference},
    }
    both = {
        **{"type": "multi", "name": "both", "calculate_output": "contains + similar"},
        "graders": {"contains": contains, "similar": similar},
    }
    short = {"type": "python", "name": "short", "source": "grading_of_chain:shortness"}
    return [both, short]


if __name__ == "__main__":
    sys.exit(main())
