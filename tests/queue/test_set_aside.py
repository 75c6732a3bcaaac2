"""Jobs that need labels: set aside by workers without them, taken by those that have them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from shell import warmd
from waiting import wait_until
from workplaces import NAME, Workplace

from warmd import configs
from warmd.configs.labels import SCHEMA as SCHEMA_LABEL, model_need
from warmd.daemon.queue import keys
from warmd.daemon.queue.waiting import Offer
from warmd.daemon.runs.rundir import SCHEMA

OWN = {SCHEMA_LABEL: str(SCHEMA)}
H200 = {**OWN, "gpu": "h200", "memory": "64G"}


def offer(labels: dict[str, str], *, has_nodes: bool = False) -> Offer:
    return Offer(labels, os.path.isdir, lambda needs: has_nodes)


def pop(place: Workplace, labels: dict[str, str] = OWN) -> Any:
    """Pop the next job for a worker; return what it sets aside of it."""
    queue = place.store.queue("infer").key
    popped: Any = place.connection.lmove(queue, keys.taken(NAME), "LEFT", "RIGHT")
    needs = place.store.needs_of_popped(popped)
    missing = offer(labels).unmet(needs)
    is_aside = missing and place.store.set_aside(popped, "infer", NAME, needs)
    return (popped.decode(), missing) if is_aside else None


def take(place: Workplace, labels: dict[str, str], *, has_nodes: bool = False) -> str | None:
    offered = offer(labels, has_nodes=has_nodes)
    _, lines, _ = place.store.waiting_needs("infer", offered)
    found = place.store.take_set_aside("infer", NAME, lines) if lines else None
    return None if found is None else found.decode()


def test_a_job_is_set_aside_until_a_worker_has_its_labels(place: Workplace):
    job_id = place.submit(needs={"gpu": "h200", "memory": "40G"})
    assert pop(place) == (job_id, {"gpu": "h200", "memory": "40G"})
    assert place.connection.llen(keys.taken(NAME)) == 0
    assert place.status(job_id) == "queued"
    assert take(place, OWN) is None
    assert take(place, {**H200, "memory": "32G"}) is None
    assert take(place, H200) == job_id
    assert take(place, H200) is None
    assert place.store.begin(job_id.encode(), "infer", NAME) is not None
    assert not place.connection.smembers(keys.needs("infer"))


def test_a_worker_with_the_labels_sets_no_job_aside(place: Workplace):
    place.submit(needs={"gpu": "h200"})
    assert pop(place, H200) is None


def test_the_oldest_job_is_first_whatever_its_needs(place: Workplace):
    jobs = [place.submit(needs={"gpu": "h200", "memory": f"{n}G"}) for n in (3, 1, 2, 1)]
    for _ in jobs:
        assert pop(place) is not None
        time.sleep(0.01)
    assert [take(place, H200) for _ in jobs] == jobs


def test_a_job_of_a_later_format_is_refused_and_kept(place: Workplace):
    job_id = place.submit()
    line = f"{SCHEMA_LABEL}={SCHEMA + 1}"
    place.connection.hset(f"rq:job:{job_id}", keys.FIELD_NEEDS, line)
    assert pop(place) == (job_id, {SCHEMA_LABEL: str(SCHEMA + 1)})
    assert place.status(job_id) == "queued"
    assert take(place, {SCHEMA_LABEL: str(SCHEMA + 1)}) == job_id


def test_jobs_that_are_set_aside_are_seen_canceled_and_paused(place: Workplace):
    seen, canceled, paused = (place.submit(needs={"gpu": "h200"}) for _ in range(3))
    for _ in range(3):
        assert pop(place) is not None
    assert place.client.jobs.queues()[1]["queued"] == 3
    shown = warmd("queue", home=place.home.path)
    assert shown.out.count("gpu=h200") == 3
    assert seen in shown.out
    assert place.client.jobs.cancel(canceled) == "canceled"
    place.client.jobs.pause(paused)
    assert take(place, H200) == seen
    assert take(place, H200) is None
    assert place.client.jobs.unpause(paused) == "queued"
    assert pop(place, H200) is None


def test_a_job_that_a_dying_worker_took_is_requeued(place: Workplace):
    job_id = place.submit(needs={"gpu": "h200"})
    assert pop(place) is not None
    assert take(place, H200) == job_id
    assert place.registry.reclaim(NAME, "infer") == [job_id]
    assert pop(place) == (job_id, {"gpu": "h200"})


@pytest.mark.slow
def test_a_running_worker_takes_the_jobs_that_its_labels_allow(place: Workplace):
    worker = place.worker(slots=1, labels={"gpu": "h200"})
    refused = place.submit(needs={"gpu": "a100"})
    taken = place.submit(needs={"gpu": "h200"})
    with place.zygote() as zygote:
        assert zygote.fork().job_id == taken
        assert "set aside, it needs gpu=a100" in place.home.log.read_text()
        assert place.status(refused) == "queued"
        worker.kill()  # before the horse: the worker would requeue its job
        worker.wait()
    assert place.registry.requeue_orphans(NAME, "infer") == [taken]
    wait_until(lambda: place.status(taken) == "queued")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder, with a comma in its path."""
    folder = tmp_path / "models, 100%" / "demo"
    shutil.copytree(Path(configs.__path__[0]) / "demo", folder)
    return folder


