"""`warmd checkpoints`: list, verify, prune and export."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from breadth import mostly_slow
from daemons import Daemon
from flips import flip
from gguf_models import make
from llama_child import LlamaCpp, install
from shell import Done, warmd
from terminal import seen_on_a_terminal
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import wait_until

from warmd.daemon.runs.checkpoints import Checkpoints, verify
from warmd.daemon.runs.weights import STATE_FILES
from warmd.jobs.training import snapshot


class Job:
    """A finished job of 6 steps with checkpoints 2, 4 and 6."""

    def __init__(self, daemon: Daemon) -> None:
        self.home = daemon.home.path
        # The reward falls from step to step: checkpoint 2 is the best.
        self.id = daemon.submit("behaviours:tires", keep_best="reward")
        daemon.wait(self.id)
        self.rundir = daemon.client.rundir(self.id)

    def checkpoints(self, what: str, *words: str) -> Done:
        return warmd("checkpoints", what, self.id, *words, home=self.home)

    @property
    def steps(self) -> list[int]:
        return [
            int(path.name.split("-")[1]) for path in Checkpoints(self.rundir.checkpoints).list()
        ]

    def path(self, step: int) -> Path:
        return self.rundir.checkpoints / f"checkpoint-{step}"


@pytest.fixture
def job(shared_daemon: Daemon) -> Job:
    return Job(shared_daemon)


@pytest.fixture(scope="module")
def one_job(shared_daemon: Daemon) -> Iterator[Job]:
    """One for all the tests that change nothing."""
    made = Job(shared_daemon)
    before = changed(made)
    yield made
    assert changed(made) == before


def changed(job: Job) -> dict[Path, int]:
    """File -> modification time, without the lock, which readers take too."""
    files = (path for path in job.rundir.path.rglob("*") if path.name != "lock")
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_list_shows_steps_sizes_metrics_and_the_best_one(one_job):
    done = one_job.checkpoints("list")
    lines = done.out.splitlines()
    assert lines[0].split() == ["STEP", "SIZE", "SAVED", "AGE", "STATE", "METRICS"]
    assert [line.split("kB")[0].split()[:-1] for line in lines[1:]] == [["best", "2"], ["4"], ["6"]]
    assert "loss " in lines[1]
    assert str(one_job.rundir.checkpoints) in done.err
    rows = one_job.checkpoints("list", "--json").objects
    assert [(row["step"], row["best"], row["error"]) for row in rows] == [
        (2, True, None),
        (4, False, None),
        (6, False, None),
    ]
    for row in rows:
        files = [path.stat().st_size for path in one_job.path(row["step"]).iterdir()]
        assert row["bytes"] == sum(files)
        assert row["metrics"]["learning_rate"] > 0
        assert row["saved_at"] > 1.7e9


def test_verify_reads_all_checkpoints_and_names_the_damaged_file(job):
    assert job.checkpoints("verify").out.splitlines() == [
        f"checkpoint-{step}  whole" for step in (2, 4, 6)
    ]
    flip(job.path(4) / "optimizer.pt")
    done = job.checkpoints("verify")
    assert done.code == 1
    assert done.out.splitlines()[1] == (
        "checkpoint-4  damaged  checkpoint-4: optimizer.pt does not match its checksum"
    )
    assert job.checkpoints("verify", "--step", "6").code == 0
    rows = job.checkpoints("verify", "--json").objects
    assert [(row["step"], row["state"]) for row in rows] == [
        (2, "whole"),
        (4, "damaged"),
        (6, "whole"),
    ]
    assert job.checkpoints("verify", "--step", "5").is_refusal(2)


@pytest.mark.slow
def test_an_unreadable_manifest_is_shown_in_the_list(job):
    flip(job.path(4) / "manifest.json")
    lines = job.checkpoints("list").out.splitlines()
    assert "damaged" in lines[2]
    assert "manifest.json" in lines[2]


@pytest.mark.slow
def test_verify_shows_its_progress_on_a_terminal(one_job):
    seen = seen_on_a_terminal("checkpoints", "verify", one_job.id, WARMD_HOME=str(one_job.home))
    assert "reading " in seen
    assert "100%" in seen


def test_prune_without_yes_only_lists_what_it_would_remove(one_job):
    done = one_job.checkpoints("prune", "--keep", "1")
    assert done.code == 0
    assert done.out.split()[0] == "checkpoint-4"  # 2 is the best, 6 the newest
    assert len(done.out.splitlines()) == 1
    assert "would free" in done.err
    assert "--keep 1 --yes" in done.err
    assert one_job.steps == [2, 4, 6]
    assert one_job.checkpoints("prune").err == "nothing to prune\n"


def test_prune_frees_the_announced_size(job):
    [said] = job.checkpoints("prune", "--keep", "1", "--json").objects
    [done] = job.checkpoints("prune", "--keep", "1", "--yes", "--json").objects
    assert said == {"step": 4, "bytes": done["bytes"], "removed": False}
    assert done["removed"] is True
    assert job.steps == [2, 6]


def test_prune_never_removes_the_latest_undamaged_checkpoint(job):
    flip(job.path(6) / "model.safetensors")
    flip(job.path(4) / "rng_state.pth")
    assert job.checkpoints("prune", "--keep", "1", "--yes").code == 0
    assert job.steps == [2]
    verify(job.path(2))
    flip(job.path(2) / "scheduler.pt")
    refusal = job.checkpoints("prune", "--keep", "1", "--yes")
    assert refusal.is_refusal(2)
    assert "none that is undamaged" in refusal.err
    assert job.steps == [2]


@pytest.mark.slow
def test_prune_does_not_count_files_shared_with_the_final_model(job):
    shared = job.rundir.path / "model" / "model.safetensors"
    assert shared.samefile(job.path(6) / "model.safetensors")
    flip(job.path(6) / "rng_state.pth")
    [six] = job.checkpoints("prune", "--keep", "1", "--json").objects
    assert six["step"] == 6
    state = [path for path in job.path(6).iterdir() if path.name in (*STATE_FILES, "manifest.json")]
    assert six["bytes"] == sum(path.stat().st_size for path in state)


def test_prune_refuses_a_running_job(shared_daemon):
    gate = shared_daemon.folder / "gate"
    gate.touch()
    calls = shared_daemon.folder / "calls"
    calls.unlink(missing_ok=True)
    job_id = shared_daemon.submit(reward="behaviours:gated")
    wait_until(lambda: shared_daemon.events(job_id, "step"))
    wait_until(lambda: Checkpoints(shared_daemon.client.rundir(job_id).checkpoints).list())
    refusal = warmd("checkpoints", "prune", job_id, "--yes", home=shared_daemon.home.path)
    gate.unlink()
    assert refusal.is_refusal(2)
    assert "is running: stop it first" in refusal.err
    assert shared_daemon.wait(job_id)["status"] == "finished"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_export_opens_in_transformers_and_holds_no_training_state(one_job, tmp_path):
    done = one_job.checkpoints("export", str(tmp_path / "model"))
    assert done.out == f"{tmp_path / 'model'}\n"
    assert names(tmp_path / "model") == names(one_job.rundir.path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.num_parameters() > 0
    assert names(tmp_path) == {"model"}


@pytest.mark.slow
def test_an_export_of_a_step_shares_no_files_with_the_job(job, tmp_path):
    weights = (job.path(4) / "model.safetensors").read_bytes()
    [row] = job.checkpoints("export", str(tmp_path / "four"), "--step", "4", "--json").objects
    assert row["from"] == f"{job.id}@4"
    assert row["bytes"] == sum(path.stat().st_size for path in (tmp_path / "four").iterdir())
    exported = tmp_path / "four" / "model.safetensors"
    assert exported.read_bytes() == weights
    flip(exported)
    verify(job.path(4))
    job.checkpoints("prune", "--keep", "1", "--yes")
    assert exported.is_file()


def test_an_export_with_the_optimizer_has_all_of_the_checkpoint(one_job, tmp_path):
    one_job.checkpoints("export", str(tmp_path / "all"), "--with-optimizer")
    assert names(tmp_path / "all") == names(one_job.path(6)) - {"manifest.json"}
    assert names(tmp_path / "all") >= set(STATE_FILES)


def test_a_gguf_export_without_its_package_says_what_to_install(one_job, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    done = one_job.checkpoints("export", str(tmp_path / "x"), "--gguf", "f16")
    assert done.is_refusal(2)
    assert done.err == "Error: gguf: needs the package gguf: pip install 'warmd[gguf]'\n"
    done = one_job.checkpoints("export", str(tmp_path / "x"), "--gguf", "q5_k")
    assert "gguf: must be one of f32, f16, bf16, q8_0, q4_0, got 'q5_k'" in done.err
    assert not names(tmp_path)


@pytest.mark.nightly(part="oracles", catches="an export for llama.cpp that is not whole")
def test_a_gguf_export_has_a_file_and_a_modelfile(job, tmp_path, monkeypatch):
    install(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    refused = job.checkpoints("export", str(tmp_path / "x"), "--gguf", "f16")
    assert "tokenizer.json: model.type must be BPE for llama.cpp, got WordLevel" in refused.err
    assert names(tmp_path) == {"packages"}
    shutil.rmtree(job.rundir.path / "model")
    model = make(job.rundir.path / "model", "qwen2", "qwen2")
    done = job.checkpoints("export", str(tmp_path / "x"), "--gguf", "f32")
    assert "text: the tokenizer normalizes it to NFC, llama.cpp does not" in done.err
    assert names(tmp_path / "x") == {"model-f32.gguf", "Modelfile"}
    with LlamaCpp(tmp_path / "packages", tmp_path / "x" / "model-f32.gguf") as llama:
        [token] = llama.next([5, 6, 7]).log_probabilities
    assert token == int(model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())


def test_the_state_files_are_those_that_a_checkpoint_has():
    assert set(snapshot.STATE_FILES) == set(STATE_FILES)


def test_a_failed_export_leaves_no_files(job, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").touch()
    for dest in ("there", "no/such/place"):
        refusal = job.checkpoints("export", str(tmp_path / dest))
        assert refusal.is_refusal(2)
        assert refusal.err.startswith("Error: dest: must be")
    assert job.checkpoints("export", str(tmp_path / "x"), "--step", "3").is_refusal(2)
    flip(job.path(4) / "model.safetensors")
    refusal = job.checkpoints("export", str(tmp_path / "x"), "--step", "4")
    assert refusal.is_refusal(1)
    assert "model.safetensors" in refusal.err
    assert names(tmp_path) == {"there"}
    assert names(tmp_path / "there") == {"mine.txt"}
    (tmp_path / "empty").mkdir()
    assert job.checkpoints("export", str(tmp_path / "empty")).code == 0


@pytest.mark.parametrize(
    "words", mostly_slow([("list",), ("verify",), ("prune",), ("export", "dest")], but=[("list",)])
)
def test_an_unknown_job_and_one_without_checkpoints_are_refused(shared_daemon, words):
    what, *rest = words
    home = shared_daemon.home.path
    assert warmd("checkpoints", what, "grpo-20200101-000000-aaaa", *rest, home=home).is_refusal(2)
    job_id = shared_daemon.submit(samples=1, save_every="9m")
    shared_daemon.wait(job_id)
    rundir = shared_daemon.client.rundir(job_id)
    shutil.rmtree(rundir.checkpoints)
    (rundir.path / "result.json").unlink()
    done = warmd("checkpoints", what, job_id, *rest, home=home)
    assert done.out == ""
    assert ("nothing to" in done.err) if what in ("list", "prune") else done.is_refusal(2)
