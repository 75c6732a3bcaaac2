"""Source pages leave a process once packed copies are read instead; no value is ever lost."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make, prompt
from needs import needs

from warmd.daemon.fork.held_files import _detach
from warmd.jobs.compute import native, onednn, source_pages
from warmd.jobs.compute.linear_forms import UnpackedLinear
from warmd.jobs.compute.linears import LinearBuilder, innermost, served_precision

PAGE = mmap.PAGESIZE
COUNT = 64 * PAGE // 8  # int64 numbers
# 32 MB of weights, of which the tied head has 20.
SIZES = {
    "vocab_size": 20_000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
# Prints, for each precision, what stays of the mapped file at three times, and two comparisons.
SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
from transformers import AutoConfig
from warmd.jobs.bench.model import tokenizer
from warmd.jobs.bench.works import Shape
from warmd.jobs.compute import fused, linear_forms, linears
from warmd.jobs.compute.levels import MANY_ROWS, levels
from warmd.jobs.context import WarmModel
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.parts import Part
from warmd.jobs.models.pretrained import load

# Kernels that never read the weights in place, even if others were measured to be faster.
ours = replace(levels(), float32="warmd", max_rows=MANY_ROWS, tiled_rows=MANY_ROWS)
for module in (fused, linear_forms, linears):
    module.levels = lambda: ours
folder, ids = Path(sys.argv[1]), json.loads(sys.argv[2])


def resident():
    found, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_of_file = line.endswith("model.safetensors")
        elif name == "Rss:" and is_of_file:
            found += 1024 * int(values[0])
    return found


def logits(decoder):
    kv = decoder.new(len(ids) + 1)
    prefill = decoder.forward([Part(kv, ids, True, wants_all_logits=True)])
    return torch.cat([prefill, decoder.forward([Part(kv, [3], True)])])


def settled(runner):
    while runner.idle_step():
        pass
    return runner


@torch.inference_mode()
def main():
    config = AutoConfig.from_pretrained(folder)
    model = load("causal-lm", folder, config=config, dtype=torch.float32).model.eval()
    words = tokenizer(Shape(layers=1, vocab_size=config.vocab_size))
    warm = WarmModel(name="m", path=folder, model=model, tokenizer=words)
    for precision in ("int8", "native"):
        expected = model(torch.tensor([ids])).logits
        kept = logits(settled(Decoder(model, precision=precision)))
        before = resident()
        runner, _ = Engine(warm, precision=precision)._make_runner()
        after = resident()
        is_same = torch.equal(logits(settled(runner)), kept)
        at_end = resident()
        is_read_again = torch.equal(model(torch.tensor([ids])).logits, expected)
        print(json.dumps([runner.precision, before, after, at_end, is_same, is_read_again]))


main()
"""


@pytest.mark.slow
def test_the_engines_source_pages_are_gone_and_its_logits_the_same(tmp_path: Path):
    needs(sys.platform == "linux", "Linux")
    needs(native.is_available(), "numba and PyTorch's OpenMP")
    make("Qwen2", tie_word_embeddings=True, **SIZES).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(prompt(40))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        precision, before, after, at_end, is_same, is_read_again = json.loads(line)
        assert before > 0.5 * size  # the kernel may drop some under load
        if precision != "native":  # packed at once
            assert after < 0.1 * size
        assert at_end < 0.1 * size  # norms, and rows of the embedding that were read
        assert is_same
        assert is_read_again


def mapped(
    path: Path, values: torch.Tensor | None = None, *, access: int = mmap.ACCESS_COPY
) -> torch.Tensor:
    """Values (default: 0, 1, ...) in a file's mapping, private unless `access` says else."""
    values = torch.arange(COUNT) if values is None else values
    values.numpy().tofile(path)
    with open(path, "r+b") as file:
        x = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=access), dtype=values.dtype)
    assert torch.equal(x, values.flatten())  # reads every page
    return x


@pytest.fixture
def x(tmp_path: Path) -> torch.Tensor:
    needs(sys.platform == "linux", "Linux")
    return mapped(tmp_path / "numbers")


