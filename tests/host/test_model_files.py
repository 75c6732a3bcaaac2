"""Weights that change on disk: running jobs keep the old ones, later jobs get the new ones."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import tiny
from daemons import Daemon
from needs import needs
from waiting import wait_until

from warmd.configs.config import ModelConfig
from warmd.daemon.fork.models import WarmModels
from warmd.daemon.host import model_files
from warmd.jobs import spec_class
from warmd.jobs.errors import JobFailed, SpecError

IS_LINUX = sys.platform == "linux"


def save_model(folder: Path, seed: int) -> Path:
    tiny.model(seed).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", 1)


def test_every_change_of_a_file_shows_in_the_fingerprint(folder: Path, tmp_path: Path):
    seen = [model_files.fingerprint(folder)]
    assert model_files.fingerprint(folder) == seen[0]
    weights = folder / "model.safetensors"
    old = weights.stat()
    with open(weights, "r+b") as file:  # the same size, and the same time of modification
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    os.utime(weights, ns=(old.st_atime_ns, old.st_mtime_ns))
    seen.append(model_files.fingerprint(folder))
    save_model(folder, 2)
    seen.append(model_files.fingerprint(folder))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    seen.append(model_files.fingerprint(folder))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "additional_chat_templates" / "gone.jinja").symlink_to(folder / "nothing")
    seen.append(model_files.fingerprint(folder))
    assert len(set(seen)) == len(seen)
    (folder / "training.log").write_text("no model is read from it")
    assert model_files.fingerprint(folder) == seen[-1]


def test_a_digest_is_of_the_content_and_computed_once(folder: Path, tmp_path: Path):
    kept = tmp_path / "kept"
    found = model_files.digest(folder, kept)
    assert found.startswith("xxh3:")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert model_files.digest(copy, None) == found
    (remembered,) = kept.iterdir()
    remembered.write_bytes(orjson.dumps({**orjson.loads(remembered.read_bytes()), "digest": "it"}))
    assert model_files.digest(folder, kept) == "it"
    remembered.write_bytes(b"spoilt")
    assert model_files.digest(folder, kept) == found
    save_model(folder, 2)
    assert model_files.digest(folder, kept) != found


def test_the_files_of_an_adapter_include_its_base(folder: Path, tmp_path: Path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    named = {"peft_type": "LORA", "base_model_name_or_path": str(folder)}
    (adapter / "adapter_config.json").write_bytes(orjson.dumps(named))
    before = model_files.fingerprint(adapter), model_files.digest(adapter, None)
    assert folder / "model.safetensors" in model_files.weights(adapter)
    save_model(folder, 2)
    after = model_files.fingerprint(adapter), model_files.digest(adapter, None)
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.slow
def test_a_model_whose_files_have_changed_is_loaded_again(folder: Path):
    models = WarmModels(10**9)
    config = ModelConfig(name="m", path=str(folder))
    first = models.ensure(config, folder, in_use=())
    assert models.ensure(config, folder, in_use=()) is first
    save_model(folder, 2)
    second = models.ensure(config, folder, in_use=("m",))  # jobs that use it keep the first
    assert (first.is_reloaded, second.is_reloaded) == (False, True)
    assert first.weights != second.weights
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(JobFailed, match="cannot be loaded"):
        models.ensure(config, folder, in_use=())
    assert not models.loaded  # removed weights are not used any more


@pytest.mark.slow
def test_a_model_whose_files_have_the_same_content_is_not_loaded_again(folder: Path, tmp_path):
    models = WarmModels(10**9)
    config = ModelConfig(name="m", path=str(folder))
    first = models.ensure(config, folder, in_use=())
    weights = folder / "model.safetensors"
    for change in (
        lambda: (tmp_path / "link").hardlink_to(weights),  # as --init-from does
        lambda: weights.chmod(0o600),
        lambda: Path(shutil.copy(weights, tmp_path / "copy")).replace(weights),
    ):
        before = model_files.fingerprint(folder)
        change()
        assert model_files.fingerprint(folder) != before
        assert models.ensure(config, folder, in_use=()) is first
    assert not first.is_reloaded


# Prints the sum of mapped weights before and after their file is overwritten.
MAPPED = """
import signal, sys
from pathlib import Path
import torch
from safetensors import safe_open
from warmd.daemon.fork.held_files import HeldFiles
path = Path(sys.argv[1])
with safe_open(path, "pt") as file:
    weights = file.get_tensor("w")
