"""The zygote: one thread, no computation, weights that no job can change, loading of models."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import tiny
import torch
from daemons import Daemon
from needs import needs
from safetensors.torch import load_file
from shell import Done, warmd
from waiting import wait_until

from warmd.configs.config import ModelConfig
from warmd.daemon.client import control
from warmd.daemon.fork.reading import stored_bytes
from warmd.daemon.host.warm_set import known_models, on_demand_models
from warmd.jobs.errors import SpecError, WarmdError

MakeDaemon = Callable[..., Daemon]
KERNEL = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])

# Prints how many of many products of oneDNN are wrong.
MULTIPLYING = """
import os
from warmd.daemon.fork import libraries
os.environ.update(libraries.ENVIRONMENT)
import torch
torch.set_num_threads(2)
x, weight = torch.randn(3, 128), torch.randn(192, 128)
expected = (x.double() @ weight.t().double()).float()
wrong = 0
for _ in range(200):
    y = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    wrong += not torch.allclose(y, expected, atol=1e-3)
print(wrong)
"""


@pytest.mark.slow
def test_openmp_settings_do_not_change_results():
    settings = {"OMP_DYNAMIC": "true", "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MULTIPLYING],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "0\n"


@pytest.mark.slow
def test_the_zygote_never_starts_openmp_threads(shared_daemon: Daemon):
    shared_daemon.wait(shared_daemon.submit())
    threads = Path("/proc", str(shared_daemon.pid("zygote")), "task").iterdir()
    names = {(thread / "comm").read_text().strip() for thread in threads}
    # pyarrow's allocator keeps a thread that sleeps; it hung no forked child in any trial.
    assert all(name.startswith("python") or name == "jemalloc_bg_thd" for name in names)


def test_the_base_model_generates_the_same_text_after_a_job_trained_from_it(shared_daemon: Daemon):
    first = shared_daemon.submit()
    second = shared_daemon.submit()
    for job_id in (first, second):
        assert shared_daemon.wait(job_id)["status"] == "finished"
    models = [shared_daemon.home.runs / job_id / "model" for job_id in (first, second)]
    digests = {
        hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest() for model in models
    }
    assert len(digests) == 1  # the second began where the first did


def save_model(folder: Path, seed: int) -> Path:
    tiny.model(seed).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_loading_and_unloading_models_does_not_affect_a_running_job(
    shared_daemon: Daemon, tmp_path: Path
):
    daemon = shared_daemon
    other = ModelConfig(name="other", path=str(save_model(tmp_path / "other", 1)))
    job_id = daemon.submit(samples=30)
    loaded = control.load_model(daemon.config, other)
    assert loaded["parameters"] > 0
    assert {model["name"] for model in control.models(daemon.config)} >= {"tiny", "other"}
    control.unload_model(daemon.config, "other")
    assert "other" not in {model["name"] for model in control.models(daemon.config)}
    job = daemon.wait(job_id)
    assert (job["status"], job["execution"]) == ("finished", 1)
    with pytest.raises(WarmdError, match="not warm"):
        control.unload_model(daemon.config, "other")


def is_settled(daemon: Daemon) -> bool:
    settled: bool = daemon.status()["zygote"].get("settled", False)
    return settled


def huge_part(daemon: Daemon) -> float:
    """How much of the zygote's anonymous memory lies in huge pages."""
    lines = Path(f"/proc/{daemon.pid('zygote')}/smaps_rollup").read_text().splitlines()
    kb = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return kb["AnonHugePages:"] / kb["Anonymous:"]


@pytest.mark.nightly(part="storms", catches="memory that stays in small pages after many forks")
def test_the_zygote_moves_memory_to_huge_pages_again_after_many_forks(sturdy: Daemon):
    for job_id in [sturdy.submit(samples=1, save_every=100) for _ in range(60)]:
        assert sturdy.wait(job_id)["status"] == "finished"
    wait_until(lambda: is_settled(sturdy), timeout_s=60)
    assert huge_part(sturdy) > 0.6


