"""`--init-from`: a new job from the weights of another, which may be removed afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
from breadth import mostly_slow
from daemons import Daemon
from flips import flip
from safetensors.torch import load_file
from shell import Done, warmd
from transformers import AutoModelForMaskedLM, BertConfig

from warmd.daemon.lifecycle.view import JobFilter
from warmd.jobs.ids import by_time

SUPPORT = Path(__file__).parents[1] / "support"  # where `behaviours` is


class Origin:
    """A finished GRPO job of 6 steps with checkpoints 2, 4 and 6."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.id = daemon.submit(keep=100)
        daemon.wait(self.id)
        self.rundir = daemon.client.rundir(self.id)

    def branch(self, at: str = "", *words: str, kind: str = "grpo") -> Done:
        options = {
            "--dataset": str(self.daemon.folder / "rows.jsonl"),
            "--samples": "2",
            "--num-generations": "2",
            "--max-completion-length": "4",
            "--reward": "behaviours:length",
            "--learning-rate": "1e-12",
        }
        typed = [word for pair in options.items() for word in pair] if kind == "grpo" else []
        words = ("submit", kind, "--init-from", self.id + at, *typed, *words)
        return warmd(*words, home=self.daemon.home.path, folder=SUPPORT)


@pytest.fixture(scope="module")
def origin(shared_daemon: Daemon) -> Origin:
    return Origin(shared_daemon)


