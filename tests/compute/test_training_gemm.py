"""The GEMM of training: chosen by measurement, and the same for a whole job."""

from __future__ import annotations

import pytest
import torch
from needs import needs

from warmd.jobs.compute import onednn
from warmd.jobs.compute.aten_overrides import fast_kernels, recorded_choice
from warmd.jobs.compute.levels import levels
from warmd.jobs.compute.training_gemm import measure_gemm


@pytest.fixture(autouse=True)
def _has_onednn() -> None:
    needs(onednn.is_available(), "a torch with oneDNN")


def test_the_measurement_times_torchs_gemm_even_while_it_is_overridden():
    # The two kernels are distinguished by their bits.
    a, b = torch.randn(200, 300), torch.randn(300, 400)
    stock, out = a @ b, torch.empty(200, 400)
    with fast_kernels(onednn=True):
        torch.mm(a, b, out=out)
    assert torch.equal(out, stock)


def test_the_measurement_changes_neither_threads_nor_random_state():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert measure_gemm() > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_resumed_job_keeps_its_gemm_kernel(tmp_path):
    path = tmp_path / "gemm"
    chosen = recorded_choice(path, "cpu")
    assert chosen == levels().training
    assert path.read_text() == chosen
    for name in ("onednn", "torch"):
        path.write_text(name)
        assert recorded_choice(path, "cpu") == name
        assert path.read_text() == name


def test_on_a_gpu_no_gemm_is_measured_or_recorded(tmp_path):
    assert recorded_choice(tmp_path / "gemm", "cuda") == "torch"
    assert not (tmp_path / "gemm").exists()
