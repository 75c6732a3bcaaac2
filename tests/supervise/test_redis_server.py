"""Redis: the embedded one on a socket, and external ones with a password or TLS."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from daemons import Daemon
from desks import Desk
from hanging_proxy import HangingProxy
from needs import needs
from ports import free_port
from shell import warmd
from small_disks import small_disk
from waiting import wait_until

from warmd.daemon.client import control
from warmd.daemon.host.home import Home
from warmd.daemon.queue import keys
from warmd.daemon.supervise.redis_server import EmbeddedRedis, find_binary
from warmd.jobs.errors import Conflict, SpecError, Unavailable, WarmdError

MakeDaemon = Callable[..., Daemon]
PASSWORD = "correct horse"


def debian_redis() -> str:
    """The second real server."""
    binary = shutil.which("redis-server")
    needs(binary, "redis-server")
    assert binary is not None
    return binary


@pytest.fixture
def home(make_daemon: MakeDaemon) -> Home:
    home = make_daemon().home
    home.create()
    return home


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_the_embedded_redis_listens_only_on_a_private_socket(home: Home, kind: str):
    binary = find_binary(None if kind == "valkey" else debian_redis())
    server = EmbeddedRedis(home, binary)
    server.start()
    try:
        with keys.connect(server.url) as connection:
            assert connection.config_get("port") == {"port": "0"}
            assert connection.config_get("appendfsync") == {"appendfsync": "always"}
        assert home.sockets.stat().st_mode & 0o077 == 0
    finally:
        server.stop()


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_the_embedded_redis_keeps_every_acknowledged_write_after_kill_9(home: Home, kind: str):
    server = EmbeddedRedis(home, find_binary(None if kind == "valkey" else debian_redis()))
    server.start()
    with keys.connect(server.url) as connection:
        for number in range(200):
            connection.rpush("numbers", number)
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    server.start()
    try:
        with keys.connect(server.url) as connection:
            found = connection.lrange("numbers", 0, -1)
        assert found == [str(number).encode() for number in range(200)]
    finally:
        server.stop()


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_redis_ends_on_request_while_it_writes_a_new_append_only_file(home: Home, kind: str):
    server = EmbeddedRedis(home, find_binary(None if kind == "valkey" else debian_redis()))
    server.start()
    with keys.connect(server.url) as connection:
        connection.config_set("appendonly", "no")
        connection.set("kept", 1)
        connection.config_set("appendonly", "yes")  # it ends only when this file is written
    process = server.process
    assert process is not None
    server.stop()
    assert process.returncode == 0
    server.start()
    try:
        with keys.connect(server.url) as connection:
            assert connection.get("kept") == b"1"
    finally:
        server.stop()


def test_two_redis_processes_never_share_a_folder(home: Home):
    first, second = (EmbeddedRedis(home, find_binary(None)) for _ in range(2))
    first.start()
    assert first.process is not None
    second.start()  # tells the first to end, as after a daemon that was killed
    try:
        assert first.process.poll() == 0
        assert second.is_ready()
    finally:
        second.stop()


def test_a_redis_that_does_not_start_reports_why(home: Home):
    server = EmbeddedRedis(home, shutil.which("false") or "")
    with pytest.raises(Unavailable, match="ended at once"):
        server.start()


def test_a_configured_redis_program_that_does_not_exist_is_refused():
    with pytest.raises(SpecError, match="must be a program"):
        find_binary("/nonexistent/server")


@pytest.mark.slow
def test_a_full_disk_of_redis_is_named_and_waited_for(make_daemon: MakeDaemon):
    daemon = make_daemon()
    daemon.home.create()
    with small_disk(daemon.home.redis_folder, "2m") as disk:
        disk.chmod(0o700)
        daemon.start()
        job_id = daemon.submit(epochs=8)
        wait_until(lambda: daemon.events(job_id, "step"), timeout_s=60)
        with contextlib.suppress(OSError), open(disk / "filler", "wb") as file:
            while True:
                file.write(bytes(4096))

        wait_until(lambda: not control.ready(daemon.config, timeout_s=5.0)["takes_jobs"])
        full = re.escape(f"the disk of {disk} is full")
        with pytest.raises(Unavailable, match=f"takes no jobs: {full}"):
            control.check_ready(daemon.config, timeout_s=5.0)
        for request in (daemon.client.jobs.all, daemon.status):
            with pytest.raises(WarmdError, match=f"{full}, and Redis waits for space"):
                request()
        with pytest.raises(Conflict, match=f"a daemon already runs .*; {full}"):
            daemon.start()
        (disk / "filler").unlink()
        assert daemon.wait(job_id, timeout_s=120)["status"] == "finished"
        numbers = [event["step"] for event in daemon.events(job_id, "step")]
        assert numbers == list(range(1, len(numbers) + 1))
        assert daemon.home.log.read_text().count("Redis is unreachable") <= 4
        daemon.stop()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def external(folder: Path, *options: str) -> Iterator[int]:
    """An external Redis on a loopback port."""
    port = free_port()
    process = subprocess.Popen(
        [
            *(debian_redis(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--requirepass", PASSWORD, "--save", "", *options),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: answers(port))
        yield port
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_homes_on_one_redis_with_a_password_must_share_their_run_directories(
    make_daemon: MakeDaemon, tmp_path: Path
):
    with external(tmp_path) as port:
        url = f"redis://:correct%20horse@127.0.0.1:{port}/0"
        first, second, third = (make_daemon(redis_url=url) for _ in range(3))
        first.home.create()
        job_id = first.submit()
        with pytest.raises(WarmdError, match=f"run directories in {first.home.runs},"):
            second.start()
        with pytest.raises(Conflict, match="redis_url: the jobs there"):
            second.submit()
        assert not list(second.home.runs.glob("grpo-*"))
        third.home.path.mkdir(parents=True)
        third.home.runs.symlink_to(first.home.runs)
        third.start()
        status = third.status()
        assert status["server"]["embedded"] is False
        assert "correct" not in status["server"]["url"]
        assert third.wait(job_id)["status"] == "finished"
        third.stop()
        assert "correct" not in third.home.log.read_text()


@pytest.mark.slow
def test_a_wrong_redis_password_is_reported_without_showing_it(
    make_daemon: MakeDaemon, tmp_path: Path
):
    with external(tmp_path) as port:
        daemon = make_daemon(redis_url=f"redis://:secret123@127.0.0.1:{port}/0")
        with pytest.raises(WarmdError, match="refuses the user or the password") as caught:
            daemon.start()
        assert "secret123" not in str(caught.value)


def test_an_unreachable_redis_is_reported(make_daemon: MakeDaemon):
    daemon = make_daemon(redis_url="redis://127.0.0.1:1/0")
    with pytest.raises(WarmdError, match=r"no Redis at redis://127.0.0.1:1/0"):
        daemon.start()


@contextmanager
def external_tls(folder: Path, *more: str) -> Iterator[tuple[int, Path]]:
    """A Redis with a password and TLS; its port and its certificate."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    tls_port = free_port()
    options = ["--tls-port", str(tls_port), "--tls-cert-file", str(certificate)]
    options += ["--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with external(folder, *options, *more):
        wait_until(lambda: answers(tls_port))  # which Redis opens after the other one
        yield tls_port, certificate


def test_redis_may_require_a_client_certificate(tmp_path: Path):
    required = ("--tls-auth-clients", "yes", "--tls-ca-cert-file", str(tmp_path / "cert.pem"))
    with external_tls(tmp_path, *required) as (port, certificate):
        url = tls_url(port, certificate)
        with keys.connect_once(url) as connection, pytest.raises(redis.ConnectionError):
            connection.ping()
        own = f"&ssl_certfile={certificate}&ssl_keyfile={certificate.with_name('key.pem')}"
        with keys.connect_once(url + own) as connection:
            assert connection.ping()


def tls_url(port: int, certificate: Path) -> str:
    return f"rediss://:correct%20horse@127.0.0.1:{port}/0?ssl_ca_certs={certificate}"


@pytest.mark.nightly(part="networks", catches="a job that is lost when Redis hangs behind TLS")
def test_jobs_run_through_redis_over_tls_also_when_it_hangs_for_20_s(
    make_daemon: MakeDaemon, tmp_path: Path
):
    with external_tls(tmp_path) as (port, certificate):
        proxy = HangingProxy(port)
        try:
            daemon = make_daemon(redis_url=tls_url(proxy.port, certificate))
            daemon.start()
            assert daemon.wait(daemon.submit())["status"] == "finished"
            running = daemon.submit(epochs=4)
            waiting = daemon.submit()
            wait_until(lambda: daemon.events(running, "step"), timeout_s=60)
            proxy.hang()
            begun = time.monotonic()
            done = warmd("queue", home=daemon.home.path)
            said_after = time.monotonic() - begun
            time.sleep(max(20 - (time.monotonic() - begun), 0))
            proxy.resume()
            assert said_after < 20
            assert done.is_refusal(3)
            assert "does not answer" in done.err
            assert "correct" not in done.err
            for job_id in (running, waiting, daemon.submit()):
                assert daemon.wait(job_id, timeout_s=180)["status"] == "finished"
                steps = [event["step"] for event in daemon.events(job_id, "step")]
                assert sorted(set(steps)) == list(range(1, steps[-1] + 1))
            assert len(daemon.events(waiting, "started")) == 1
        finally:
            proxy.close()


@pytest.mark.parametrize(
    ("trouble", "cure", "words"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "maxmemory"),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "read only replica"),
    ],
)
def test_a_read_only_redis_is_reported_in_one_line_and_no_job_is_left(
    desk: Desk, trouble: tuple[str, ...], cure: tuple[str, ...], words: str
):
    redis = desk.client.connection
    redis.execute_command(*trouble)
    try:
        done = desk.warmd(*desk.grpo)
        assert done.is_refusal(3)
        assert "Redis takes no changes: " in done.err
        assert words in done.err
    finally:
        redis.execute_command(*cure)
    assert desk.client.jobs.all() == []
    assert list(desk.home.runs.glob("grpo-*")) == []