def test_pages_of_a_file_are_released_and_read_again(x: torch.Tensor):
    expected = x.clone()
    assert source_pages.release([x]) == x.nbytes
    assert source_pages.release([x]) == 0
    assert torch.equal(x, expected)
    assert source_pages.release([x]) == x.nbytes


def test_pages_that_a_weight_shares_with_its_neighbors_stay(x: torch.Tensor):
    numbers = PAGE // 8
    assert source_pages.release([x[1 : 3 * numbers], x[4 * numbers : 5 * numbers - 1]]) == 2 * PAGE


def test_pages_that_were_written_to_stay(x: torch.Tensor):
    x[3 * PAGE // 8] = -1
    expected = x.clone()
    assert source_pages.release([x]) == x.nbytes - PAGE
    assert torch.equal(x, expected)


def test_anonymous_memory_stays():
    x = torch.arange(COUNT)
    assert source_pages.release([x]) == 0
    assert torch.equal(x, torch.arange(COUNT))


def test_what_was_written_to_a_shared_mapping_is_not_lost(tmp_path: Path):
    needs(sys.platform == "linux", "Linux")
    x = mapped(tmp_path / "numbers", access=mmap.ACCESS_WRITE)
    x.neg_()
    source_pages.release([x])
    assert torch.equal(x, -torch.arange(COUNT))


def test_a_copy_in_the_place_of_a_file_that_is_written_to_stays(x: torch.Tensor, tmp_path: Path):
    expected = x.clone()
    _detach(x.data_ptr(), x.nbytes)  # as HeldFiles.copy_wanted does
    (tmp_path / "numbers").write_bytes(bytes(x.nbytes))
    assert source_pages.release([x]) == 0
    assert torch.equal(x, expected)


def test_another_process_with_the_same_mapping_keeps_what_it_has(x: torch.Tensor):
    expected = x.clone()
    x[0] = -1
    pid = os.fork()
    if pid == 0:
        x[PAGE // 8] = -2
        is_right = source_pages.release([x]) == x.nbytes - 2 * PAGE
        is_right &= [x[0], x[PAGE // 8], x[-1]] == [-1, -2, COUNT - 1]
        os._exit(not is_right)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert x[0] == -1
    assert torch.equal(x[1:], expected[1:])


def test_nothing_is_released_while_mappings_are_replaced(x: torch.Tensor):
    thread = threading.Thread(target=source_pages.release, args=([x],))
    with source_pages.MAPPINGS:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    thread.join()


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_without_a_page_map_nothing_is_released(x, platform, monkeypatch: pytest.MonkeyPatch):
    def missing(*_: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(source_pages, "open", missing, raising=False)
    assert source_pages.release([x]) == 0


def linear_on(path: Path) -> torch.nn.Linear:
    """A layer without bias whose weight is mapped from a file."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(128, 512, bias=False)
    values = torch.randn(linear.weight.shape, generator=generator)
    linear.weight = torch.nn.Parameter(mapped(path, values).view_as(values))
    return linear


@pytest.mark.parametrize("releases", [True, False])
@torch.inference_mode()
def test_the_source_of_a_packed_layer_is_released_on_request(tmp_path: Path, releases: bool):
    needs(sys.platform == "linux", "Linux")
    needs(served_precision("int8", torch.ones(1)) == "int8", "int8 kernels")
    linear = linear_on(tmp_path / "weights")
    layer = LinearBuilder("int8", releases_sources=releases).fused([linear], patience=0)
    assert source_pages.release([linear.weight]) == (0 if releases else linear.weight.nbytes)
    x = torch.randn(3, 128)
    again = LinearBuilder("int8").fused([linear], patience=0)
    assert torch.equal(layer(x), again(x))


@torch.inference_mode()
def test_layers_that_read_their_weights_in_place_keep_them(tmp_path: Path):
    needs(sys.platform == "linux", "Linux")
    needs(onednn.is_available(), "oneDNN in torch")
    linear = linear_on(tmp_path / "weights")
    linears = LinearBuilder("native", spare_bytes=2**60, releases_sources=True)
    layer = linears.fused([linear], patience=0)
    layer(torch.zeros(1, 128))
    assert isinstance(innermost(layer), UnpackedLinear)
    assert source_pages.release([linear.weight]) == linear.weight.nbytes  # it was still there
