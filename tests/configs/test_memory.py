"""The limits of cgroups on memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
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
    assert [limit for _, limit, _ in _limited(cgroups, path)] == limits


def test_the_limit_of_a_container_is_at_its_root(cgroups, tmp_path):
    (cgroups / "memory.max").write_text("2000\n")
    path = tmp_path / "own"
    path.write_text("0::/\n")
    assert [found[:2] for found in _limited(cgroups, path)] == [(cgroups, 2000)]
    assert list(_limited(cgroups, tmp_path / "nowhere")) == []


def test_limits_of_version_1_count(tmp_path):
    root = tmp_path / "cgroup"
    for name, limit in (("", str(2**63 - 4096)), ("docker", "1000"), ("docker/x", "500")):
        (root / "memory" / name).mkdir(parents=True)
        (root / "memory" / name / "memory.limit_in_bytes").write_text(f"{limit}\n")
    path = tmp_path / "own"
    path.write_text("5:devices:/\n4:memory:/docker/x\n0::/\n")
    assert [limit for _, limit, _ in _limited(root, path)] == [500, 1000]
    path.write_text("4:memory:/of/the/host\n")  # a container sees its own as the root
    (root / "memory" / "memory.limit_in_bytes").write_text("3000\n")
    assert [limit for _, limit, _ in _limited(root, path)] == [3000]


def test_the_limit_of_a_real_cgroup_counts():
    """Of version 1 or 2, whichever this machine lets this user create."""
    version_1 = Path("/sys/fs/cgroup/memory")
    base = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    folder = base / f"warmd-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
    try:
        folder.mkdir()
        (folder / name).write_text(str(512 * 1024**2))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        # Nothing to install: a container may have them read-only, also in CI. The tests above read
        # the same files of both versions.
        pytest.skip(f"cgroups cannot be created here: {error}")
    code = f"""
from pathlib import Path
Path({str(folder / "cgroup.procs")!r}).write_text("0")
from warmd.configs.memory import available_bytes, memory_bytes
print(memory_bytes(), available_bytes())
"""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        total, available = map(int, done.stdout.split())
        assert total == 512 * 1024**2
        assert 256 * 1024**2 < available <= total
    finally:
        folder.rmdir()