@pytest.mark.slow
def test_the_zygote_moves_no_memory_that_a_horse_shares(sturdy: Daemon, tmp_path: Path):
    wait_until(lambda: is_settled(sturdy), timeout_s=60)
    (sturdy.folder / "gate").touch()
    job_id = sturdy.submit("behaviours:gated")
    wait_until(lambda: sturdy.events(job_id, "step"))
    late = ModelConfig(name="late", path=str(save_model(tmp_path / "late", 3)))
    loaded = control.load_model(sturdy.config, late)
    wait_until(lambda: time.time() > loaded["loaded_at"] + 1)  # it moves after a tenth of one
    assert not is_settled(sturdy)
    (sturdy.folder / "gate").unlink()
    assert sturdy.wait(job_id)["status"] == "finished"
    wait_until(lambda: is_settled(sturdy), timeout_s=60)
    control.unload_model(sturdy.config, "late")


def test_a_model_that_a_job_had_loaded_is_warm_everywhere_until_it_is_unloaded(
    shared_daemon: Daemon, tmp_path: Path
):
    daemon = shared_daemon
    folder = save_model(tmp_path / "cold", 2)
    job = daemon.wait(daemon.submit(model=str(folder)))
    assert job["status"] == "finished", job["error"]
    url = daemon.status()["http"]["url"]

    def listed() -> list[bool]:
        """Whether `models`, `status` and HTTP have it."""
        lists = (control.models(daemon.config), daemon.status()["models"])
        names = [{model["name"] for model in found} for found in lists]
        names.append({model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]})
        return ["cold" in found for found in names]

    def run() -> Done:
        words = ("run", "a", "--model", "cold", "--max-tokens", "1")
        return warmd(*words, home=daemon.home.path, folder=tmp_path.parent)

    def ask() -> int:
        body = {"model": "cold", "prompt": "a", "max_tokens": 1}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code

    wait_until(lambda: all(listed()))
    assert on_demand_models(daemon.home)["cold"].path == str(folder)
    assert (run().code, ask()) == (0, 200)
    control.unload_model(daemon.config, "cold")
    wait_until(lambda: not any(listed()))
    refused = run()
    assert refused.is_refusal(2)
    assert "must be a warm model" in refused.err
    assert ask() == 404


@pytest.mark.slow
def test_loaded_models_are_loaded_again_after_a_restart_except_broken_ones(
    sturdy: Daemon, tmp_path: Path
):
    daemon = sturdy
    for name, is_kept in (("kept", True), ("gone", True), ("spoilt", True), ("once", False)):
        folder = save_model(tmp_path / name, 1)
        control.load_model(daemon.config, ModelConfig(name=name, path=str(folder)), is_kept=is_kept)
    shutil.rmtree(tmp_path / "gone")
    (tmp_path / "spoilt" / "config.json").write_text("{")
    daemon.stop()
    problems = {p["name"]: p["problem"] for p in daemon.start() if "problem" in p}
    assert "no such folder" in problems.pop("gone")
    assert problems.pop("spoilt").startswith("model: spoilt cannot be loaded from ")
    assert not problems
    assert control.unload_model(daemon.config, "spoilt")["unloaded"] == "spoilt"
    assert "spoilt" not in known_models(daemon.home)
    assert {model["name"] for model in control.models(daemon.config)} == {"tiny", "kept"}
    assert daemon.wait(daemon.submit(model="kept"))["status"] == "finished"
    control.unload_model(daemon.config, "kept")


