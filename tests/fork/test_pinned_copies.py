"""Copies by several threads: the same bits, whatever the shapes. Pinned only on a GPU."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

from warmd.daemon.fork import pinned_copies
from warmd.daemon.fork.pinned_copies import copy_to
from warmd.daemon.fork.placement import Placement


@pytest.mark.parametrize("num_threads", [1, 3])
def test_copies_have_the_bits_and_shapes_of_the_originals(monkeypatch, num_threads):
    monkeypatch.setattr(pinned_copies, "_PIECE_BYTES", 128)
    torch.manual_seed(0)
    originals = [
        torch.randn(7, 33),
        torch.randn(64, 64).bfloat16(),
        torch.randn(3, 5).t(),
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.arange(1000),
        torch.tensor([True, False]),
    ]
    copies = copy_to(torch.device("cpu"), originals, num_threads=num_threads)
    for original, copied in zip(originals, copies, strict=True):
        assert copied.dtype == original.dtype
        assert torch.equal(copied, original)
        assert copied.data_ptr() != original.data_ptr() or original.numel() == 0


def test_an_error_in_a_thread_is_raised(monkeypatch):
    def fail(*_):
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(pinned_copies, "_Buffer", fail)
    with pytest.raises(MemoryError, match="no pinned memory"):
        copy_to(torch.device("cpu"), [torch.ones(1)], num_threads=2)


def test_tied_weights_stay_tied(tiny_model):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    model.lm_head.weight = model.model.embed_tokens.weight
    weights = Placement("cpu", copy_threads=2)._weights(model)
    copied = copy.deepcopy(model, weights)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert copied.lm_head.weight is not model.lm_head.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(copied.state_dict()[name], weight)


# Most forks of 30 fail without `renew_pool_after_forks`.
FORKS = """
import os, threading, torch
from warmd.jobs.compute.threads import renew_pool_after_forks
renew_pool_after_forks()
torch.set_num_threads(1)
source, target = torch.zeros(1 << 16), torch.zeros(1 << 16)
failed = 0
for _ in range(30):
    pid = os.fork()
    if pid == 0:
        start, errors = threading.Barrier(6), []
        def run():
            start.wait()
            try:
                target.copy_(source)
            except RuntimeError as error:
                errors.append(error)
        threads = [threading.Thread(target=run) for _ in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        os._exit(bool(errors))
    failed += os.waitpid(pid, 0)[1] != 0
print(failed)
"""


@pytest.mark.nightly(
    part="daemons", catches="threads of a fork that fail if they compute first at once"
)
def test_threads_of_a_forked_process_can_compute_first_at_once():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"0\n"), done.stderr.decode()
