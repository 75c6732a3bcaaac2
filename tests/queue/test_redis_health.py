"""Checks of a Redis before it holds jobs, and Redis behind Sentinel."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import redis
from needs import needs
from ports import free_port
from waiting import wait_until
from workplaces import Workplace

from warmd.configs.sentinel import parse_sentinel
from warmd.configs.values import ConfigError, redacted_url, redis_url
from warmd.daemon.queue import health, keys, rights
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.queue.reasons import reason
from warmd.daemon.supervise.redis_server import check_redis, find_binary
from warmd.jobs.errors import Unavailable


@pytest.fixture
def place(shared_place: Workplace) -> Iterator[Workplace]:
    """The same for all tests, with its settings restored."""
    names = ("maxmemory", "maxmemory-policy", "appendonly", "save")
    before = {name: shared_place.connection.config_get(name)[name] for name in names}
    yield shared_place
    for name, text in before.items():
        shared_place.connection.config_set(name, text or "")


def test_the_embedded_redis_is_healthy(place: Workplace):
    found = health.check(place.connection)
    assert (found.fault, found.warnings) == (None, ())


def test_a_redis_that_may_delete_jobs_is_refused(place: Workplace):
    place.connection.config_set("maxmemory-policy", "allkeys-lru")
    (warning,) = health.check(place.connection).warnings
    assert "CONFIG SET maxmemory-policy noeviction" in warning
    place.connection.config_set("maxmemory", "100mb")
    with pytest.raises(Unavailable, match="maxmemory-policy is allkeys-lru: when memory is full"):
        check_redis(place.connection, "redis://host")


def documented_rights() -> list[str]:
    """The rights of the user that docs/operations.md creates for warmd, with a password."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("ACL SETUSER ")]
    return line.replace("PASSWORD", "secret").split()[3:]


def debian_redis() -> str:
    """The second real server."""
    binary = shutil.which("redis-server")
    needs(binary, "redis-server")
    assert binary is not None
    return binary


@pytest.mark.parametrize("binary", ["valkey", "redis"])
@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ("", []),
        ("-@scripting", ["EVAL"]),
        ("resetchannels", ["channel warmd:steer"]),
        ("-blmove -xread -multi", ["BLMOVE", "XREAD", "MULTI"]),
        ("-client|unblock", ["CLIENT UNBLOCK"]),
        ("-hkeys", ["HKEYS"]),
        ("resetkeys ~warmd:*", ["keys rq:*"]),
        ("resetkeys ~rq:*", ["keys warmd:*"]),
        ("-publish", ["PUBLISH"]),
    ],
)
def test_rights_that_a_redis_user_lacks_are_named(
    tmp_path: Path, binary: str, changes: str, missing: list[str]
):
    program = find_binary(None) if binary == "valkey" else debian_redis()
    with server(tmp_path, program=program) as port:
        with keys.connect_once(f"redis://:secret@127.0.0.1:{port}") as admin:
            rights = [*documented_rights(), *changes.split()]
            admin.execute_command("ACL", "SETUSER", "warmd", *rights)
        url = f"redis://warmd:secret@127.0.0.1:{port}/0"
        with keys.connect_once(url) as connection:
            found = health.check(connection)
            assert not list(connection.scan_iter())
            if not missing:
                assert found.fault is None
                return
            named = ", ".join(missing)
            with pytest.raises(Unavailable, match=re.escape(f"refuses its user {named}: docs/")):
                check_redis(connection, url)


@pytest.mark.slow
def test_jobs_run_with_the_documented_rights_and_no_untried_command(make_daemon, tmp_path: Path):
    with server(tmp_path, program=debian_redis()) as port:
        admin = keys.connect_once(f"redis://:secret@127.0.0.1:{port}/0")
        admin.execute_command("ACL", "SETUSER", "warmd", *documented_rights())
        admin.config_resetstat()
        daemon = make_daemon(redis_url=f"redis://warmd:secret@127.0.0.1:{port}/0")
        daemon.start()
        first = daemon.submit()
        second = daemon.submit(after=first)
        scheduled = daemon.submit(at=datetime.now().astimezone() + timedelta(seconds=1))
        daemon.client.jobs.pause(second)
        for job_id in (first, scheduled):
            assert daemon.wait(job_id)["status"] == "finished"
        daemon.client.jobs.unpause(second)
        assert daemon.wait(second)["status"] == "finished"
        running = daemon.submit(epochs=50)
        wait_until(lambda: daemon.events(running, "step"), timeout_s=60)
        daemon.client.jobs.cancel(running)
        assert daemon.wait(running)["status"] == "stopped"
        daemon.client.jobs.remove(first)
        daemon.stop()
        # CONFIG GET is optional: providers forbid it.
        assert {entry["object"] for entry in admin.acl_log()} <= {b"config|get", "config|get"}
        used = {name.removeprefix("cmdstat_") for name in admin.info("commandstats")}
        tried = {"|".join(line.split()[:2]).lower() for line in rights.COMMANDS.splitlines()}
        tried |= {line.split()[0].lower() for line in rights.COMMANDS.splitlines() if line}
        tried |= {"subscribe", "unsubscribe", "publish", "info", "config|get", "config|resetstat"}
        tried |= {"auth", "hello", "select", "ping", "client|setinfo", "client|setname", "acl|log"}
        assert used <= tried, used - tried
        admin.close()


@pytest.mark.parametrize(
    ("save", "warning"), [("", "keeps nothing on disk"), ("3600 1", "writes snapshots only")]
)
def test_a_redis_without_persistence_is_used_with_a_warning(place: Workplace, save, warning):
    place.connection.config_set("appendonly", "no")
    place.connection.config_set("save", save)
    found = health.check(place.connection)
    assert found.fault is None
    (said,) = found.warnings
    assert warning in said
    assert said.endswith("CONFIG SET appendonly yes")


