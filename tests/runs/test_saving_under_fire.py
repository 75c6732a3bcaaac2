"""Saves under bad conditions: a slow or full disk, a job that ends before its save."""

from __future__ import annotations

import dataclasses
import errno
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import drill
import pytest
import tiny
from daemons import Daemon
from transformers import AutoTokenizer
from waiting import wait_until

from warmd.configs.config import WorkerConfig
from warmd.daemon.runs import events
from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.daemon.runs.saving import Save
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.training import live_tensors
from warmd.jobs.training.snapshot import TokenizerFiles, link_model

SPEC = GrpoSpec.parse(
    {
        "samples": 6,
        "num_generations": 2,
        "max_completion_length": 4,
        "reward": ["tiny:digit_share"],
        "save_every": 2,
    }
)


class GatedDisk(Checkpoints):
    """Checkpoints that are not written before the gate is open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()

    def save(self, step: int, prepare: Callable[[Any], Callable[[], None]], *, about: Any) -> Save:
        def prepare_slowly(staging: Any) -> Callable[[], None]:
            write = prepare(staging)

            def write_slowly() -> None:
                assert self.gate.wait(20)
                write()

            return write_slowly

        return super().save(step, prepare_slowly, about=about)


class FullDisk(Checkpoints):
    """Checkpoints on a disk without room for another folder."""

    def commit(self, step: int, about: Any = None) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


class DiskThatFillsUp(GatedDisk):
    """Checkpoints that find the disk full when the gate is open."""

    def save(self, step: int, prepare: Callable[[Any], Callable[[], None]], *, about: Any) -> Save:
        def prepare_in_vain(staging: Any) -> Callable[[], None]:
            write = prepare(staging)

            def write_in_vain() -> None:
                write()
                raise OSError(errno.ENOSPC, "No space left on device")

            return write_in_vain

        return super().save(step, prepare_in_vain, about=about)


class HoldAt:
    """A request to pause, from the end of a step on until `over`."""

    def __init__(self, around: tiny.Surroundings, step: int) -> None:
        self.around, self.step, self.over = around, step, threading.Event()

    def is_set(self) -> bool:
        return self.around.last_step >= self.step and not self.over.is_set()


@pytest.mark.slow
def test_a_job_that_is_held_while_a_save_is_in_flight_is_saved_at_its_own_step(tmp_path):
    around = tiny.surroundings(tmp_path)
    disk, pause = GatedDisk(tmp_path / "checkpoints"), HoldAt(around, 3)
    around.ctx = dataclasses.replace(around.ctx, checkpoints=disk, pause=pause)
    saved: list[Path] = []

    def watch() -> None:
        try:
            wait_until(lambda: around.of_type("paused"))  # and the save of step 2 is in flight
            disk.gate.set()
            wait_until((tmp_path / "checkpoints" / "checkpoint-3").exists, timeout_s=10)
            saved.extend(disk.list())
        finally:
            disk.gate.set()
            pause.over.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    run(SPEC, around.ctx)
    watcher.join()
    assert [path.name for path in saved] == ["checkpoint-2", "checkpoint-3"]


def test_a_save_that_cannot_begin_copies_no_weights(tmp_path, monkeypatch):
    copied: list[int] = []
    monkeypatch.setattr(live_tensors._Part, "copy", lambda part: copied.append(part.unread))
    around = tiny.surroundings(tmp_path)
    disk = FullDisk(tmp_path / "checkpoints")
    around.ctx = dataclasses.replace(around.ctx, checkpoints=disk)
    run(SPEC, around.ctx)
    assert [event["step"] for event in around.of_type("save_failed")] == [2, 4, 6]
    assert around.last_step == 6
    assert copied == []


def test_a_job_reports_its_own_error_even_if_the_save_fails_too(tmp_path):
    around = tiny.surroundings(tmp_path)
    disk = DiskThatFillsUp(tmp_path / "checkpoints")

    def emit(type: str, /, *, step: int | None = None, **fields: Any) -> None:
        around.emit(type, step=step, **fields)
        if type == "step" and step == 3:  # the save of step 2 is in flight
            disk.gate.set()
            raise RuntimeError("the first of two troubles")

    around.ctx = dataclasses.replace(around.ctx, checkpoints=disk, emit=emit)
    with pytest.raises(RuntimeError, match="the first of two troubles"):
        run(dataclasses.replace(SPEC, on_save_error="stop"), around.ctx)
    (failed,) = around.of_type("save_failed")
    assert failed["step"] == 2
    assert "No space left" in failed["error"]


def test_a_job_fails_with_its_own_error_even_if_the_report_fails(tmp_path):
    around = tiny.surroundings(tmp_path)
    disk = GatedDisk(tmp_path / "checkpoints")

    def emit(type: str, /, *, step: int | None = None, **fields: Any) -> None:
        around.emit(type, step=step, **fields)
        if type == "step" and step == 3:  # the save of step 2 is in flight
            disk.gate.set()
            raise RuntimeError("the first of two troubles")
        if type == "checkpoint":
            raise OSError(errno.ENOSPC, "No space left on device")

    around.ctx = dataclasses.replace(around.ctx, checkpoints=disk, emit=emit)
    with pytest.raises(RuntimeError, match="the first of two troubles"):
        run(SPEC, around.ctx)
    assert disk.latest() == tmp_path / "checkpoints" / "checkpoint-2"


def test_chat_templates_with_names_are_in_every_checkpoint_and_in_the_final_model(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "tools {{ messages }}"}
    files = TokenizerFiles(tokenizer)
    folders = [tmp_path / name for name in ("first", "second", "final")]
    for folder in folders:
        folder.mkdir()
    for folder in folders[:2]:
        files.write(folder)
    assert link_model(folders[1], folders[2])
    for folder in folders:
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template


def slow_save(seconds: float, staging: Any) -> Callable[[], None]:
    return partial(_write, staging.path, time.monotonic() + seconds)


def _write(folder: Path, due: float) -> None:
    wait_until(lambda: time.monotonic() > due)
    (folder / "weights").write_bytes(b"a")


def test_a_save_in_flight_is_completed_when_its_job_ends(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.settle()
    checkpoints.save(1, partial(slow_save, 0.2), about={})
    checkpoints.settle()
    assert checkpoints.latest() == tmp_path / "checkpoint-1"


@pytest.mark.nightly(part="storms", catches="a save in flight that is lost when its job fails")
def test_a_job_that_fails_after_its_last_step_keeps_the_save_in_flight(
    make_daemon: Callable[..., Daemon], tmp_path: Path
):
    daemon = make_daemon(workers=(WorkerConfig(name="infer-0", queue="infer", isolation="fork"),))
    with drill.installed(tmp_path):
        daemon.start()
        job_id = daemon.client.jobs.submit(drill.DrillSpec.parse({"then": "leave"}))
        assert daemon.wait(job_id)["status"] == "failed"
    latest = Checkpoints(daemon.client.rundir(job_id).checkpoints).latest()
    assert latest is not None
    assert latest.name == "checkpoint-1"


def test_a_save_frees_its_memory_at_its_end(tmp_path):
    freed = threading.Event()

    class Copy:
        def __del__(self) -> None:
            freed.set()

    def prepare(copy: Copy, staging: Any) -> Callable[[], None]:
        def write() -> None:
            assert copy is not None

        return write

    checkpoints = Checkpoints(tmp_path)
    save = checkpoints.save(1, partial(prepare, Copy()), about={})
    assert save.outcome(patience_s=None) is not None
    wait_until(freed.is_set, timeout_s=5)  # while `checkpoints` and `save` are still there


def test_an_event_truncated_by_a_full_disk_does_not_damage_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with events.EventLog(path, execution=1) as log:
        log.emit("begin")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            with pytest.raises(OSError, match=r"File too large.*events.jsonl"):
                log.emit("step", step=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        log.emit("failed", error="disk full")
    assert [(event["seq"], event["type"]) for event in events.read(path)] == [
        (1, "begin"),
        (2, "failed"),
    ]


pytestmark = pytest.mark.usefixtures("like_a_work_horse")
