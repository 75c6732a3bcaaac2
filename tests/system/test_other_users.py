"""Daemons on a machine with other users: attacks by one of them, and the modes of all files."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from getpass import getuser
from pathlib import Path

import dpo_jobs
import mlm_jobs
import pytest
import sft_jobs
from daemons import Daemon
from other_users import OTHER, another_user, as_other, open_to_others

from warmd.configs.config import WorkerConfig
from warmd.daemon.client import control
from warmd.jobs import KINDS, spec_class
from warmd.jobs.compute import cache

pytestmark = pytest.mark.nightly(
    part="homes", catches="a file that other users of the machine can read or replace"
)

WORKERS = (
    WorkerConfig(name="train-0", queue="train", threads=1),
    WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
)


OTHERS = pytest.mark.nightly(
    part="homes", catches="a file or folder that another umask or mode leaves open"
)


@pytest.fixture
def set_umask() -> Iterator[Callable[[int], None]]:
    """Sets the umask for the rest of the test, and for the daemons that it starts."""
    before = os.umask(0o022)
    yield lambda mask: (os.umask(mask), None)[1]
    os.umask(before)


@pytest.mark.parametrize("mask", [0o000, pytest.param(0o022, marks=OTHERS)])
def test_no_other_user_can_use_a_file_of_any_kind_of_job(
    mask: int, make_daemon: Callable[..., Daemon], tmp_path: Path, set_umask: Callable[[int], None]
):
    set_umask(mask)
    daemon = make_daemon(workers=WORKERS, http_port=0)
    daemon.start()
    jobs = {"grpo": daemon.submit(steps=2)}
    mlm_jobs.make_home(tmp_path)
    (tmp_path / "input.jsonl").write_bytes(b'{"prompt": "1+1="}\n')
    for name in ("texts", "sft", "dpo"):
        (tmp_path / name).mkdir()
    (tmp_path / "texts" / "a.txt").write_text("1 and 2")
    model = {"model": "tiny"}
    specs = {
        "sft": sft_jobs.spec(tmp_path / "sft", **model, epochs=1, lora=4),
        "dpo": dpo_jobs.spec(tmp_path / "dpo", **model, epochs=1),
        "mlm": mlm_jobs.text_spec(tmp_path),
        "eval": spec_class("eval").parse({**model, "samples": 2, "max_tokens": 4}),
        "infer": spec_class("infer").parse(
            {
                **model,
                "input": str(tmp_path / "input.jsonl"),
                "output": str(tmp_path / "answers.jsonl"),
                "max_tokens": 4,
            }
        ),
        "encode": spec_class("encode").parse(
            {
                **model,
                "input": str(tmp_path / "texts"),
                "output": str(tmp_path / "vectors.npz"),
                "pooling": "mean",
            }
        ),
    }
    jobs |= {kind: daemon.client.jobs.submit(spec) for kind, spec in specs.items()}
    assert jobs.keys() == KINDS.own.keys()
    for kind, job_id in jobs.items():
        assert daemon.wait(job_id, timeout_s=120)["status"] == "finished", kind
    daemon.stop()
    assert open_to_others(daemon.home.path) == {}
    machine_code = cache.folder()
    assert machine_code is not None
    # Processes of the user, such as this one, add files that others may read, but not change.
    modes = {path: path.lstat().st_mode for path in (machine_code, *machine_code.rglob("*"))}
    assert [path for path, found in modes.items() if found & 0o022] == []
    assert (daemon.home.code_caches / "torchinductor").is_dir()
    for name in ("answers.jsonl", "vectors.npz"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask, name
    calls = daemon.folder / "calls"  # of the user's reward
    assert stat.S_IMODE(calls.stat().st_mode) == 0o666 & ~mask


def test_a_file_in_tmp_does_not_stop_the_daemon(make_daemon: Callable[..., Daemon], monkeypatch):
    another_user()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # set by torch in this process
    monkeypatch.setenv("USER", f"warmd-{os.getpid()}")  # decides the name, as torch makes it
    monkeypatch.setenv("LOGNAME", f"warmd-{os.getpid()}")
    blocked = Path("/tmp") / f"torchinductor_{getuser()}"
    made = as_other("touch", str(blocked))
    assert made.returncode == 0, made.stderr
    try:
        daemon = make_daemon()
        daemon.start()
        job_id = daemon.submit(steps=1)
        assert daemon.wait(job_id)["status"] == "finished"
    finally:
        blocked.unlink()


@pytest.mark.parametrize("mode", [0o777, pytest.param(0o2775, marks=OTHERS)])
def test_a_daemon_starts_in_volumes_that_are_handed_over_wide(
    mode: int, make_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch
):
    """As Kubernetes' emptyDir and fsGroup: of another owner, and everyone or a group may write."""
    another_user()
    daemon = make_daemon()
    home, volume = daemon.home.path, tmp_path / "volume"
    home.mkdir(parents=True)
    volume.mkdir()
    (home / "runs").symlink_to(volume)
    for folder in (home, volume):
        os.chown(folder, OTHER, OTHER)
        folder.chmod(mode)
    monkeypatch.setenv("WARMD_SINGLE_USER", "on")
    daemon.start()
    job_id = daemon.submit(steps=1)
    assert daemon.wait(job_id)["status"] == "finished"
    assert stat.S_IMODE(home.stat().st_mode) == mode
    assert open_to_others(volume / job_id) == {}
    monkeypatch.delenv("WARMD_SINGLE_USER")
    daemon.stop()
    with pytest.raises(Exception, match=r"home: .*belongs to user 54321.*WARMD_SINGLE_USER=on"):
        list(control.start(daemon.config))