def test_load_refuses_a_folder_without_a_model(shared_daemon: Daemon, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(WarmdError, match="cannot be loaded"):
        control.load_model(shared_daemon.config, ModelConfig(name="bad", path=str(tmp_path)))
    with pytest.raises(WarmdError, match="no such folder"):
        control.load_model(shared_daemon.config, ModelConfig(name="bad", path="/nonexistent"))


def test_the_code_of_a_model_is_never_run(shared_daemon: Daemon, tmp_path: Path, tiny_model: Path):
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    for folder, changes in {"known": {}, "unknown": {"model_type": "own"}}.items():
        shutil.copytree(tiny_model, tmp_path / folder)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        config |= {"auto_map": names, **changes}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        (tmp_path / folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    known, unknown = (
        ModelConfig(name=name, path=str(tmp_path / name)) for name in ("known", "unknown")
    )
    control.load_model(shared_daemon.config, known)  # by the class of transformers
    control.unload_model(shared_daemon.config, "known")
    with pytest.raises(
        WarmdError, match=r"unknown cannot be loaded from .*: must have a model_type"
    ):
        control.load_model(shared_daemon.config, unknown)
    with pytest.raises(SpecError, match=r"^model: must have a model_type .* got 'own'.*auto_map"):
        shared_daemon.submit(model=str(tmp_path / "unknown"))
    assert not (tmp_path / "ran").exists()


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, fuse: Path) -> None:
        self.fuse = fuse

    def __reduce__(self) -> Any:
        return open, (str(self.fuse), "w")


def test_pickled_weights_are_read_without_running_code(
    shared_daemon: Daemon, tmp_path: Path, tiny_model: Path
):
    weights = load_file(tiny_model / "model.safetensors")
    for name, content in {
        "plain": weights,
        "bomb": {**weights, "x": Bomb(tmp_path / "ran")},
    }.items():
        shutil.copytree(tiny_model, tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
        torch.save(content, tmp_path / name / "pytorch_model.bin")
    plain, bomb = (ModelConfig(name=name, path=str(tmp_path / name)) for name in ("plain", "bomb"))
    # They count in the memory budget, which is checked before they are read.
    assert stored_bytes(tmp_path / "plain", "auto") > sum(w.nbytes for w in weights.values())
    loaded = control.load_model(shared_daemon.config, plain)
    assert loaded["parameters"] == sum(weight.numel() for weight in weights.values())
    control.unload_model(shared_daemon.config, "plain")
    with pytest.raises(WarmdError, match=r"model: bomb cannot be loaded from"):
        control.load_model(shared_daemon.config, bomb)
    assert not (tmp_path / "ran").exists()


@pytest.mark.nightly(
    part="daemons", catches="a daemon that loads models beyond its budget of memory"
)
def test_a_model_beyond_the_memory_budget_is_refused_with_both_sizes(
    make_daemon: MakeDaemon, tmp_path: Path, tiny_model: Path
):
    size = sum(path.stat().st_size for path in tiny_model.glob("*.safetensors"))
    daemon = make_daemon(memory_budget_bytes=int(size * 2.5))
    daemon.start()
    load: Any = lambda name, seed: control.load_model(  # noqa: E731
        daemon.config, ModelConfig(name=name, path=str(save_model(tmp_path / name, seed)))
    )
    load("second", 1)
    load("third", 2)
    # The least recently used made room.
    assert [model["name"] for model in control.models(daemon.config)] == ["second", "third"]
    big = tiny.model(0, positions=64)
    big.resize_token_embeddings(20_000)
    big.save_pretrained(tmp_path / "big")
    tiny.tokenizer().save_pretrained(tmp_path / "big")
    with pytest.raises(WarmdError, match=r"big needs .* of the memory budget of"):
        control.load_model(daemon.config, ModelConfig(name="big", path=str(tmp_path / "big")))


@pytest.mark.nightly(
    part="daemons", catches="a restarted zygote that lacks a model, or keeps all in small pages"
)
def test_a_restarted_zygote_loads_the_same_models_and_moves_them_to_huge_pages(
    sturdy: Daemon, tmp_path: Path
):
    daemon = sturdy
    other = ModelConfig(name="other", path=str(save_model(tmp_path / "other", 1)))
    control.load_model(daemon.config, other)
    old = psutil.Process(daemon.pid("zygote"))
    os.kill(old.pid, 9)
    old.wait(10)
    wait_until(lambda: daemon.is_settled() and is_settled(daemon), timeout_s=60)
    assert [model["name"] for model in control.models(daemon.config)] == ["tiny", "other"]
    control.unload_model(daemon.config, "other")
    needs(sys.platform == "linux" and KERNEL >= (6, 1), "Linux 6.1")
    assert huge_part(daemon) > 0.6
    assert daemon.wait(daemon.submit())["status"] == "finished"
