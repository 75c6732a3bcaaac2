"""A machine whose disk has no room for a run directory of a bucket: it waits for space.

The machine runs in a mount namespace of its own; its home is on a small tmpfs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import needs
from s3_servers import S3Server, s3_server
from waiting import holds_for, wait_until

from warmd.daemon.host.home import Home
from warmd.daemon.runs.checkpoints import Checkpoints, verify
from warmd.daemon.runs.rundir import RunDir
from warmd.daemon.store import fetching
from warmd.daemon.store.bucket import Bucket
from warmd.daemon.store.pending import PendingUploads
from warmd.daemon.store.remote import RemoteRuns
from warmd.daemon.store.upload import RunUpload
from warmd.daemon.work.run_fetches import RunFetch

WEIGHTS = os.urandom(2 << 20)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as made:
        yield made


def stored_job(folder: Path, url: str) -> str:
    """A job in the bucket that has a checkpoint, and runs nowhere."""
    home = Home(folder)
    home.create()
    remote = RemoteRuns(home, url)
    rundir = RunDir.create(home.runs, "grpo", {"spec": {}})
    job_id = rundir.path.name
    remote.publish(job_id)
    fetching.open_rundir(home, remote.bucket, job_id, 1)
    with Checkpoints(rundir.checkpoints, keep=2).commit(1) as staging:
        (staging.path / "weights").write_bytes(WEIGHTS)
    pending = PendingUploads(home).read(job_id)
    assert pending is not None
    RunUpload(remote.bucket, rundir, pending).advance(is_last=True)
    return job_id


def drill(folder: Path, url: str, job_id: str) -> None:
    """Fetch the job where there is no room, then make some; runs in the namespace."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
    home = Home(folder / "home")
    home.create()
    filler = folder / "filler"
    filler.write_bytes(bytes(2 << 20))
    fetch = RunFetch(home, Bucket(url), job_id, 2)
    wait_until(lambda: fetch.name)
    lacks = wait_until(lambda: fetch.lacks)
    assert lacks.what.startswith("space in ")
    holds_for(1.5, lambda: not fetch.is_done)
    filler.unlink()
    wait_until(lambda: fetch.is_done, timeout_s=30)
    assert (fetch.failure, fetch.lacks) == (None, None)
    verify(fetch.rundir.checkpoints / "checkpoint-1")


@pytest.mark.slow
def test_a_job_of_a_bucket_waits_until_the_disk_has_room_for_it(server: S3Server, tmp_path: Path):
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    needs(probe.returncode == 0, "the right to mount file systems")
    url = server.url(tmp_path.name)
    job_id = stored_job(tmp_path / "first", url)
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["unshare", "-m", sys.executable, __file__, str(disk), url, job_id],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr.decode()


if __name__ == "__main__":
    drill(Path(sys.argv[1]), *sys.argv[2:])