@pytest.mark.parametrize(
    ("url", "sentinels", "primary"),
    [
        ("redis+sentinel://a/mymaster", (("a", 26379),), "redis://primary/0"),
        (
            "redis+sentinel://me:p%40ss@a:1,b,[::1]:3/jobs/2",
            (("a", 1), ("b", 26379), ("::1", 3)),
            "redis://me:p%40ss@primary/2",
        ),
        (
            "rediss+sentinel://a/m?ssl_certfile=/c.pem&sentinel_password=x",
            (("a", 26379),),
            "rediss://primary/0?ssl_certfile=%2Fc.pem",
        ),
    ],
)
def test_sentinel_urls_are_accepted(url, sentinels, primary):
    assert redis_url("redis_url", url) == url
    parsed = parse_sentinel(url)
    assert (parsed.sentinels, parsed.primary) == (sentinels, primary)
    assert parsed.is_tls == url.startswith("rediss")


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://:hunter2@a",
        "redis+sentinel://:hunter2@a:0/m",
        "redis+sentinel://:hunter2@a,,b/m",
        "redis+sentinel://:hunter2@a/m/x",
        "redis+sentinel://:hunter2@/m",
        "redis+sentinel://:hunter2@a:99999/m",
        "redis+sentinel://a/m?sentinel_password=hunter2&x",
    ],
)
def test_wrong_sentinel_urls_are_refused_without_their_password(url):
    with pytest.raises(ConfigError, match="redis_url: must be redis://") as caught:
        redis_url("redis_url", url)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in redacted_url(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://127.0.0.1:PORT/0", "needs a password: redis://:PASSWORD@HOST:PORT/DB"),
        ("redis://:wrong@127.0.0.1:PORT/0", "refuses the user or the password of the URL"),
        ("rediss://:secret@127.0.0.1:PORT/0", "if that port has no TLS, use redis:// instead"),
        (
            "rediss://:secret@127.0.0.1:PORT/0?ssl_ca_certs=/none.pem",
            "redis_url: ssl_ca_certs must be a file that can be read, got /none.pem",
        ),
        ("redis://:secret@127.0.0.1:1/0", "no Redis at redis://***@127.0.0.1:1/0: Error 111"),
    ],
)
def test_the_cause_is_named_when_redis_cannot_be_used(tmp_path: Path, url: str, words: str):
    with server(tmp_path) as port:
        wanted = url.replace("PORT", str(port))
        connection = keys.connect_once(wanted, timeout_s=0.5)
        with closing(connection), pytest.raises(redis.RedisError) as caught:
            connection.ping()
        text = reason(caught.value, wanted)
        assert words in text
        assert "wrong" not in text
        assert "secret" not in text


def ping(url: str) -> bool:
    with suppress(redis.RedisError), keys.connect_once(url, timeout_s=1.0) as connection:
        return bool(connection.ping())
    return False


@contextmanager
def server(
    folder: Path, *options: str, sentinel: str | None = None, program: str | None = None
) -> Iterator[int]:
    """A Redis with a password on a loopback port, or a Sentinel with this configuration."""
    port = free_port()
    config = folder / f"{port}.conf"
    lines = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", *options]
    config.write_text("\n".join([*lines, sentinel or "requirepass secret"]) + "\n")
    mode = [] if sentinel is None else ["--sentinel"]
    command = [program or find_binary(None), str(config), *mode]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        user = ":secret@" if sentinel is None else ""
        wait_until(lambda: ping(f"redis://{user}127.0.0.1:{port}"))
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_jobs_move_to_the_new_primary_that_sentinel_names():
    with tempfile.TemporaryDirectory(prefix="warmd-") as text:
        folder = Path(text)
        replication = ("masterauth secret", 'save ""', "repl-diskless-sync-delay 0")
        with (
            replicated(folder, replication) as (first, second, watcher),
            closing(keys.connect(f"redis+sentinel://:secret@127.0.0.1:{watcher}/jobs")) as primary,
            closing(keys.connect(f"redis://:secret@127.0.0.1:{second}")) as replica,
            closing(keys.connect(f"redis://127.0.0.1:{watcher}")) as sentinel,
        ):
            store = JobStore(primary)
            store.enqueue("infer-20260101-000000-aaaa", "infer")
            wait_until(lambda: replica.exists("rq:job:infer-20260101-000000-aaaa"))

            def knows_replica() -> bool:
                return len(sentinel.sentinel_slaves("jobs")) == 1

            wait_until(knows_replica)
            with (
                suppress(redis.RedisError),
                keys.connect_once(f"redis://:secret@127.0.0.1:{first}") as killed,
            ):
                killed.shutdown(nosave=True)

            def is_moved() -> bool:
                with suppress(redis.RedisError):
                    return store.fetch("infer-20260101-000000-aaaa") is not None and bool(
                        store.connection.set("written", 1)
                    )
                return False

            wait_until(is_moved, timeout_s=60)
            assert replica.get("written") == b"1"


@contextmanager
def replicated(folder: Path, options: tuple[str, ...]) -> Iterator[tuple[int, int, int]]:
    """A primary, its replica, and a Sentinel that monitors them; the ports of all three."""
    with (
        server(folder, *options) as first,
        server(folder, *options, f"replicaof 127.0.0.1 {first}") as second,
    ):
        monitored = [
            f"sentinel monitor jobs 127.0.0.1 {first} 1",
            "sentinel auth-pass jobs secret",
            "sentinel down-after-milliseconds jobs 500",
            "sentinel failover-timeout jobs 3000",
        ]
        with server(folder, sentinel="\n".join(monitored)) as watcher:
            yield first, second, watcher