@pytest.mark.slow
def test_a_job_whose_model_is_not_on_this_machine_waits_for_one_that_has_it(
    place: Workplace, model: Path
):
    job_id = place.submit(model=str(model), needs={"gpu": "h200"})
    model.rename(model.with_name("away"))
    worker = place.worker(slots=1, is_shared=True, labels={"gpu": "h200"})
    wait_until(lambda: place.events(job_id, "requeued"))
    (event,) = place.events(job_id, "requeued")
    assert f"has no model folder {model}: waits for a machine that has it" in event["reason"]
    wait_until(lambda: place.client.jobs.get(job_id)["missing_model"] == str(model))
    shown = warmd("queue", home=place.home.path)
    assert f"a machine with {model}, gpu=h200" in shown.out
    assert f"a machine with {model}" in warmd("show", job_id, home=place.home.path).out
    assert place.client.jobs.queues()[1]["queued"] == 1
    other = place.submit()
    with place.zygote() as zygote:
        horse = zygote.fork()
        assert horse.job_id == other
        horse.end(other, "finished")
        horse.die()
        assert place.client.jobs.get(job_id)["execution"] == 1
        model.with_name("away").rename(model)
        assert zygote.fork().job_id == job_id
        assert place.client.jobs.get(job_id)["missing_model"] is None
        worker.kill()  # before the horse: the worker would requeue its job
        worker.wait()
    assert place.registry.requeue_orphans(NAME, "infer") == [job_id]
    # The next worker without the folder starts no execution.
    shutil.rmtree(model)
    assert pop(place, H200) == (job_id, model_need(str(model)))
    assert place.client.jobs.get(job_id)["missing_model"] == str(model)
    assert place.client.jobs.cancel(job_id) == "canceled"
    assert place.client.jobs.queues()[1]["queued"] == 0


def test_a_job_that_is_paused_while_its_worker_misses_its_model_stays_paused(
    place: Workplace, model: Path
):
    job_id = place.submit(model=str(model))
    queue = place.store.queue("infer").key
    popped: Any = place.connection.lmove(queue, keys.taken(NAME), "LEFT", "RIGHT")
    begun = place.store.begin(popped, "infer", NAME)
    assert begun is not None
    job, started = begun
    place.client.jobs.pause(job_id, release=True)
    assert place.store.set_aside_for_model(job, started.claim, str(model))
    assert not place.store.set_aside_for_model(job, started.claim, str(model))
    assert place.client.jobs.get(job_id)["paused"]
    assert place.client.jobs.unpause(job_id) == "queued"
    assert pop(place, OWN) is None
    assert place.registry.reclaim(NAME, "infer") == [job_id]


def test_without_a_shared_redis_a_job_without_its_model_fails(place: Workplace, model: Path):
    job_id = place.submit(model=str(model))
    shutil.rmtree(model)
    worker = place.worker()
    wait_until(lambda: place.status(job_id) == "failed")
    assert (
        f"must be a model folder with a config.json, got {model}"
        in place.client.jobs.get(job_id)["error"]
    )
    worker.kill()
    worker.wait()