def finished(daemon: Daemon, done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    job = daemon.wait(done.out.strip())
    assert job["status"] == "finished", job["error"]
    return job


def test_a_branch_begins_at_step_0_with_the_weights_of_the_checkpoint(shared_daemon, origin):
    job = finished(shared_daemon, origin.branch("@4"))
    assert job["init_from"] == job["model"] == f"{origin.id}@4"
    assert [event["step"] for event in shared_daemon.events(job["id"], "step")] == [1, 2]
    four, six = (
        load_file(origin.rundir.checkpoints / f"checkpoint-{n}" / "model.safetensors")
        for n in (4, 6)
    )
    weights = load_file(Path(job["run_dir"]) / "model" / "model.safetensors")
    # At a learning rate of 1e-12 they end as they began.
    assert all((weights[name] - four[name]).abs().max() < 1e-9 for name in four)
    assert any((weights[name] - six[name]).abs().max() > 1e-6 for name in six)
    shown = warmd("show", job["id"], home=shared_daemon.home.path).out
    assert f"init_from     {origin.id}@4\n" in shown


@pytest.mark.parametrize(
    "words",
    mostly_slow([("submit", "infer"), ("submit", "eval"), ("run",)], but=[("submit", "infer")]),
)
def test_a_checkpoint_is_a_model_wherever_one_is_named(shared_daemon, origin, words):
    what = ["1 and 2", "--max-tokens", "2"]
    if "eval" in words:
        what = ["--samples", "2", "--max-tokens", "2"]
    home = shared_daemon.home.path
    done = warmd(*words, *what, "--model", f"{origin.id}@4", "--json", home=home)
    assert done.code == 0, done.err
    if words[0] == "run":
        return
    document = orjson.loads(done.out)
    job = shared_daemon.wait(document["job"] if "job" in document else document["id"])
    assert (job["status"], job["model"]) == ("finished", f"{origin.id}@4"), job["error"]
    missing = warmd(*words, *what, "--model", f"{origin.id}@5", home=home)
    assert missing.code != 0
    assert "(2, 4, 6), got" in missing.err


@pytest.mark.slow
def test_a_branch_by_model_keeps_the_weights_of_a_pruned_checkpoint(shared_daemon):
    origin = Origin(shared_daemon)
    job_id = shared_daemon.submit(model=f"{origin.id}@4")
    shared_daemon.wait(job_id)
    job = shared_daemon.client.jobs.get(job_id)
    assert (job["status"], job["init_from"]) == ("finished", f"{origin.id}@4"), job["error"]
    init = Path(job["run_dir"]) / "init" / "model.safetensors"
    assert init.samefile(origin.rundir.checkpoints / "checkpoint-4" / "model.safetensors")


def test_without_a_step_a_branch_begins_with_the_final_model(shared_daemon, origin):
    job = finished(shared_daemon, origin.branch("", "--beta", "0.1"))
    assert job["init_from"] == origin.id
    init = Path(job["run_dir"]) / "init" / "model.safetensors"
    assert init.samefile(origin.rundir.path / "model" / "model.safetensors")
    # The reference is the weights that it began with: no distance to them yet.
    assert shared_daemon.events(job["id"], "step")[0]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_the_latest_job_is_the_latest_that_trained_the_same_type_of_model(shared_daemon, origin):
    answer = warmd("submit", "infer", "1+1=", "--model", "tiny", home=shared_daemon.home.path)
    shared_daemon.wait(answer.out.strip())
    assert shared_daemon.client.find("-") == answer.out.strip()
    latest = max(
        (
            job["id"]
            for job in shared_daemon.client.jobs.all(JobFilter(kinds=("grpo", "sft", "dpo")))
        ),
        key=by_time,
    )
    typed = ("submit", "grpo", "--samples", "2", "--dry-run", "--json", "--init-from", "-")
    done = warmd(*typed, home=shared_daemon.home.path)
    assert done.objects[0]["init_from"] == latest


def test_without_a_job_that_trained_the_same_type_of_model_the_latest_is_refused(tmp_path):
    refusal = warmd("submit", "sft", "--init-from", "-", "--dataset", "x", home=tmp_path)
    assert refusal.is_refusal(2)
    assert "job: none of grpo, sft, dpo in" in refusal.err


def test_two_branches_of_different_steps_have_their_own_weights(shared_daemon, origin):
    both = [origin.branch(at) for at in ("@4", "@6")]
    jobs = [finished(shared_daemon, done) for done in both]
    weights = {(Path(j["run_dir"]) / "model" / "model.safetensors").read_bytes() for j in jobs}
    assert len(weights) == 2


@pytest.mark.slow
def test_a_branch_does_not_need_the_files_of_its_origin(shared_daemon):
    origin = Origin(shared_daemon)
    done = origin.branch("@2", "--steps", "1")
    job = finished(shared_daemon, done)
    shutil.rmtree(origin.rundir.path)
    resumed = warmd("resume", job["id"], "--steps", "3", home=shared_daemon.home.path)
    assert resumed.out == f"{job['id']} queued\n"
    assert shared_daemon.wait(job["id"])["result"]["steps"] == 3


@pytest.mark.slow
def test_a_trained_masked_model_can_be_trained_further_by_mlm(shared_daemon, tmp_path):
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    BertConfig(**sizes, intermediate_size=32, max_position_embeddings=64).save_pretrained(tmp_path)
    texts = tmp_path / "texts.jsonl"
    texts.write_bytes(b"\n".join(orjson.dumps({"text": f"one {n} two"}) for n in range(40)))
    typed = ("--objective", "mlm", "--data", str(texts), "--seq-len", "16", "--batch-size", "2")
    common = (*typed, "--eval-every", "0")
    first = warmd(
        *("submit", "mlm", "--architecture", str(tmp_path), "--vocab-size", "300", "--steps", "4"),
        *(*common, "--save-every", "2"),
        home=shared_daemon.home.path,
    )
    job_id = finished(shared_daemon, first)["id"]
    second = warmd(
        *("submit", "mlm", "--init-from", f"{job_id}@2", "--steps", "1", *common),
        *("--learning-rate", "1e-12"),
        home=shared_daemon.home.path,
    )
    job = finished(shared_daemon, second)
    checkpoint = Path(shared_daemon.client.rundir(job_id).checkpoints / "checkpoint-2")
    began, ended = (
        AutoModelForMaskedLM.from_pretrained(folder).state_dict()
        for folder in (checkpoint, Path(job["run_dir"]) / "model")
    )
    assert all((ended[name] - began[name]).abs().max() < 1e-9 for name in began)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("@3", "checkpoint: must be a step of {id} (2, 4, 6), got 3"),
        ("@", "init_from: must be JOB or JOB@STEP, got '{id}@'"),
        ("@last", "init_from: must be JOB or JOB@STEP, got '{id}@last'"),
        ("@-4", "init_from: must be JOB or JOB@STEP"),
        ("x", "job: no job '{id}x'"),
    ],
)
def test_missing_initial_weights_are_refused_by_name(origin, at, message):
    runs = sorted(origin.rundir.path.parent.iterdir())
    refusal = origin.branch(at)
    assert refusal.is_refusal(2)
    assert refusal.err.startswith("Error: " + message.format(id=origin.id))
    assert sorted(origin.rundir.path.parent.iterdir()) == runs


