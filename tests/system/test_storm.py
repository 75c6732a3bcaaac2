"""A hostile and unlucky world: garbage, lost replies, a full disk, sleep, kills at any moment."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import tiny
from daemons import Daemon, gone
from needs import needs
from waiting import wait_until

from warmd.configs.config import ModelConfig
from warmd.daemon.client import control
from warmd.daemon.host.home import Home
from warmd.daemon.queue import keys
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.queue.lease import LEASE_S
from warmd.daemon.queue.workers import WorkerRegistry
from warmd.daemon.runs import events
from warmd.daemon.supervise.children import HUNG_S
from warmd.daemon.supervise.redis_server import find_binary
from warmd.jobs.errors import SpecError, WarmdError

MakeDaemon = Callable[..., Daemon]
STEPS = [1, 2, 3, 4, 5, 6]
NOBODY = "grpo-20260101-000000-zzzz"  # an id that no job has


@pytest.fixture
def battered(sturdy: Daemon) -> Iterator[Daemon]:
    """A daemon that outlives the test, without one of its processes being replaced."""
    before, said = pids(sturdy), sturdy.home.log.stat().st_size
    yield sturdy
    assert sturdy.wait(sturdy.submit(), timeout_s=20)["status"] == "finished"
    assert sturdy.client.jobs()
    assert [queue["queued"] for queue in sturdy.client.queues()] == [0, 0]
    assert pids(sturdy) == before
    assert b"turn failed" not in sturdy.home.log.read_bytes()[said:]


def pids(daemon: Daemon) -> list[int]:
    return [daemon.pid(name) for name in ("supervisor", "zygote", "worker")]


@contextlib.contextmanager
def frozen(daemon: Daemon, name: str) -> Iterator[psutil.Process]:
    """Stop a process for a while; it may be killed meanwhile."""
    process = psutil.Process(daemon.pid(name))
    process.suspend()
    # The server still serves what the worker was waiting for: let that time out first.
    wait_until(lambda: info(daemon)["blocked_clients"] == 0)
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def info(daemon: Daemon) -> dict[str, Any]:
    found: Any = daemon.client.connection.info("clients")
    return dict(found)


def hold(daemon: Daemon, **options: Any) -> str:
    """Run a job until its third step, where it waits; it has two checkpoints."""
    (daemon.folder / "calls").unlink(missing_ok=True)
    (daemon.folder / "gate").touch()
    job_id = daemon.submit("behaviours:gated", save_every=1, **options)
    wait_until((daemon.home.runs / job_id / "checkpoints" / "checkpoint-2").exists)
    return job_id


def let_go(daemon: Daemon) -> None:
    (daemon.folder / "gate").unlink()


def steps(daemon: Daemon, job_id: str) -> list[int]:
    return [event["step"] for event in daemon.events(job_id, "step")]


def weights(daemon: Daemon, job_id: str) -> bytes:
    return (daemon.home.runs / job_id / "model" / "model.safetensors").read_bytes()


def processes_of(home: Home) -> list[psutil.Process]:
    """Every process that names the home, but for the guardian and its supervisor, which do not."""
    found = psutil.process_iter(["cmdline"])
    return [
        process for process in found if str(home.path) in " ".join(process.info["cmdline"] or ())
    ]


def wait_for(seconds: float) -> None:
    """Let time itself pass, where that is what is tested."""
    over = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > over)


# --- garbage in Redis -----------------------------------------------------------------------


def test_ids_of_no_job_are_dropped_from_a_queue(battered: Daemon):
    hostile = [b"\xff\xfe", b"../../etc/passwd", b"a:b:c", b"", b"x" * 1_000_000, NOBODY.encode()]
    battered.client.connection.rpush("rq:queue:train", *hostile)
    wait_until(lambda: battered.client.connection.llen("rq:queue:train") == 0)


def test_hashes_that_are_no_jobs_are_dropped_from_a_queue(battered: Daemon):
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
    # The dead of this home are buried all the same.
    workers = WorkerRegistry(JobStore(connection))
    assert workers.requeue_orphans(f"train-0:{battered.home.key}:dead00", "train") == []
    assert connection.zcard("rq:wip:train") == 0


def test_something_else_in_the_place_of_a_stream_costs_the_stream_alone(battered: Daemon):
    with frozen(battered, "worker"):
        job_id = battered.submit()
        battered.client.connection.set(keys.events(job_id), "text")
    assert battered.wait(job_id)["status"] == "finished"
    assert steps(battered, job_id) == STEPS


# --- garbage in files -----------------------------------------------------------------------


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


@pytest.mark.slow
def test_run_directories_spoilt_in_the_queue_are_their_jobs_own_misfortune(battered: Daemon):
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


@pytest.mark.parametrize("told", [[], ["finished", "requeued"]])
def test_who_was_killed_after_writing_a_result_is_told_to_have_finished_once(
    battered: Daemon, told: list[str]
):
    with frozen(battered, "worker"):
        job_id = battered.submit()
        rundir = battered.client.rundir(job_id)
        with events.EventLog(rundir.events, execution=1) as log:
            for type in ("started", *told):
                log.emit(type)
        rundir.write_result({"steps": 6}, revision=1)
    assert battered.wait(job_id)["result"] == {"steps": 6}
    assert len(battered.events(job_id, "finished")) == 1


def test_event_log_garbled_in_the_middle_loses_the_garbled_lines_alone(tmp_path: Path):
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


# --- garbage at the sockets -----------------------------------------------------------------


@contextlib.contextmanager
def caller(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(path))
        yield sock


@pytest.mark.parametrize("door", ["zygote_socket", "control_socket"])
def test_garbage_at_a_socket_does_no_harm(battered: Daemon, door: str):
    path = getattr(battered.home, door)
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


@pytest.mark.slow
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


# --- exact moments --------------------------------------------------------------------------


def pop(daemon: Daemon) -> None:
    """Do what the server does for a worker that it cannot tell any more."""
    connection = daemon.client.connection
    names = [keys.text(name) for name in connection.hkeys(keys.WORKERS)]
    (name,) = (name for name in names if daemon.home.key in name)
    assert connection.lmove("rq:queue:train", keys.taken(name), "LEFT", "RIGHT")


def test_job_that_was_popped_for_a_worker_that_never_heard_is_run(battered: Daemon):
    with frozen(battered, "worker"):
        job_id = battered.submit()
        pop(battered)
    assert battered.wait(job_id)["execution"] == 1


def test_cancel_at_the_moment_of_the_pop_takes_the_job_out(battered: Daemon):
    with frozen(battered, "worker"):
        job_id = battered.submit()
        pop(battered)
        assert battered.client.cancel(job_id) == "canceled"
    wait_until(lambda: not battered.client.connection.keys("warmd:taken:*"))
    assert battered.wait(job_id)["execution"] == 0
    assert battered.client.resume(job_id) == "queued"
    assert battered.wait(job_id)["status"] == "finished"


def test_of_many_who_resume_a_job_at_once_one_does(battered: Daemon):
    job_id = hold(battered)
    battered.client.kill(job_id)
    assert battered.wait(job_id)["status"] == "stopped"
    let_go(battered)
    answers: list[str] = []

    def resume() -> None:
        daemon = Daemon(battered.home.path, Path("unused"))
        try:
            answers.append(daemon.client.resume(job_id))
        except WarmdError as error:
            answers.append(type(error).__name__)
        finally:
            daemon.client.close()

    threads = [threading.Thread(target=resume) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert battered.wait(job_id)["execution"] == 2
    assert Counter(answers) == {"queued": 1, "Conflict": 7}
    assert steps(battered, job_id) == STEPS


def test_looking_whether_a_home_is_locked_does_not_keep_a_daemon_out(make_daemon: MakeDaemon):
    home = make_daemon().home
    home.create()
    os.close(home.lock())
    looking = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, pathlib; from warmd.daemon.host.home import Home\n"
            "home = Home(pathlib.Path(sys.argv[1]))\nprint(flush=True)\n"
            "while True: home.is_locked()",
            str(home.path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert looking.stdout is not None
        with looking.stdout as said:
            said.readline()
            for _ in range(300):
                os.close(home.lock())
    finally:
        looking.kill()
        looking.wait()


# --- kills at exact moments: a daemon that must come back each time -----------------------------


@pytest.mark.slow
def test_two_horses_never_write_to_one_run_directory(sturdy: Daemon):
    job_id = hold(sturdy)
    horse = psutil.Process(sturdy.pid("horse"))
    horse.suspend()  # it cannot see that its worker is dead
    sturdy.kill("worker")
    wait_until(lambda: gone(horse), timeout_s=10)
    let_go(sturdy)
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 2, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["zygote", "worker"])
def test_kill_between_the_request_for_a_horse_and_its_fork(sturdy: Daemon, victim: str):
    zygote, worker = (psutil.Process(sturdy.pid(name)) for name in ("zygote", "worker"))
    zygote.suspend()
    job_id = sturdy.submit()
    sturdy.wait(job_id, "started")
    (zygote if victim == "zygote" else worker).kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        zygote.resume()
    assert sturdy.wait(job_id)["status"] == "finished"
    assert steps(sturdy, job_id) == STEPS


@pytest.mark.slow
def test_cancel_while_the_zygote_is_dead(sturdy: Daemon):
    sturdy.kill("zygote")
    job_id = sturdy.submit(samples=40, save_every=100)
    sturdy.wait(job_id, "started")
    assert sturdy.client.cancel(job_id) == "stopping"
    assert sturdy.wait(job_id)["status"] == "stopped"


@pytest.mark.slow
def test_kill_in_the_middle_of_a_checkpoint(sturdy: Daemon):
    job_id = sturdy.submit(samples=40, save_every=1)
    folder = sturdy.home.runs / job_id / "checkpoints"

    def is_saving(execution: int) -> psutil.Process | None:
        """The horse of an execution that saves now, and has saved before: it makes progress."""
        found = [event for event in sturdy.events(job_id) if event["execution"] == execution]
        if "checkpoint" in [event["type"] for event in found] and list(folder.glob(".staging-*")):
            return psutil.Process(found[0]["pid"])
        return None

    for execution in (1, 2, 3, 4):
        wait_until(partial(is_saving, execution)).kill()
    job = sturdy.wait(job_id)
    assert (job["status"], steps(sturdy, job_id)) == ("finished", list(range(1, 41)))
    assert not list(folder.glob(".*"))


@pytest.mark.slow
def test_sleep_of_the_whole_machine_loses_and_repeats_nothing(sturdy: Daemon):
    job_id = hold(sturdy)
    before = pids(sturdy)
    asleep = sturdy.processes()
    for process in asleep:
        process.suspend()
    wait_for(LEASE_S + 1)
    for process in reversed(asleep):
        process.resume()
    let_go(sturdy)
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 1, STEPS)
    assert pids(sturdy) == before


@pytest.mark.slow
def test_a_redis_that_hangs_longer_than_the_lease_loses_and_repeats_no_job(sturdy: Daemon):
    job_id = hold(sturdy)
    before = pids(sturdy)
    server = psutil.Process(sturdy.pid("server"))
    server.suspend()
    wait_for(LEASE_S + 2)
    server.resume()
    let_go(sturdy)
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 1, STEPS)
    assert pids(sturdy) == before


@pytest.mark.slow
def test_stop_is_quick_while_redis_hangs_and_start_resumes_the_job(sturdy: Daemon):
    job_id = hold(sturdy)
    doomed = sturdy.processes()
    psutil.Process(sturdy.pid("server")).suspend()
    let_go(sturdy)
    begun = time.monotonic()
    sturdy.stop()
    assert time.monotonic() - begun < 8
    wait_until(lambda: all(map(gone, doomed)))
    sturdy.start()
    job = sturdy.wait(job_id)
    assert (job["status"], steps(sturdy, job_id)) == ("finished", STEPS)


@pytest.mark.slow
def test_worker_that_hangs_is_replaced_and_its_job_resumed(sturdy: Daemon):
    job_id = hold(sturdy)
    worker = psutil.Process(sturdy.pid("worker"))
    worker.suspend()
    wait_until(lambda: gone(worker), timeout_s=3 * HUNG_S)
    let_go(sturdy)
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 2, STEPS)
    assert "train-0: hangs: no heartbeat" in sturdy.home.log.read_text()


@pytest.mark.slow
def test_gateway_that_hangs_is_replaced(make_daemon: MakeDaemon):
    daemon = make_daemon(http_port=0)
    daemon.start()
    wait_until(lambda: daemon.status()["http"]["url"])
    gateway = psutil.Process(daemon.status()["http"]["pid"])
    wait_for(HUNG_S + 2)
    assert daemon.status()["http"]["pid"] == gateway.pid  # it is only idle
    gateway.suspend()
    wait_until(lambda: gone(gateway), timeout_s=3 * HUNG_S)
    wait_until(lambda: daemon.status()["http"]["url"], timeout_s=20)
    assert daemon.status()["http"]["pid"] != gateway.pid


def test_status_answers_while_the_zygote_is_busy(sturdy: Daemon):
    zygote = psutil.Process(sturdy.pid("zygote"))
    zygote.suspend()  # as in a load that takes minutes
    try:
        begun = time.monotonic()
        status = sturdy.status()
        assert time.monotonic() - begun < 4
        assert status["zygote"]["state"] == "loading"
    finally:
        zygote.resume()
    wait_until(sturdy.is_settled)


# --- stops and starts that are disturbed --------------------------------------------------------


def warmd(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "warmd.cli", "--home", str(daemon.home.path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], *, timeout_s: float = 30.0) -> int:
    try:
        process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    return process.returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble", ["horse", "worker", "zygote", "server", "supervisor", "stop --now", "SIGTERM"]
)
def test_stop_ends_soon_and_loses_nothing_whatever_happens_meanwhile(sturdy: Daemon, trouble: str):
    job_id = hold(sturdy)
    guardian = psutil.Process(sturdy.pid("supervisor")).parent()
    assert guardian is not None
    assert guardian.cmdline()[-2:] == ["-m", "warmd.daemon"]  # never anybody else's process
    is_victim = trouble not in ("stop --now", "SIGTERM")
    doomed = [psutil.Process(sturdy.pid(trouble))] if is_victim else []
    stopping = warmd(sturdy, "stop")
    wait_until(lambda: sturdy.status()["daemon"]["stopping"])
    for process in doomed:
        process.kill()
    if trouble == "stop --now":
        assert ended(warmd(sturdy, "stop", "--now")) == 0
    if trouble == "SIGTERM":
        guardian.terminate()
        guardian.terminate()
    let_go(sturdy)
    assert ended(stopping) == 0
    wait_until(lambda: not processes_of(sturdy.home) and gone(guardian))
    sturdy.start()
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 2, STEPS)


@pytest.mark.slow
def test_of_two_starts_at_once_one_wins_and_the_other_is_told(make_daemon: MakeDaemon):
    daemon = make_daemon()
    model = f"tiny={daemon.config.models[0].path}"
    starting = [warmd(daemon, "start", "--model", model) for _ in range(2)]
    assert sorted(ended(process) for process in starting) == [0, 2]
    assert daemon.wait(daemon.submit())["status"] == "finished"


@pytest.mark.slow
def test_start_outlives_a_kill_of_the_supervisor_and_yields_to_a_stop(make_daemon: MakeDaemon):
    daemon = make_daemon()
    model = f"tiny={daemon.config.models[0].path}"
    starting = warmd(daemon, "start", "--model", model)
    state: Any = wait_until(daemon.home.read_state)
    os.kill(state["pid"], signal.SIGKILL)
    assert ended(starting) == 0
    daemon.stop()
    starting = warmd(daemon, "start", "--model", model)

    def stopped() -> bool:
        with contextlib.suppress(WarmdError):
            daemon.stop()
            return True
        return False

    wait_until(stopped)
    assert ended(starting) == 3
    assert not daemon.home.is_locked()


@pytest.mark.slow
def test_signal_in_a_daemon_s_first_moment_ends_it(make_daemon: MakeDaemon):
    daemon = make_daemon()
    daemon.home.create()
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-m", "warmd.daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(orjson.dumps(daemon.config.to_json()))
        wait_until(psutil.Process(process.pid).children)
        process.terminate()
        assert process.wait(20) == 0
        assert not daemon.home.is_locked()


# --- a server whose replies get lost ------------------------------------------------------------


class Wire:
    """A socket in front of a server that can lose a reply: forwarded, done, never answered."""

    def __init__(self, path: Path, server: Path) -> None:
        self.lose: Sequence[bytes] = ()  # parts of the requests whose replies are dropped
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def has_lost_it(self) -> bool:
        """Whether the reply that was to get lost has been."""
        return not self.lose

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(str(self._server))
            lost = False
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data or (source is server and lost):
                        return
                    if source is client and self.lose and all(w in data for w in self.lose):
                        lost, self.lose = True, ()
                    (server if source is client else client).sendall(data)


@pytest.mark.slow
def test_a_lost_reply_of_redis_loses_no_job(make_daemon: MakeDaemon):
    daemon = make_daemon()
    daemon.home.create()
    real, wire_path = daemon.folder / "real.sock", daemon.folder / "wire.sock"
    options = ["--port", "0", "--unixsocket", str(real), "--save", "", "--dir", str(daemon.folder)]
    server = subprocess.Popen([find_binary(None), *options], stdout=subprocess.DEVNULL)
    try:
        wait_until(real.exists)
        wire = Wire(wire_path, real)
        daemon.config.__dict__["redis_url"] = f"unix://{wire_path}"
        daemon.start()
        for lost in (
            (b"BLMOVE",),  # popped, but the worker does not know
            (b"EXEC", b"warmd_execution"),  # begun
            (b"HMGET", b"ZSCORE"),  # looked at, while it runs
            (b"XADD",),
            (b"EXEC", b"finished"),
        ):
            # Held at its third step, so that it is still there when it is looked at.
            (daemon.folder / "calls").unlink(missing_ok=True)
            (daemon.folder / "gate").touch()
            with frozen(daemon, "worker"):
                job_id = daemon.submit("behaviours:gated")
                wire.lose = lost
            if b"finished" not in lost:
                wait_until(wire.has_lost_it)
            let_go(daemon)
            job = daemon.wait(job_id, timeout_s=20)
            assert wire.has_lost_it(), "the reply that was to get lost was never asked for"
            assert (job["status"], steps(daemon, job_id)) == ("finished", STEPS)
        connection = daemon.client.connection
        assert connection.keys("warmd:taken:*") == []
        assert connection.zcard("rq:wip:train") == 0
        daemon.stop(now=True)
        wire.close()
    finally:
        server.kill()
        server.wait()


# --- a full disk --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for three megabytes."""
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)]
    mounts = shutil.which("mount") and not subprocess.run(command, capture_output=True).returncode
    needs(mounts, "the right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(disk: Path, *, leave_bytes: int) -> None:
    space = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(space.f_bavail * space.f_frsize - leave_bytes))


