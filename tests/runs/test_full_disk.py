"""A home whose disk is full, has no inodes or cannot be written: one-line errors, no partial state.

Each runs in a mount namespace of its own, on a small tmpfs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest
import small_disks
from desks import Desk
from needs import needs
from shell import Done
from small_disks import FILLER, fill_inodes, small_disk

from warmd.configs.config import load
from warmd.daemon.client.client import Client
from warmd.daemon.host.home import Home
from warmd.daemon.runs.rundir import job_ids
from warmd.jobs import spec_class
from warmd.jobs.errors import SpecError, Unavailable

FILESYSTEMS = {"space": "size=6m", "inodes": "size=60m,nr_inodes=120", "read-only": "size=60m"}


def fill(folder: Path, lacks: str) -> None:
    """Leave no room in the file system of a folder."""
    if lacks == "read-only":
        runs = str(folder / "home" / "runs")  # the server has files open to write elsewhere
        subprocess.run(["mount", "--bind", runs, runs], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", runs], check=True)
        return
    try:
        for number in range(1_000_000):
            with open(folder / (f"f{number}" if lacks == "inodes" else "f"), "ab", 0) as file:
                file.write(bytes(4096 if lacks == "space" else 0))
    except OSError:
        return


def lines(done: Done) -> list[Any]:
    return [done.code, done.out, done.err]


def is_refusal(answer: list[Any], code: int = 2) -> bool:
    return Done(*answer).is_refusal(code)


def drill(folder: Path, lacks: str) -> dict[str, Any]:
    """Run the commands in a full home and check their output; runs in the namespace."""
    mount = ["mount", "-t", "tmpfs", "-o", FILESYSTEMS[lacks], "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    desk = Desk(folder)
    stopped, failed = desk.submit(), desk.submit()
    desk.begin().stop()
    desk.begin().fail("no reason")
    fill(folder, lacks)
    before = sorted(os.listdir(desk.home.runs))
    found = {
        "ids": [stopped, failed],
        "submit": lines(desk.warmd(*desk.grpo)),
        "left": sorted(os.listdir(desk.home.runs)) == before,
        "resume": lines(desk.warmd("resume", stopped, "--steps", "9")),
        "status": desk.client.jobs.get(stopped)["status"] if lacks != "read-only" else None,
        "rm": lines(desk.warmd("rm", failed)),
    }
    if lacks == "space":
        for _ in range(100):  # until the server has no room for what it is to remember
            done = desk.warmd("resume", stopped)
            done = done if done.code else desk.warmd("cancel", stopped)
            if done.code:
                break
        found["dead"] = lines(done)
    desk.close()
    return found


def drilled(tmp_path: Path, lacks: str) -> dict[str, Any]:
    folder = tmp_path / "disk"
    folder.mkdir()
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    needs(probe.returncode == 0, "the right to mount file systems")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, __file__, str(folder), lacks],
        capture_output=True,
        cwd=tmp_path,  # outside a work tree, whose uncommitted changes a job would keep
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = orjson.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["space", "inodes"])
def test_without_room_submit_and_resume_refuse_and_rm_makes_room(tmp_path, lacks):
    found = drilled(tmp_path, lacks)
    for command in ("submit", "resume"):
        assert is_refusal(found[command]), found[command]
        assert "No space left on device" in found[command][2]
    assert found["left"]
    assert found["status"] == "stopped"  # and so can be resumed later
    assert found["rm"][0] == 0, found["rm"]
    if lacks == "space":
        assert is_refusal(found["dead"], code=3)
        assert "is full, and Redis has ended: free some space" in found["dead"][2]


def test_a_submission_is_refused_by_the_home_whichever_file_finds_no_room(desk: Desk):
    spec = spec_class("grpo").parse({"model": str(desk.model), "samples": 4})
    runs, refused = desk.home.runs, list[SpecError]()
    with small_disk(runs, "1m", inodes=60):
        fill_inodes(runs)
        for file in (runs / FILLER).iterdir():
            file.unlink()
            try:
                job_id = desk.client.jobs.submit(spec)
            except SpecError as error:
                refused.append(error)
                assert not job_ids(runs)
            else:
                assert job_ids(runs) == [job_id]
                break
    assert {error.field for error in refused} == {"home"}
    assert all("No space left on device" in str(error) for error in refused)
    assert len(refused) > 2  # at least the folder, spec.json, and the source


def test_a_full_disk_of_the_runs_alone_is_not_the_cause_that_redis_is_missing(tmp_path: Path):
    home = Home(tmp_path / "home")
    home.create()
    with small_disk(home.runs, "1m"):
        small_disks.fill(home.runs)
        assert (home.full_folder(), home.full_folder_of_redis()) == (home.runs, None)
        client = Client(load(home=home.path, environ={}))
        with closing(client), pytest.raises(Unavailable, match="no daemon runs in"):
            client.jobs.all()


def test_a_full_disk_is_named_also_where_the_disk_of_the_runs_is_not_mounted(tmp_path: Path):
    home = Home(tmp_path / "home")
    home.path.mkdir(mode=0o700)
    with small_disk(home.path, "1m"):
        home.create()
        home.runs.rmdir()
        home.runs.symlink_to(tmp_path / "not mounted")
        small_disks.fill(home.path)
        client = Client(load(home=home.path, environ={}))
        advice = "is full, and Redis has ended: free some space, and run `warmd start`"
        with closing(client), pytest.raises(Unavailable, match=advice):
            client.jobs.all()


@pytest.mark.slow
def test_each_command_reports_a_home_that_cannot_be_written(tmp_path):
    found = drilled(tmp_path, "read-only")
    for command, code in (("submit", 2), ("resume", 1), ("rm", 1)):
        assert is_refusal(found[command], code), found[command]
    assert found["left"]


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(drill(Path(sys.argv[1]), sys.argv[2])))