def test_init_from_together_with_a_model_is_refused(origin):
    refusal = origin.branch("", "--model", "tiny")
    assert refusal.is_refusal(2)
    assert refusal.err == "Error: init_from: must not be given together with --model\n"


def test_a_damaged_checkpoint_is_refused(shared_daemon):
    origin = Origin(shared_daemon)
    flip(origin.rundir.checkpoints / "checkpoint-2" / "model.safetensors")
    refusal = origin.branch("@2")
    assert refusal.is_refusal(1)
    assert "checkpoint-2: model.safetensors does not match its checksum" in refusal.err


@pytest.mark.slow
def test_a_job_without_a_final_model_names_its_checkpoints(shared_daemon, origin):
    with_steps = shared_daemon.submit(reward="behaviours:raises", retries=0)
    shared_daemon.wait(with_steps)
    rundir = shared_daemon.client.rundir(with_steps)
    (rundir.path / "result.json").unlink()
    refusal = warmd("submit", "grpo", "--init-from", with_steps, home=shared_daemon.home.path)
    assert refusal.is_refusal(2)
    assert "no final model yet: name a checkpoint as JOB@STEP, of 2, 4, 6" in refusal.err


def test_a_dry_run_checks_init_from_and_creates_nothing(origin):
    runs = sorted(origin.rundir.path.parent.iterdir())
    done = origin.branch("@4", "--dry-run", "--json")
    assert done.objects[0]["init_from"] == f"{origin.id}@4"
    lines = origin.branch("@4", "--dry-run").out.splitlines()
    assert lines[0].endswith(f"--config with --init-from {origin.id}@4 reads it back")
    assert not any(line.startswith("model:") for line in lines)
    assert sorted(origin.rundir.path.parent.iterdir()) == runs


def test_kinds_that_do_not_train_have_no_init_from(shared_daemon):
    done = warmd("submit", "encode", "--init-from", "x", home=shared_daemon.home.path)
    assert done.is_refusal(2)
    assert "No such option" in done.err


@pytest.mark.slow
def test_sft_dpo_grpo_and_lora_continue_from_one_another(shared_daemon, tmp_path):
    home = shared_daemon.home.path
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "0"} for n in range(6)]
    pairs.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    texts = tmp_path / "texts.jsonl"
    texts.write_bytes(b"\n".join(orjson.dumps({"text": row["prompt"]}) for row in rows))
    grpo = ("grpo", "--samples", "2", "--num-generations", "2", "--max-completion-length", "4")
    jobs = [
        finished(shared_daemon, warmd("submit", *words, home=home))
        for words in (
            ("sft", "--model", "tiny", "--dataset", str(texts)),
            ("dpo", "--init-from", "-", "--dataset", str(pairs)),
            (*grpo, "--init-from", "-"),
            (*grpo, "--init-from", "-", "--lora", "2"),
        )
    ]
    origins = [job["init_from"] for job in jobs]
    assert origins == [None, *(job["id"] for job in jobs[:-1])]
    weights = [Path(job["run_dir"]) / "model" / "model.safetensors" for job in jobs[:3]]
    begun = [Path(job["run_dir"]) / "init" / "model.safetensors" for job in jobs[1:]]
    assert all(one.samefile(other) for one, other in zip(weights, begun, strict=True))
    assert (Path(jobs[3]["run_dir"]) / "model" / "adapter_model.safetensors").is_file()
