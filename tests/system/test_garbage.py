"""Garbage in Redis, in files and on sockets: it is refused by name and affects nothing else."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import tiny
from daemons import Daemon
from disturbing import NOBODY, STEPS, frozen, steps
from waiting import wait_until

from warmd.configs.config import ModelConfig
from warmd.daemon.client import control
from warmd.daemon.queue import keys
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.queue.workers import WorkerRegistry
from warmd.daemon.runs import events
from warmd.jobs.errors import WarmdError

# A daemon of their own takes longer to start than the tests take.
pytestmark = pytest.mark.slow


def test_ids_without_a_job_are_dropped_from_a_queue(battered: Daemon):
    hostile = [b"\xff\xfe", b"../../etc/passwd", b"a:b:c", b"", b"x" * 1_000_000, NOBODY.encode()]
    battered.client.connection.rpush("rq:queue:train", *hostile)
    wait_until(lambda: battered.client.connection.llen("rq:queue:train") == 0)


def test_hashes_that_are_not_jobs_are_dropped_from_a_queue(battered: Daemon):
    connection = battered.client.connection
    decent = {"data": "7", "status": "queued", "origin": "train"}
    wrong: list[dict[Any, Any]] = [
        {**decent, "timeout": "soon"},
        {**decent, "dependency_ids": "5"},
        {**decent, "status": "asleep"},
        {**decent, "origin": "nowhere"},
        {**decent, b"\xff": b"\xff"},
        {b"\xff": b"\xff"},
    ]
    ids = [f"{NOBODY[:-1]}{number}" for number in range(len(wrong))]
    for job_id, fields in zip(ids, wrong, strict=True):
        connection.hset(f"rq:job:{job_id}", mapping=fields)
    connection.set(f"rq:job:{NOBODY}", "not even a hash")
    connection.rpush("rq:queue:train", *ids, NOBODY)
    wait_until(lambda: connection.llen("rq:queue:train") == 0)


def test_garbage_in_the_registries_stops_no_job(battered: Daemon):
    connection = battered.client.connection
    for registry in ("wip", "scheduled", "deferred", "finished", "failed"):
        connection.zadd(f"rq:{registry}:train", {b"\xff:a:b": 1, b"no-colon": 2})
    connection.hset(keys.WORKERS, mapping={b"\xff": b"\xff", "no-colon": "train"})
    wait_until(lambda: connection.zcard("rq:scheduled:train") == 0)
    # The jobs of dead workers of this home are requeued all the same.
    workers = WorkerRegistry(JobStore(connection))
    assert workers.requeue_orphans(f"train-0:{battered.home.key}:dead00", "train") == []
    assert connection.zcard("rq:wip:train") == 0


def test_a_wrong_type_at_the_key_of_a_stream_affects_only_that_stream(battered: Daemon):
    with frozen(battered, "worker"):
        job_id = battered.submit()
        battered.client.connection.set(keys.events(job_id), "text")
    assert battered.wait(job_id)["status"] == "finished"
    assert steps(battered, job_id) == STEPS


def altered(folder: Path, **changes: Any) -> None:
    document = orjson.loads((folder / "spec.json").read_bytes())
    (folder / "spec.json").write_bytes(orjson.dumps({**document, **changes}))


SPOILT: list[tuple[Callable[[Path], Any], str]] = [
    (lambda run: (run / "spec.json").unlink(), "failed"),
    (lambda run: (run / "spec.json").write_bytes(b'{"sch'), "failed"),
    (lambda run: (run / "spec.json").write_bytes(b"[1]"), "failed"),
    (lambda run: altered(run, schema="x"), "failed"),
    (lambda run: altered(run, model="x"), "failed"),
    (lambda run: altered(run, model={"a": 1}), "failed"),
    (lambda run: altered(run, spec=[1]), "failed"),
    (lambda run: altered(run, kind="nosuch"), "failed"),
    (lambda run: (run / "events.jsonl").mkdir(), "failed"),
    (lambda run: (run / "log.txt").mkdir(), "failed"),
    (lambda run: (run / "lock").mkdir(), "failed"),
    (lambda run: (run / "checkpoints").touch(), "failed"),
    (lambda run: shutil.rmtree(run), "failed"),
    (lambda run: (run / "result.json").write_bytes(b'{"a'), "finished"),
    (lambda run: (run / "result.json").write_bytes(b"[]"), "finished"),
    (lambda run: (run / "result.json").write_bytes(b'{"revision":1}'), "finished"),
    (lambda run: (run / "events.jsonl").write_bytes(b'x\n{"seq":"x"}\n[]\n\xff'), "finished"),
]


def test_damaged_run_directories_affect_only_their_own_jobs(battered: Daemon):
    with frozen(battered, "worker"):
        ids = [battered.submit(samples=2) for _ in SPOILT]
        for job_id, (spoil, _) in zip(ids, SPOILT, strict=True):
            spoil(battered.home.runs / job_id)
    last = wait_until(
        lambda: (job := battered.client.store.fetch(ids[-1])) and job.ended_at and job
    )
    assert last.get_status() == "finished"
    jobs = [battered.client.store.fetch(job_id) for job_id in ids]
    assert [job and job.get_status() for job in jobs] == [status for _, status in SPOILT]
    assert all(job._exc_info for job in jobs if job is not None and job.is_failed)


@pytest.mark.parametrize("types", [[], ["finished", "requeued"]])
def test_a_job_killed_after_writing_its_result_finishes_once(battered: Daemon, types: list[str]):
    with frozen(battered, "worker"):
        job_id = battered.submit()
        rundir = battered.client.rundir(job_id)
        with events.EventLog(rundir.events, execution=1) as log:
            for type in ("started", *types):
                log.emit(type)
        rundir.write_result({"steps": 6}, revision=1)
    assert battered.wait(job_id)["result"] == {"steps": 6}
    assert len(battered.events(job_id, "finished")) == 1


def test_an_event_log_damaged_in_the_middle_loses_only_the_damaged_lines(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with events.EventLog(path, execution=1) as log:
        for step in (1, 2, 3):
            log.emit("step", step=step)
    first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"seq":"\xff\n' + third + third[:9])
    with events.EventLog(path, execution=2) as log:
        for step in (3, 4):
            log.emit("step", step=step)
    found = [(event["seq"], event["step"]) for event in events.read(path)]
    assert found == [(1, 1), (3, 3), (4, 4)]


def reconfigured(folder: Path, **changes: Any) -> None:
    settings = orjson.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_bytes(orjson.dumps({**settings, **changes}))


SPOILT_MODELS: list[Callable[[Path], Any]] = [
    lambda model: (model / "config.json").write_bytes(b"[]"),
    lambda model: reconfigured(model, hidden_size="x"),
    lambda model: reconfigured(model, num_attention_heads=0),
    lambda model: reconfigured(model, architectures=[5]),
    lambda model: reconfigured(model, num_hidden_layers=10**6),
    lambda model: reconfigured(model, hidden_size=10**7, head_dim=8),
    lambda model: (model / "model.safetensors").write_bytes(b""),
    lambda model: (model / "model.safetensors").write_bytes(b"\xff" * 100),
    lambda model: (model / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"[]"),
    lambda model: (model / "tokenizer.json").write_bytes(b"[1]"),
]


def test_damaged_models_are_refused_and_do_not_end_the_zygote(
    battered: Daemon, tiny_model: Path, tmp_path: Path
):
    begun = time.monotonic()
    for number, spoil in enumerate(SPOILT_MODELS):
        folder = tmp_path / f"m{number}"
        shutil.copytree(tiny_model, folder)
        spoil(folder)
        with pytest.raises(WarmdError, match=rf"model: m{number} cannot be loaded from"):
            control.load_model(battered.config, ModelConfig(name=folder.name, path=str(folder)))
    assert time.monotonic() - begun < 30  # none is built first, which can take minutes


def test_model_removed_while_its_job_is_queued_fails_the_job(battered: Daemon, tmp_path: Path):
    folder = tmp_path / "gone"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    with frozen(battered, "worker"):
        job_id = battered.submit(model=str(folder))
        shutil.rmtree(folder)
    job = battered.wait(job_id)
    assert job["status"] == "failed"
    assert "no such folder" in job["error"]


@contextlib.contextmanager
def caller(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(path))
        yield sock


@pytest.mark.parametrize("listening", ["zygote_socket", "control_socket"])
def test_garbage_at_a_socket_does_no_harm(battered: Daemon, listening: str):
    path = getattr(battered.home, listening)
    for request in (
        b"\xff\0garbage\n",
        b"[]\n5\n{}\n",
        b'{"op":"run"}\n',
        b'{"op":"run","model":{"config":{"a":1}},"job_id":5}\n',
        b'{"op":"load"}\n',
        b'{"op":"unload","name":[1]}\n',
        b'{"op":"stop"}\n',
        b'{"op":[1]}\n',
    ):
        with caller(path) as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1 << 16)
    with caller(path) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(64):  # one line without an end
            sock.sendall(b"x" * (1 << 20))


def test_silent_callers_delay_no_request_and_keep_no_thread(battered: Daemon):
    supervisor = psutil.Process(battered.pid("supervisor"))
    with contextlib.ExitStack() as silent:
        for _ in range(5):
            silent.enter_context(caller(battered.home.zygote_socket))
        begun = time.monotonic()
        assert battered.status()["zygote"]["state"] == "ready"
        assert time.monotonic() - begun < 2
    with contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(caller(battered.home.control_socket))
        wait_until(lambda: supervisor.num_threads() < 5, timeout_s=10)