def test_full_disk_refuses_a_job_and_keeps_what_the_running_one_had(
    battered: Daemon, small_disk: Path
):
    runs, aside = battered.home.runs, battered.home.path / "aside"
    runs.rename(aside)
    runs.symlink_to(small_disk)
    try:
        job_id = hold(battered)
        fill(small_disk, leave_bytes=30_000)
        let_go(battered)
        job = battered.wait(job_id)
        assert job["status"] == "failed"
        assert "No space left on device" in job["error"]
        assert len(list((runs / job_id / "checkpoints").iterdir())) >= 2
        (small_disk / "filler").unlink()
        fill(small_disk, leave_bytes=0)
        with pytest.raises(SpecError, match=r"cannot write a run directory.*No space left"):
            battered.submit()
        assert [path.name for path in runs.iterdir() if path.is_dir()] == [job_id]
        (small_disk / "filler").unlink()
        battered.client.resume(job_id)
        assert battered.wait(job_id)["status"] == "finished"
        assert steps(battered, job_id) == STEPS
    finally:
        runs.unlink()
        aside.rename(runs)


# --- many jobs, many kills ----------------------------------------------------------------------


@pytest.mark.slow
def test_two_hundred_jobs_leave_no_descriptor_thread_or_memory_behind(make_daemon: MakeDaemon):
    daemon = make_daemon()
    daemon.start()

    def run(number: int) -> None:
        for job_id in [daemon.submit(samples=1, save_every=100) for _ in range(number)]:
            assert daemon.wait(job_id, timeout_s=120)["status"] == "finished"

    processes = [psutil.Process(pid) for pid in pids(daemon)]

    def taken() -> list[tuple[int, int, int]]:
        return [(p.num_fds(), p.num_threads(), p.memory_info().rss) for p in processes]

    # The supervisor keeps as many connections as it ever used at once: its own, that of whoever
    # asks, that of what removes old jobs. It is to have them all now, not when these coincide.
    supervisor = processes[0]

    def descriptors_unasked() -> int:
        # Its own three threads: main, control, retention. Whoever asks has one more, as long as it
        # takes: the gateway now and then, and at first perhaps who started it.
        wait_until(lambda: supervisor.num_threads() == 3)
        return supervisor.num_fds()

    at_first = descriptors_unasked()
    with ThreadPoolExecutor(8) as many:

        def has_more_when_asked_by_many() -> bool:
            list(many.map(lambda _: control.status(daemon.config), range(64)))
            return descriptors_unasked() >= at_first + 3

        wait_until(has_more_when_asked_by_many)
    run(20)
    # A job is finished before its horse has gone and all have closed their ends of the line to it.
    wait_until(lambda: not processes[1].children())
    wait_for(0.5)
    before = taken()
    run(180)
    wait_until(lambda: [t[:2] for t in taken()] == [t[:2] for t in before])
    assert all(now[2] - then[2] < 5e6 for now, then in zip(taken(), before, strict=True))
    statuses = [process.status() for process in daemon.processes()]
    assert psutil.STATUS_ZOMBIE not in statuses
