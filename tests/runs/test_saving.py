"""Saving concurrently with the training: the file has the state at the start of the save."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import xxhash
from needs import needs
from safetensors.torch import load, load_file

from warmd.daemon.runs import directio
from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.daemon.runs.directio import DirectFile
from warmd.jobs.training.live_tensors import LiveTensors
from warmd.jobs.training.snapshot import TokenizerFiles, write_safetensors

MEGABYTE = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 8 * MEGABYTE, 8 * MEGABYTE + 1, 20_000_000])
def test_a_direct_file_holds_what_was_written_and_knows_its_checksum(tmp_path, size):
    content = np.random.default_rng(size).bytes(size)
    with DirectFile(tmp_path / "file") as file:
        for begin in range(0, size, 3_000_001):  # across the blocks' boundaries
            file.write(content[begin : begin + 3_000_001])
    assert (tmp_path / "file").read_bytes() == content
    assert file.size_bytes == size
    assert file.checksum == xxhash.xxh3_128_hexdigest(content)


def test_a_direct_file_works_without_direct_writes():
    path = Path(f"/dev/shm/warmd-test-{os.getpid()}")  # a tmpfs
    needs(path.parent.is_dir(), "a tmpfs at /dev/shm")
    try:
        with DirectFile(path) as file:
            file.write(b"weights" * 1000)
        assert path.read_bytes() == b"weights" * 1000
    finally:
        path.unlink()


def test_a_file_is_written_through_the_page_cache_if_direct_io_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(directio, "_ALIGNMENT", 1)  # less than any disk requires
    content = np.random.default_rng(0).bytes(8 * MEGABYTE + 7001)
    with DirectFile(tmp_path / "file") as file:
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content


class SlowFile:
    """A sink that waits for the test before every write but the first."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def write(self, data: Any, /) -> int:
        if self.begun.is_set():
            self.go_on.wait(10)
        self.begun.set()
        self.content += memoryview(data).tobytes()
        return len(data)

    def flush(self) -> None: ...

    def __enter__(self) -> SlowFile:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_tensors_that_training_overwrites_during_a_save_are_written_as_they_were():
    tensors = {name: torch.randn(3 * MEGABYTE) for name in "abc"}
    tensors |= {"flat": torch.randn(100)}
    views = {"v0": tensors["flat"][:40], "v1": tensors["flat"][40:]}
    expected = {name: tensor.clone() for name, tensor in {**tensors, **views}.items()}
    del tensors["flat"], expected["flat"]
    live = LiveTensors([*tensors.values(), *views.values()])
    file = SlowFile()

    def write() -> None:
        write_safetensors(live.sink(file), {**tensors, **views}, {"format": "pt"})
        live.end()

    writer = threading.Thread(target=write)
    writer.start()
    assert file.begun.wait(10)
    # The header is written; the duration of the rest is unknown.
    releaser = threading.Thread(target=live.release)
    releaser.start()
    file.go_on.set()  # the writer holds the lock while it waits
    releaser.join(10)
    for tensor in (*tensors.values(), *views.values()):
        tensor.zero_()
    writer.join(10)
    header = int.from_bytes(file.content[:8], "little")
    assert header % 8 == 0
    found = load(bytes(file.content))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_an_update_waits_for_a_save_that_is_nearly_done():
    weights = torch.ones(MEGABYTE)
    live = LiveTensors([weights])
    file = SlowFile()
    file.go_on.set()
    write_safetensors(live.sink(file), {"weights": weights}, {})
    threading.Timer(0.1, live.end).start()
    live.release()
    weights.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_our_safetensors_are_read_by_the_library(tmp_path, dtype):
    tensors = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "scalar": torch.tensor(3).to(dtype),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.empty(0, 4, dtype=dtype),
    }
    with DirectFile(tmp_path / "file.safetensors") as file:
        write_safetensors(LiveTensors(tensors.values()).sink(file), tensors, {"format": "pt"})
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_tokenizer_is_written_identically_every_time(tmp_path):
    files = TokenizerFiles(tiny.tokenizer())
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        files.write(tmp_path / name)
    written = {
        name: {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("first", "second")
    }
    assert written["first"] == written["second"]
    assert "tokenizer.json" in written["first"]


def test_a_failed_save_reports_why_and_keeps_the_previous_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)

    def prepare(content: bytes) -> Any:
        def write_small(staging: Any) -> Any:
            def write() -> None:
                with staging.open("weights") as file:
                    file.write(content)

            return write

        return write_small

    good = checkpoints.save(1, prepare(b"a" * 1000), about={"metrics": {"loss": 1.0}})
    saved = good.outcome(patience_s=None)
    assert saved is not None
    assert (saved.error, saved.path) == (None, tmp_path / "checkpoint-1")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as on a full disk
    try:
        failed = checkpoints.save(2, prepare(b"a" * 9 * MEGABYTE), about={})
        outcome = failed.outcome(patience_s=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert outcome is not None
    place = tmp_path / "checkpoint-2"
    assert outcome.error == f"OSError: [Errno 27] File too large: '{place}'"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert checkpoints.latest() == tmp_path / "checkpoint-1"
    assert checkpoints.about(tmp_path / "checkpoint-1")["metrics"] == {"loss": 1.0}


@pytest.mark.parametrize(
    ("lower_is_better", "kept"), [(False, [2, 4]), (True, [3, 4])], ids=["highest", "lowest"]
)
def test_the_best_checkpoint_is_kept_in_addition_to_the_newest(tmp_path, lower_is_better, kept):
    checkpoints = Checkpoints(tmp_path, keep=1, best=("score", lower_is_better))
    for step, score in enumerate([5.0, 9.0, 1.0, 5.0], start=1):
        with checkpoints.commit(step, {"metrics": {"score": score}}):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{n}" for n in kept]
