"""The GPUs of this machine without CUDA: read from nvidia-smi and the driver's files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from warmd.cli.commands.doctor import check_gpus
from warmd.configs import gpus
from warmd.configs.entries import ModelConfig, parse_model

H200 = "0, GPU-8a1b, NVIDIA H200, 570.86.15, 143771, 143000, {}, {}, Disabled"
THOR = "1, GPU-77, NVIDIA Thor, 580.00, [N/A], [N/A], [N/A], Default, [N/A]"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put an nvidia-smi first on PATH that prints given lines and ends with a given code."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def prints(*lines: str, code: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!{sys.executable}\nprint({chr(10).join(lines)!r})\nexit({code})")
        program.chmod(0o755)

    return prints


def test_gpus_are_read_with_memory_driver_and_modes(nvidia_smi):
    nvidia_smi(H200.format("Enabled", "Default"), THOR)
    h200, thor = gpus.read()
    assert h200 == gpus.Gpu(
        index=0,
        uuid="GPU-8a1b",
        name="NVIDIA H200",
        driver="570.86.15",
        total_bytes=143771 * 2**20,
        free_bytes=143000 * 2**20,
        persistence_mode="Enabled",
        compute_mode="Default",
        mig_mode="Disabled",
    )
    assert (thor.total_bytes, thor.persistence_mode, thor.mig_mode) == (None, None, None)


@pytest.mark.parametrize(
    ("modes", "result", "advice"),
    [
        (("Enabled", "Default"), "ok", ""),
        (("Disabled", "Default"), "warn", "nvidia-smi -i 0 -pm 1"),
        (("Enabled", "Exclusive_Process"), "warn", "nvidia-smi -i 0 -c DEFAULT"),
    ],
)
def test_doctor_says_which_mode_of_a_gpu_makes_jobs_slow_or_fail(nvidia_smi, modes, result, advice):
    nvidia_smi(H200.format(*modes))
    [check] = check_gpus()
    assert (check.check, check.result) == ("gpu", result)
    assert "NVIDIA H200, driver 570.86.15, 150 GB of 151 GB free" in check.found
    assert check.advice.startswith(advice)


def test_doctor_shows_the_error_of_a_driver_that_does_not_run(nvidia_smi):
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the driver.", code=9)
    [check] = check_gpus()
    assert check.result == "warn"
    assert check.found.startswith("nvidia-smi: NVIDIA-SMI has failed because")


def test_gpus_are_counted_as_the_driver_lists_them_unless_some_are_chosen(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert gpus.visible({}, tmp_path) == 2
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    assert gpus.visible({}, tmp_path / "none") == 0


def test_the_version_of_the_driver_is_read_from_its_own_file(tmp_path):
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Mon Jan 20\nGCC version: 12.2\n"
    )
    assert gpus.driver_version(tmp_path) == "570.86.15"
    assert gpus.driver_version(tmp_path / "none") is None


def test_models_keep_the_dtype_of_their_files_and_answer_in_bf16_where_there_is_a_gpu(monkeypatch):
    found = []
    for visible in ("0", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        model = parse_model("m=org/m", Path())
        assert model == ModelConfig(name="m", path="org/m")
        found.append((model.dtype, model.precision))
    assert found == [("auto", "bf16"), ("float32", "native")]
    given = parse_model("m=org/m,dtype=float16,precision=native", Path())
    assert (given.dtype, given.precision) == ("float16", "native")