weights[0] = 2.0  # a private page
held = HeldFiles([path])
signal.signal(signal.SIGIO, lambda *_: held.copy_wanted())
print(weights.sum().item(), held.is_wanted(), flush=True)
sys.stdin.readline()
weights[1] = 3.0
print(weights.sum().item(), held.is_wanted(), flush=True)
"""


CUT = pytest.mark.nightly(
    part="daemons", catches="weights that are lost when their mapped file is cut off"
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["overwritten", pytest.param("cut off", marks=CUT)])
def test_mapped_weights_do_not_change_when_their_file_is_written_to(tmp_path: Path, how: str):
    needs(IS_LINUX, "Linux")
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(100_000)}, path)
    with subprocess.Popen(
        [sys.executable, "-c", MAPPED, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "100001.0 False\n"
        with open(path, "wb" if how == "cut off" else "r+b") as file:  # waits for the copy
            file.write(bytes(1000 if how == "cut off" else path.stat().st_size))
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "100003.0 False\n"
    assert process.returncode == 0


# Cuts off one file after the other: the second while the first is being copied.
CUT_MEANWHILE = """
import signal, subprocess, sys, time
from pathlib import Path
import torch
from safetensors import safe_open
from warmd.daemon.fork import held_files
paths, weights = list(map(Path, sys.argv[1:])), []
for path in paths:
    with safe_open(path, "pt") as file:
        weights.append(file.get_tensor("w"))
held = held_files.HeldFiles(paths)
signal.signal(signal.SIGIO, lambda *_: held.copy_wanted())
detach, begun, writers = held_files._detach, [], []
def cut(path):
    begun.append(path)  # the signal may arrive before Popen returns
    writers.append(subprocess.Popen(["/bin/sh", "-c", ': > "$0"', str(path)]))
def detach_later(*area):
    if len(begun) == 1:
        cut(paths[1])
        while not held_files._is_wanted(list(held._held)[-1]):
            time.sleep(0.01)
        time.sleep(0.1)  # its signal arrives here
    return detach(*area)
held_files._detach = detach_later
cut(paths[0])
while len(writers) < 2 or held._held:
    time.sleep(0.01)
print([one.wait() for one in writers], [one.sum().item() for one in weights])
"""


@pytest.mark.slow
def test_files_that_are_written_to_one_after_the_other_are_all_copied(tmp_path: Path):
    needs(IS_LINUX, "Linux")
    import torch
    from safetensors.torch import save_file

    paths = [tmp_path / name for name in ("one.safetensors", "other.safetensors")]
    for path in paths:
        save_file({"w": torch.ones(100_000)}, path)
    command = [sys.executable, "-c", CUT_MEANWHILE, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[0, 0] [100000.0, 100000.0]\n"


@pytest.mark.slow
def test_a_training_keeps_its_initial_weights_when_the_file_changes(sturdy: Daemon, folder: Path):
    needs(IS_LINUX, "Linux")
    undisturbed = sturdy.submit("behaviours:gated", model=str(folder))
    assert sturdy.wait(undisturbed)["status"] == "finished"
    (sturdy.folder / "calls").unlink()
    (sturdy.folder / "gate").touch()
    job_id = sturdy.submit("behaviours:gated", model=str(folder))
    wait_until(lambda: sturdy.events(job_id, "step"))
    (folder / "model.safetensors").write_bytes(b"shorter")
    (sturdy.folder / "gate").unlink()
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"]) == ("finished", 1)
    trained = [
        hashlib.sha256((sturdy.home.runs / name / "model" / "model.safetensors").read_bytes())
        for name in (undisturbed, job_id)
    ]
    assert trained[0].digest() == trained[1].digest()
    started = [sturdy.events(name, "started")[0]["weights"] for name in (undisturbed, job_id)]
    assert started[0] == started[1] == job["result"]["weights"]
    with pytest.raises(SpecError, match=r"model\.safetensors: must be a safetensors file"):
        sturdy.submit(model=str(folder))


def answer(daemon: Daemon, folder: Path) -> dict[str, object]:
    spec = spec_class("infer").parse(
        {"prompt": "1 and 2", "model": str(folder), "max_tokens": 16, "temperature": 0}
    )
    job_id = daemon.client.jobs.submit(spec)
    job = daemon.wait(job_id)
    assert job["status"] == "finished", job["error"]
    text = "".join(event["text"] for event in daemon.events(job_id, "text"))
    warned = [event["message"] for event in daemon.events(job_id, "warning")]
    return {"text": text, "weights": job["result"]["weights"]["digest"], "warned": warned}


@pytest.mark.slow
def test_the_next_answer_uses_the_current_weights_on_disk(shared_daemon: Daemon, folder: Path):
    first = answer(shared_daemon, folder)
    assert answer(shared_daemon, folder) == first
    save_model(folder, 7)
    second = answer(shared_daemon, folder)
    assert second["weights"] != first["weights"]
    assert second["text"] != first["text"]
    assert second["warned"] == ["model: its files have changed, so it was loaded again"]
    save_model(folder, 1)
    third = answer(shared_daemon, folder)
    assert (third["weights"], third["text"]) == (first["weights"], first["text"])
    assert answer(shared_daemon, folder)["warned"] == []
    with open(folder / "model.safetensors", "r+b") as file:  # in place, while it is warm
        content = (save_model(folder.parent / "other", 7) / "model.safetensors").read_bytes()
        file.write(content)
    fourth = answer(shared_daemon, folder)
    assert (fourth["weights"], fourth["text"]) == (second["weights"], second["text"])
