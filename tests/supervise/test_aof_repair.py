"""Damaged append-only files: the embedded Redis starts with all that can be read before the damage.

The files are written by real servers, damaged as a power loss or a bad disk does, and read again by
real servers.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from desks import kill_redis
from hypothesis import given, strategies as st
from killed import killed_at_call
from needs import needs
from small_disks import fill, make_room, small_disk

from warmd.daemon.host.home import Home
from warmd.daemon.queue import keys
from warmd.daemon.supervise import aof_format, aof_repair
from warmd.daemon.supervise.redis_server import EmbeddedRedis, find_binary
from warmd.jobs.errors import Unavailable

SERVERS = (
    "valkey",
    pytest.param(
        "redis", marks=pytest.mark.nightly(part="homes", catches="a file of Redis itself")
    ),
)
TRANSACTION = b"".join(
    b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    for words in ([b"MULTI"], [b"SET", b"a", b"1"], [b"SET", b"b", b"2"], [b"EXEC"])
)


def program(kind: str) -> str:
    if kind == "valkey":
        return find_binary(None)
    binary = shutil.which("redis-server")
    needs(binary, "redis-server")
    assert binary is not None
    return binary


class Store:
    """The files of an embedded Redis in a home, which is started only to write and to read."""

    def __init__(self, folder: Path, kind: str = "valkey") -> None:
        self.home = Home(folder / "home")
        self.home.create()
        self.binary = program(kind)
        self.repairs: list[aof_repair.Repair] = []

    def run(self, use: Callable[[Any], Any]) -> Any:
        server = EmbeddedRedis(self.home, self.binary)
        server.start()
        try:
            self.repairs = server.repairs
            with keys.connect(server.url) as connection:
                return use(connection)
        finally:
            kill_redis(server)  # all that it has acknowledged is in its files

    def numbers(self) -> list[int]:
        return [int(number) for number in self.run(lambda redis: redis.lrange("n", 0, -1))]

    def write(self, count: int) -> None:
        self.run(lambda redis: [redis.rpush("n", number) for number in range(count)])

    @property
    def inside(self) -> Path:
        return self.home.redis_folder / aof_format.FOLDER

    @property
    def manifest(self) -> Path:
        return self.inside / aof_format.MANIFEST

    @property
    def last(self) -> Path:
        found = aof_format.parts_of(self.home.redis_folder)
        assert found is not None
        return found.parts[-1].path

    @property
    def copies(self) -> list[Path]:
        return sorted(self.home.damaged.iterdir()) if self.home.damaged.is_dir() else []


@pytest.fixture(params=SERVERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(tmp_path, request.param)


def rewritten(store: Store, count: int) -> None:
    """Write numbers of which the first half is in a base file that Redis has rewritten."""

    def use(redis: Any) -> None:
        for number in range(count // 2):
            redis.rpush("n", number)
        redis.bgrewriteaof()
        deadline = time.monotonic() + 30
        while redis.info("persistence")["aof_rewrite_in_progress"]:
            assert time.monotonic() < deadline
        for number in range(count // 2, count):
            redis.rpush("n", number)

    store.run(use)


TAILS = {
    "zeros": bytes(4096),
    "one zero": b"\0",
    "junk": random.Random(1).randbytes(333),
    "text": b"hello\r\n",
    "a cut command": b"*3\r\n$5\r\nRPUSH\r\n$1\r\nn\r\n$2\r\n",
    "a cut number": b"*",
    "a cut transaction": TRANSACTION[:-20],
    "a transaction without EXEC": TRANSACTION[: TRANSACTION.index(b"*1\r\n$4\r\nEXEC")],
    "zeros in a transaction": TRANSACTION[:40] + bytes(512),
    "zeros from within a value to the end": b"*3\r\n$5\r\nRPUSH\r\n$1\r\nn\r\n$90\r\n7" + bytes(91),
    "zeros within a value": b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1024\r\n"
    + b"7" * 300
    + bytes(512)
    + b"7" * 212
    + b"\r\n"
    + TRANSACTION,
    "an unknown command": b"*3\r\n$5\r\nRP\x01SH\r\n$1\r\nn\r\n$1\r\n7\r\n",
    "an unknown word": b"*3\r\n$5\r\nRQUSH\r\n$1\r\nn\r\n$1\r\n7\r\n",
}


OTHER_TAILS = pytest.mark.nightly(
    part="homes", catches="a damaged tail of a kind that keeps Redis from starting"
)
DAILY_TAILS = ("zeros", "a cut command", "a transaction without EXEC", "zeros within a value")


@pytest.mark.parametrize(
    "tail",
    [pytest.param(tail, marks=() if tail in DAILY_TAILS else OTHER_TAILS) for tail in TAILS],
)
def test_a_damaged_tail_is_cut_off_and_kept_as_a_copy(store: Store, tail: str):
    store.write(5)
    raw = store.last.read_bytes()
    store.last.write_bytes(raw + TAILS[tail])
    damaged = store.last
    changed_at = damaged.stat().st_mtime
    assert store.numbers() == [0, 1, 2, 3, 4]
    (repair,) = store.repairs
    assert repair.cut_bytes == len(TAILS[tail])
    assert repair.last_at == changed_at
    assert damaged.name in repair.fault
    copy = Path(repair.copy)
    assert (copy / damaged.name).read_bytes() == raw + TAILS[tail]
    assert (copy / aof_format.MANIFEST).is_file()
    store.run(lambda redis: redis.rpush("n", 5))
    assert not store.repairs
    assert store.numbers() == [0, 1, 2, 3, 4, 5]
    assert (copy / damaged.name).read_bytes() == raw + TAILS[tail]


def test_a_whole_file_is_left_alone(store: Store):
    rewritten(store, 6)
    before = store.manifest.read_bytes()
    assert store.numbers() == [0, 1, 2, 3, 4, 5]
    assert not store.repairs
    assert store.manifest.read_bytes() == before
    assert not store.copies


def test_the_time_of_the_last_command_is_that_of_its_annotation(store: Store):
    def use(redis: Any) -> None:
        redis.config_set("aof-timestamp-enabled", "yes")
        redis.rpush("n", 1)

    store.run(use)
    written_at = int(time.time())
    with store.last.open("ab") as file:
        file.write(bytes(100))
    os.utime(store.last, (1, 1))
    assert store.numbers() == [1]
    assert store.repairs[0].last_at is not None
    assert abs(store.repairs[0].last_at - written_at) <= 5
    assert "last command kept: 20" in store.repairs[0].describe()


def boundaries(raw: bytes) -> list[int]:
    """The ends of the commands in a file of numbers, with a transaction as one."""
    found = [0]
    for end in range(1, len(raw) + 1):
        piece = raw[found[-1] : end]
        if piece.startswith(b"*1\r\n$5\r\nMULTI"):
            is_whole = piece.endswith(b"EXEC\r\n")
        else:
            words = int(piece[1:2]) if piece[1:2].isdigit() else 0
            is_whole = piece.count(b"\r\n") == 1 + 2 * words and piece.endswith(b"\r\n")
        if is_whole:
            found.append(end)
    return found


def test_a_file_cut_at_any_byte_is_read_up_to_its_last_whole_command(tmp_path: Path):
    store = Store(tmp_path)
    store.write(3)
    raw = store.last.read_bytes() + TRANSACTION
    store.last.write_bytes(raw)
    ends = boundaries(raw)
    assert len(ends) >= 5
    path = tmp_path / "cut"
    for end in range(len(raw) + 1):
        path.write_bytes(raw[:end])
        found = aof_format.extent(path)
        assert found.end == max(one for one in ends if one <= end)
        assert (found.fault is None) == (end in ends)


@pytest.mark.nightly(part="homes", catches="a cut that Redis reads otherwise than warmd")
def test_a_redis_whose_file_is_cut_at_any_byte_starts(store: Store):
    store.write(3)
    raw = store.last.read_bytes() + TRANSACTION
    kept = shutil.copytree(store.home.redis_folder, store.home.path / "kept")
    for end in range(len(raw) - len(TRANSACTION) - 40, len(raw)):
        shutil.rmtree(store.home.redis_folder)
        shutil.copytree(kept, store.home.redis_folder)
        store.last.write_bytes(raw[:end])
        numbers = store.numbers()
        assert numbers == [0, 1, 2][: len(numbers)]
        is_whole = end in boundaries(raw)
        assert bool(store.repairs) != is_whole
        assert store.run(lambda redis: redis.mget("a", "b")) == [None, None]


@given(data=st.data())
def test_no_bytes_break_the_reader(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    commands = TRANSACTION + b"#TS:1700000000\r\n" + b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n"
    raw = bytearray(commands)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.mktemp("aof") / "file"
    path.write_bytes(bytes(raw))
    found = aof_format.extent(path)
    assert 0 <= found.end <= found.size == len(raw)
    assert (found.fault is None) == (found.end == found.size)
    path.write_bytes(bytes(raw[: found.end]))
    again = aof_format.extent(path)
    assert again.fault is None


def test_after_damage_in_the_middle_what_is_before_it_is_kept(store: Store):
    store.write(6)
    raw = bytearray(store.last.read_bytes())
    begin = boundaries(bytes(raw))[-4]  # of the fourth command
    raw[begin + 9 : begin + 13] = bytes(4)
    store.last.write_bytes(bytes(raw))
    assert store.numbers() == [0, 1, 2]
    assert store.repairs[0].cut_bytes == len(raw) - begin


def test_after_damage_in_an_earlier_file_later_ones_are_not_read(store: Store):
    store.write(4)
    first = store.last
    second = aof_format.new_part(store.inside, is_base=False)
    second.path.write_bytes(TRANSACTION)
    with store.manifest.open("a") as file:
        file.write(second.line)
    with first.open("ab") as file:
        file.write(bytes(10))
    assert store.numbers() == [0, 1, 2, 3]
    assert store.repairs[0].cut_bytes == 10 + len(TRANSACTION)
    assert store.run(lambda redis: redis.get("a")) is None
    assert (Path(store.repairs[0].copy) if store.repairs else store.copies[-1]).is_dir()


def corrupt(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(bytes(raw))


OTHER_BASES = pytest.mark.nightly(
    part="homes", catches="a damaged base file of a kind that keeps Redis from starting"
)


@pytest.mark.parametrize(
    "damage",
    [
        corrupt,
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-7]), marks=OTHER_BASES),
        pytest.param(lambda path: path.write_bytes(b""), marks=OTHER_BASES),
        pytest.param(lambda path: path.write_bytes(bytes(path.stat().st_size)), marks=OTHER_BASES),
        lambda path: path.unlink(),
    ],
    ids=["a changed byte", "cut", "empty", "zeros", "missing"],
)
def test_without_its_base_file_redis_starts_empty(store: Store, damage: Callable[[Path], None]):
    rewritten(store, 6)
    (base,) = store.inside.glob("*.base.rdb")
    damage(base)
    found = store.numbers()
    if base.exists() and not base.stat().st_size:  # an empty file is a whole one to Redis
        assert found == [3, 4, 5]
        return
    assert found == []
    assert store.repairs[0].last_at is None
    assert store.repairs[0].cut_bytes > 0
    store.write(2)
    assert store.numbers() == [0, 1]


MANIFESTS: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda raw: None,
    "empty": lambda raw: b"",
    "its first line": lambda raw: raw[: raw.index(b"\n") + 1],
    "half of its first line": lambda raw: raw[: raw.index(b"\n") // 2],
    "half of its second line": lambda raw: raw[: raw.index(b"\n") + 12],
    "each line twice": lambda raw: raw + raw,
    "the last line twice": lambda raw: raw + raw.splitlines(keepends=True)[-1],
    "zeros": lambda raw: bytes(len(raw)),
    "zeros at its end": lambda raw: raw + bytes(100),
    "junk at its end": lambda raw: raw + random.Random(2).randbytes(50),
    "no line end": lambda raw: raw.rstrip(b"\n"),
}


OTHER_MANIFESTS = pytest.mark.nightly(
    part="homes", catches="a damaged manifest of a kind with which Redis loses writes"
)
DAILY_MANIFESTS = ("missing", "half of its second line", "each line twice", "zeros")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=() if how in DAILY_MANIFESTS else OTHER_MANIFESTS)
        for how in MANIFESTS
    ],
)
def test_with_a_damaged_manifest_nothing_is_lost(store: Store, how: str):
    rewritten(store, 6)
    raw = MANIFESTS[how](store.manifest.read_bytes())
    if raw is None:
        store.manifest.unlink()
    else:
        store.manifest.write_bytes(raw)
    assert store.numbers() == [0, 1, 2, 3, 4, 5]
    if store.repairs:  # otherwise Redis could read it
        assert store.repairs[0].cut_bytes == 0
    store.run(lambda redis: redis.rpush("n", 6))
    assert store.numbers() == [0, 1, 2, 3, 4, 5, 6]


def test_both_manifest_and_tail_may_be_damaged(store: Store):
    store.write(4)
    with store.last.open("ab") as file:
        file.write(bytes(77))
    store.manifest.write_bytes(b"file appen")
    assert store.numbers() == [0, 1, 2, 3]
    assert [repair.cut_bytes for repair in store.repairs] == [77]


def test_the_one_file_of_redis_6_is_repaired(tmp_path: Path):
    folder, copies = tmp_path / "server", tmp_path / "damaged"
    folder.mkdir()
    path = folder / aof_format.NAME
    store = Store(tmp_path)
    rewritten(store, 6)
    snapshot = next(store.inside.glob("*.base.rdb")).read_bytes()
    damaged = snapshot + TRANSACTION + bytes(10)
    path.write_bytes(damaged)
    repair = aof_repair.Repairer(folder, copies).repair(dict)
    assert repair is not None
    assert repair.cut_bytes == 10 + len(TRANSACTION)  # no command is known
    assert path.read_bytes() == snapshot
    assert (Path(repair.copy) / path.name).read_bytes() == damaged


def test_a_snapshot_that_seems_to_end_one_byte_early_is_whole(store: Store):
    rewritten(store, 6)
    (base,) = store.inside.glob("*.base.rdb")
    raw = base.read_bytes()[: -aof_format._CHECKSUM_BYTES]
    assert raw.endswith(b"\xff\xff")  # the end of a list, and of the snapshot
    at = raw.index(b"ctime") + len(b"ctime\xc2")
    for time_ in range(1 << 16):
        raw = raw[:at] + time_.to_bytes(4, "little") + raw[at + 4 :]
        if aof_format._crc64(raw[:-1], 0) & 0xFF == 0xFF:  # fits at the end of the list, too
            break
    whole = raw + aof_format._crc64(raw, 0).to_bytes(aof_format._CHECKSUM_BYTES, "little")
    for commands in (b"", TRANSACTION):
        base.write_bytes(whole + commands)
        assert aof_format.extent(base) == aof_format.Extent(
            len(whole + commands), len(whole + commands)
        )
    with store.last.open("ab") as file:
        file.write(bytes(10))
    base.write_bytes(whole)
    assert store.numbers() == [0, 1, 2, 3, 4, 5]
    assert [repair.cut_bytes for repair in store.repairs] == [10]


def test_at_most_three_copies_are_kept(store: Store):
    store.write(1)
    for number in range(5):
        with store.last.open("ab") as file:
            file.write(bytes(10 + number))
        assert store.numbers() == [0]
    found = aof_repair.reports(store.home.damaged)
    assert [repair.cut_bytes for repair in found] == [14, 13, 12]
    assert len(store.copies) == 3


def test_a_disk_without_space_refuses_in_one_line_and_changes_nothing(tmp_path: Path):
    (tmp_path / "home").mkdir()
    with small_disk(tmp_path / "home", "2m"):
        store = Store(tmp_path)
        store.run(lambda redis: redis.set("k", b"1" * 600_000))
        with store.last.open("ab") as file:
            file.write(bytes(4096))
        fill(store.home.path, leave_bytes=200_000)
        before = {path: path.read_bytes() for path in store.inside.iterdir()}
        with pytest.raises(Unavailable, match="No space left on device; nothing was changed") as no:
            store.numbers()
        assert "\n" not in str(no.value)
        assert {path: path.read_bytes() for path in store.inside.iterdir()} == before
        assert not store.copies
        make_room(store.home.path)
        assert store.run(lambda redis: len(redis.get("k"))) == 600_000
        assert store.repairs[0].cut_bytes == 4096


AFTER_REDIS_6 = ("the tail after Redis 6", "the base file after Redis 6")


def as_upgraded(store: Store) -> None:
    """Give the base file the name of Redis 6, as Redis 7 does with the file that it finds."""
    (base,) = store.inside.glob("*.base.rdb")
    text = store.manifest.read_text()
    store.manifest.write_text(text.replace(base.name, aof_format.NAME))
    base.rename(store.inside / aof_format.NAME)
    assert store.numbers() == [0, 1, 2, 3, 4, 5]


OTHERS = pytest.mark.nightly(
    part="homes", catches="a repair of such a file that a kill leaves half done"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "the tail",
        *(
            pytest.param(fault, marks=OTHERS)
            for fault in (
                "the base file after Redis 6",
                "the manifest",
                "the base file",
                "the tail after Redis 6",
            )
        ),
    ],
)
def test_a_repair_that_is_killed_at_any_moment_is_done_or_undone(tmp_path: Path, fault: str):
    made = Store(tmp_path)
    rewritten(made, 6)
    arities = made.run(lambda redis: redis.command())
    known = {name.lower().encode(): about["arity"] for name, about in arities.items()}
    if fault in AFTER_REDIS_6:
        as_upgraded(made)
    with made.last.open("ab") as file:
        file.write(bytes(50))
    has_base = not fault.startswith("the base file")
    if fault == "the manifest":
        made.manifest.write_bytes(made.manifest.read_bytes()[:50])
    elif not has_base:
        found = aof_format.parts_of(made.home.redis_folder)
        assert found is not None
        corrupt(found.parts[0].path)
    damaged = made.last.read_bytes()
    instant, killed = 0, True
    while killed:
        instant += 1
        folder, copies = tmp_path / f"{instant}", tmp_path / f"{instant}-copies"
        shutil.copytree(made.home.redis_folder, folder)
        repairer = aof_repair.Repairer(folder, copies)
        killed = killed_at_call(instant, partial(repairer.repair, lambda: known))
        repairer.finish_interrupted()
        repairer.repair(lambda: known)
        assert len(aof_repair.reports(copies)) == 1  # each damage is kept once
        (copy,) = copies.iterdir()
        assert damaged in [path.read_bytes() for path in copy.iterdir()]
        left = aof_format.parts_of(folder)
        assert left is not None
        assert left.fault is None
        names = {part.path.name for part in left.parts} | {aof_format.MANIFEST}
        assert {path.name for path in (folder / aof_format.FOLDER).iterdir()} == names
        extents = [aof_format.extent(part.path, known) for part in left.parts]
        assert all(one.fault is None for one in extents)
        assert extents[-1].end == (len(damaged) - 50 if has_base else 0)
    assert instant > 20


def test_a_file_that_redis_cannot_read_for_another_reason_is_not_touched(store: Store):
    store.write(3)
    (base,) = store.inside.glob("*.base.rdb")
    # A whole snapshot of a later version, with its checksum.
    raw = base.read_bytes()[: -aof_format._CHECKSUM_BYTES]
    raw = (b"VALKEY999" if raw.startswith(b"VALKEY") else b"REDIS9999") + raw[9:]
    base.write_bytes(raw + aof_format._crc64(raw, 0).to_bytes(8, "little"))
    before = {path: path.read_bytes() for path in store.inside.iterdir()}
    with pytest.raises(Unavailable, match="ended at once"):
        store.numbers()
    assert {path: path.read_bytes() for path in store.inside.iterdir()} == before
    assert not store.copies


@pytest.mark.nightly(part="homes", catches="a start that reads a healthy file twice")
def test_a_healthy_large_file_costs_nothing(tmp_path: Path):
    store = Store(tmp_path)
    value = b"1" * 1000
    store.write(1)
    command = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000\r\n" + value + b"\r\n"
    with store.last.open("ab") as file:
        file.write(command * 300_000)
    own = [store.binary, "--port", "0", "--dir", str(store.home.redis_folder)]
    own += ["--appendonly", "yes", "--unixsocket", str(tmp_path / "s"), "--save", ""]
    begun = time.monotonic()
    with subprocess.Popen(own, stdout=subprocess.PIPE) as alone:
        assert alone.stdout is not None
        for line in alone.stdout:
            if b"Ready to accept" in line:
                break
        alone_s = time.monotonic() - begun
        alone.terminate()
        alone.stdout.read()
    begun = time.monotonic()
    assert store.numbers() == [0]
    assert time.monotonic() - begun < 2 * alone_s + 1
