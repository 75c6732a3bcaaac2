"""The limits of cgroups on memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmd.configs.memory import _limited, available_bytes, memory_bytes


def test_the_memory_of_this_machine_is_known():
    assert 0 < available_bytes() <= memory_bytes()


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    """The cgroups of a Slurm job: its step and the job have limits, Slurm has none."""
    root = tmp_path / "cgroup"
    for name, limit in (("slurm", "max"), ("slurm/job_1", "1000"), ("slurm/job_1/step_0", "500")):
        (root / name).mkdir(parents=True)
        (root / name / "memory.max").write_text(f"{limit}\n")
    return root


@pytest.mark.parametrize(
    ("own", "limits"),
    [
        ("0::/slurm/job_1/step_0", [500, 1000]),
        ("12:memory:/x\n0::/slurm/job_1", [1000]),  # version 1 is mounted, too
        ("0::/", []),
        ("0::/../../slurm", []),
        ("12:memory:/x", []),
        ("", []),
    ],
)
def test_limits_of_the_own_cgroup_and_those_above_count(cgroups, tmp_path, own, limits):
    path = tmp_path / "own"
    path.write_text(f"{own}\n")
    assert [limit for _, limit in _limited(cgroups, path)] == limits


def test_the_limit_of_a_container_is_at_its_root(cgroups, tmp_path):
    (cgroups / "memory.max").write_text("2000\n")
    path = tmp_path / "own"
    path.write_text("0::/\n")
    assert list(_limited(cgroups, path)) == [(cgroups, 2000)]
    assert list(_limited(cgroups, tmp_path / "nowhere")) == []
