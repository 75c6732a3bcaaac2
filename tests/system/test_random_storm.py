"""Minutes of random blows, against every process of the daemon and its disk, lose nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs
from power import disk_without_power

SCRIPT = Path(__file__).parents[1] / "support" / "random_storm.py"
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def storm(*options: str, num_jobs: int, namespace: tuple[str, ...] = NAMESPACE) -> None:
    done = subprocess.run(
        [*namespace, sys.executable, str(SCRIPT), "--jobs", str(num_jobs), *options],
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"nothing lost: {num_jobs} jobs", done.stdout + done.stderr


@pytest.mark.nightly(
    part="storms",
    catches="jobs lost by kills of random processes at random times",
)
@pytest.mark.timeout(500)
def test_a_minute_of_random_kills_loses_nothing():
    needs(shutil.which("unshare"), "unshare")
    is_allowed = subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    # Without root, a PID namespace needs a user namespace around it.
    namespace = NAMESPACE if is_allowed else (*NAMESPACE, "--user", "--map-root-user")
    storm("--signals-only", "--seconds", "60", num_jobs=20, namespace=namespace)


@pytest.mark.nightly(
    part="storms",
    catches="jobs lost or changed by kills, full disks, power failures and an older Redis together",
)
@pytest.mark.timeout(900)  # the script gives up by itself, when nothing ends for minutes
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kills_full_disks_power_failures_and_an_older_redis_lose_nothing(tmp_path: Path, seed: int):
    (tmp_path / "probe").mkdir()
    with disk_without_power(tmp_path / "probe", tmp_path / "image", megabytes=8):
        pass  # the storm mounts its own, in its namespace
    storm("--seconds", "75", "--seed", str(seed), num_jobs=20)
