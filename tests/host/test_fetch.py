"""Models from a hub, which runs on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import huggingface_hub
import psutil
import pytest
from daemons import gone
from hubs import Hub, environment, hub
from process_limits import process_limit
from waiting import holds_for, wait_until
from workplaces import NAME, Workplace, seconds_until, workplace

from warmd.configs.config import ModelConfig
from warmd.daemon.host import fetch
from warmd.daemon.host.downloads import ensure_folder
from warmd.daemon.host.messages import StopJob
from warmd.daemon.queue import keys
from warmd.jobs.errors import NotFound, Unavailable

pytestmark = pytest.mark.nightly(
    part="networks", catches="a download that is interrupted, and used or begun again"
)

MODEL = ModelConfig(name="m", path="org/m")
OBEYED_S = 2.0

# Replaces the hub's library: it starts a child process, and both take their time.
HANGING = """
import subprocess
from . import constants
from .errors import LocalEntryNotFoundError
def snapshot_download(*args, local_files_only=False, **settings):
    if local_files_only:
        raise LocalEntryNotFoundError
    subprocess.run(["sleep", "600"])
"""
ITS_ERRORS = """
class HFValidationError(Exception): pass
class LocalEntryNotFoundError(Exception): pass
"""


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that can be reached. The hub's cache is empty."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text('{"is": "old"}')
    with hub(folder) as served:
        for name, value in environment(served, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)  # of processes that are started
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield served


def fetched(*, is_newest: bool = False) -> Path:
    return ensure_folder(MODEL, refresh=is_newest, is_canceled=lambda: False)


def test_a_downloaded_model_gets_the_umask_of_the_user(published: Hub, monkeypatch):
    monkeypatch.setenv("_WARMD_UMASK", "027")
    before = os.umask(0o077)
    try:
        path = fetched() / "config.json"
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_loading_a_model_gets_its_newest_revision_also_for_later_jobs(published: Hub):
    old = fetched()
    (published.folder / "config.json").write_text('{"is": "new"}')
    assert fetched() == old  # a job does not wait for the hub
    new = fetched(is_newest=True)
    assert (new / "config.json").read_text() == '{"is": "new"}'
    assert fetched() == new


@pytest.mark.parametrize("cleared", ["models--org--m", "models--org--m/blobs"])
def test_files_removed_from_the_hub_cache_are_downloaded_again(
    published: Hub, tmp_path: Path, cleared: str
):
    fetched()
    shutil.rmtree(tmp_path / "cache" / cleared)
    assert (fetched() / "config.json").read_text() == '{"is": "old"}'


def test_a_completely_cached_model_needs_neither_process_nor_request(published: Hub):
    folder = fetched()
    published.requests.clear()
    assert fetch.folder_at_hand(MODEL) == folder
    assert published.requests == []


def test_an_interrupted_download_is_not_used_as_a_model(published: Hub):
    (published.folder / "model.safetensors").write_bytes(bytes(1000))
    published.is_open.clear()
    with pytest.raises(Unavailable, match="the daemon is stopping"):
        ensure_folder(
            MODEL, is_canceled=lambda: any("resolve" in path for path in published.requests)
        )
    assert fetch.folder_at_hand(MODEL) is None
    published.is_open.set()
    assert fetched() == fetch.folder_at_hand(MODEL)


def test_model_that_the_hub_does_not_have_is_refused_with_the_reason(published: Hub):
    unknown = ModelConfig(name="u", path="org/unknown")
    with pytest.raises(NotFound, match=r"^model: must be .* got 'org/unknown': .*404"):
        ensure_folder(unknown, is_canceled=lambda: False)


# --- while a job waits for its model ------------------------------------------------------------


@pytest.fixture
def place(published: Hub) -> Iterator[Workplace]:
    """A worker whose first job waits for the second half of its model."""
    (published.folder / "model.safetensors").write_bytes(bytes(1_000_000))
    published.is_open.clear()
    with workplace() as made:
        yield made


def fetching(place: Workplace) -> str:
    """Have a job wait for its model; return its id."""
    job_id = place.submit(model="org/m")
    wait_until(lambda: any(event["bytes"] for event in place.events(job_id, "fetching")))
    return job_id


def downloads_of(worker: int) -> list[psutil.Process]:
    children = psutil.Process(worker).children(recursive=True)
    return [child for child in children if "warmd.daemon.host.downloads" in child.cmdline()]


def test_job_shows_the_progress_of_its_download_and_runs_after_it(place: Workplace, published: Hub):
    place.worker()
    job_id = fetching(place)
    wait_until(lambda: len(place.events(job_id, "fetching")) >= 4)
    events = place.events(job_id, "fetching")
    assert all(after["time"] - before["time"] < 1 for before, after in pairwise(events))
    sizes = {path.name: path.stat().st_size for path in published.folder.iterdir()}
    assert {event["total_bytes"] for event in events[-2:]} == {sum(sizes.values())}
    assert 0 < events[-1]["bytes"] < sum(sizes.values())
    with place.zygote() as zygote:
        published.is_open.set()
        horse = zygote.fork()
    assert horse.job_id == job_id
    assert Path(str(horse.request.model and horse.request.model.folder), "config.json").is_file()


def test_many_jobs_for_one_model_wait_for_one_download(place: Workplace, published: Hub):
    worker = place.worker()
    jobs = [fetching(place), *(place.submit(model="org/m") for _ in range(2))]
    wait_until(lambda: all(place.events(job_id, "fetching") for job_id in jobs))
    assert len(downloads_of(worker.pid)) == 1
    place.client.jobs.cancel(jobs[0])
    wait_until(lambda: place.status(jobs[0]) == "stopped")
    with place.zygote() as zygote:
        published.is_open.set()
        assert zygote.fork().job_id == jobs[1]


def test_a_worker_handles_requests_and_keeps_its_lease_during_a_download(place: Workplace):
    worker = place.worker(lease_s=3.0)
    waiting = fetching(place)
    other = place.submit()
    with place.zygote() as zygote:
        horse = zygote.fork()
        assert horse.job_id == other
        place.client.jobs.kill(other)
        assert seconds_until(lambda: horse.next_message() == StopJob(other, "kill")) < OBEYED_S
        horse.end(other, "stopped", reason="kill")
        wait_until(lambda: place.status(other) == "stopped")
    over = time.monotonic() + 3.5  # longer than the lease
    while time.monotonic() < over:
        assert place.registry.has_lease(NAME)
        time.sleep(0.05)
    (download,) = downloads_of(worker.pid)
    place.client.jobs.cancel(waiting)
    assert seconds_until(lambda: place.status(waiting) == "stopped") < OBEYED_S
    wait_until(lambda: gone(download))


def test_time_limit_and_pause_apply_during_a_download(place: Workplace):
    worker = place.worker()
    limited = place.submit(model="org/m", timeout_s=1)
    paused = fetching(place)
    wait_until(lambda: place.status(limited) == "failed", timeout_s=5)
    assert place.client.jobs.get(limited)["error"] == "took longer than its time limit of 1 s"
    assert place.client.jobs.pause(paused, release=True) == "pausing"
    assert seconds_until(lambda: place.status(paused) == "scheduled") < OBEYED_S
    wait_until(lambda: not downloads_of(worker.pid))
    assert place.client.jobs.unpause(paused) == "queued"
    wait_until(lambda: downloads_of(worker.pid))


def test_a_stopping_worker_requeues_a_job_during_its_download(place: Workplace):
    worker = place.worker()
    job_id = fetching(place)
    (download,) = downloads_of(worker.pid)
    worker.terminate()
    assert seconds_until(lambda: worker.poll() is not None) < OBEYED_S
    assert place.status(job_id) == "queued"
    wait_until(lambda: gone(download))


def test_download_ends_with_its_child_processes_when_its_worker_is_killed(
    place: Workplace, tmp_path: Path
):
    library = tmp_path / "library" / "huggingface_hub"
    library.mkdir(parents=True)
    for name, code in (
        ("__init__", HANGING),
        ("errors", ITS_ERRORS),
        ("constants", 'HF_HUB_CACHE = ""'),
    ):
        (library / f"{name}.py").write_text(code)
    path = os.pathsep.join([str(library.parent), os.environ.get("PYTHONPATH", "")])
    worker = place.worker(PYTHONPATH=path)
    place.submit(model="org/m")
    started = wait_until(
        lambda: (found := psutil.Process(worker.pid).children(recursive=True))[1:] and found
    )
    worker.send_signal(signal.SIGKILL)
    wait_until(lambda: all(map(gone, started)), timeout_s=OBEYED_S)


def test_a_killed_download_fails_its_job_with_that_reason(place: Workplace):
    worker = place.worker()
    job_id = fetching(place)
    (download,) = downloads_of(worker.pid)
    download.kill()
    wait_until(lambda: place.status(job_id) == "failed")
    assert (
        place.client.jobs.get(job_id)["error"] == "model: org/m: the download process ended with -9"
    )
    assert place.connection.exists(keys.lease(NAME))


@pytest.mark.parametrize("more", [0, 1])
def test_a_download_waits_for_a_machine_that_can_start_no_process_or_thread(
    place: Workplace, published: Hub, tmp_path: Path, more: int
):
    with process_limit(f"warmd-{tmp_path.name}") as limit, contextlib.ExitStack() as ending:
        worker = place.worker()
        ending.callback(worker.wait)
        ending.callback(worker.kill)
        limit.add(worker.pid)
        limit.set(more=more)
        job_id = place.submit(model="org/m")
        what = wait_until(lambda: place.client.jobs.get(job_id)["waits_for"])
        assert what == "a free thread or process (limit of processes)"
        holds_for(1.5, lambda: place.status(job_id) == "started")
        limit.set(more=None)
        with place.zygote() as zygote:
            published.is_open.set()
            assert zygote.fork().job_id == job_id
