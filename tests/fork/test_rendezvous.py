"""The rendezvous of ranks of several machines, with real stores and connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from gloo_stranger import GlooStranger
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    TCPStore,
)

from warmd.daemon.fork.rank_processes import _require_equal
from warmd.daemon.fork.rendezvous import Rendezvous
from warmd.daemon.host import machine
from warmd.daemon.host.messages import GangPlan
from warmd.jobs.errors import JobFailed
from warmd.jobs.training.gloo_group import GlooGroup
from warmd.jobs.training.rank_proofs import proof

FIRST = GangPlan(["a", "b"], node=0, address="127.0.0.1", secret="s1")


def second(first: Rendezvous, secret: str = "s1") -> Rendezvous:
    """The rendezvous of the other node, as it reads the address of rank 0 in Redis."""
    assert first.port is not None
    return Rendezvous(
        replace(FIRST, node=1, secret=secret, host=first.host, port=first.port), first.per_node
    )


def broken(error: Exception) -> NoReturn:
    raise error


def test_ranks_of_two_nodes_connect_and_know_their_numbers():
    with closing(Rendezvous(FIRST, 2)) as first, closing(second(first)) as other:
        assert [rendezvous.first_rank for rendezvous in (first, other)] == [0, 2]
    with closing(Rendezvous(FIRST, 1)) as first, closing(second(first)) as other:

        def meet(rendezvous: Rendezvous) -> tuple[GlooGroup, list[int]]:
            group = GlooGroup(rendezvous, rendezvous.first_rank, broken)
            return group, group.gather(group.rank)

        with ThreadPoolExecutor(2) as pool:
            met = list(pool.map(meet, (first, other)))
        # Code of the job may use the store of rank 0, as long as the job runs.
        assert first.port is not None
        TCPStore("127.0.0.1", first.port, is_master=False, timeout=timedelta(seconds=5))
    assert [ranks for _, ranks in met] == [[0, 1], [0, 1]]
    for number, (group, _) in enumerate(met):
        assert group.environment == {
            "RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(first.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


def test_rank_0_listens_at_the_address_of_its_node_only():
    with closing(Rendezvous(FIRST, 1)) as first:
        assert first.port is not None
        with socket.create_connection((first.host, first.port), timeout=5):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", first.port), timeout=5)


def test_an_address_of_another_machine_is_refused_by_name():
    with pytest.raises(JobFailed, match="gang_address: must be an address of this machine"):
        Rendezvous(replace(FIRST, address="192.0.2.1"), 1)


def test_a_rank_of_an_earlier_execution_sees_nothing_of_this_one():
    with closing(Rendezvous(FIRST, 1)) as first:
        store = first.store(0)  # serves while it is referred to
        store.set("where", b"here")
        assert second(first).store(1).get("where") == b"here"
        earlier = second(first, secret="s0").store(1)
        with pytest.raises(DistStoreError):
            earlier.wait(["where"], timedelta(milliseconds=100))


# In a process of its own: a fork of this one, with the threads of other tests, may hang.
LEADER = """
import signal
from test_rendezvous import FIRST, Rendezvous
first = Rendezvous(FIRST, 1)
port, store = first.port, first.store(0)
print(port, flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_the_others_stop_waiting_at_once_when_the_leader_is_killed():
    command = [sys.executable, "-c", LEADER]
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": folders}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as leader:
        try:
            assert leader.stdout is not None
            port = int(leader.stdout.readline())
            plan = replace(FIRST, node=1, host=FIRST.address, port=port)
            store: Any = Rendezvous(plan, 1).store(1)
        finally:
            leader.kill()
    begun = time.monotonic()
    with pytest.raises(DistNetworkError):
        store.get("ready")
    assert time.monotonic() - begun < 10  # its timeout is 60 s


# A node whose rank may connect once a line comes on its stdin; until then, it only listens.
NODE = """
import sys
from test_rendezvous import FIRST, GlooGroup, JobFailed, Rendezvous, replace
from warmd.daemon.fork import rank_processes
from warmd.jobs.training import gloo_group
node, port = map(int, sys.argv[1:])
gloo_group._PROOF_S = rank_processes._REPORT_S = 2
class Late(Rendezvous):
    def store(self, rank):
        print(self.port, flush=True)
        input()
        return super().store(rank)
rendezvous = Late(replace(FIRST, node=node, host="127.0.0.1", port=port), 1)
with rank_processes.RankProcesses(1, None, is_spread=True) as ranks:
    try:
        group = GlooGroup(rendezvous, node, ranks.broken)
        print(group.gather(f"of rank {node}"))
    except Exception as error:
        print(type(error).__name__, error)
"""


def ends_with_a_stranger(command: str | None) -> tuple[list[str], int]:
    """Let a GlooStranger connect to two nodes before they connect to each other.

    Returns what the nodes print, and the number of messages that the stranger has received.
    """
    with ExitStack() as cleaned:

        def start(node: int, port: int) -> tuple[subprocess.Popen[str], int]:
            arguments = [sys.executable, "-c", NODE, str(node), str(port)]
            folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
            one = subprocess.Popen(
                arguments,
                env={**os.environ, "PYTHONPATH": folders},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            cleaned.enter_context(one)
            cleaned.callback(one.kill)
            assert one.stdout is not None
            return one, int(one.stdout.readline())

        first, port = start(0, 0)
        other, _ = start(1, port)
        ports = {
            found.laddr.port
            for one in (first, other)
            for found in psutil.Process(one.pid).net_connections("tcp")
            if found.status == psutil.CONN_LISTEN
        }
        assert len(ports) == 3
        stranger = cleaned.enter_context(GlooStranger(command, ports - {port}))
        with ThreadPoolExecutor(2) as pool:
            ends = list(pool.map(lambda one: one.communicate("\n", timeout=30)[0], (first, other)))
    return ends, stranger.num_messages


@pytest.mark.slow
def test_a_stranger_that_connects_before_the_other_rank_ends_the_job_by_name(tmp_path: Path):
    """It speaks gloo's protocol, and sends a pickle that creates a file, in every message."""
    ran = tmp_path / "ran"
    ends, num_messages = ends_with_a_stranger(f"touch {ran}")
    assert num_messages
    assert "does not know the secret of this job: another program has connected" in "".join(ends)
    assert not [end for end in ends if "of rank" in end.replace("of rank 1 of", "")], ends
    assert not ran.exists()


@pytest.mark.nightly(
    part="daemons", catches="a silent stranger for whom the ranks of a job wait forever"
)
def test_a_stranger_that_connects_and_stays_silent_ends_the_execution_by_name():
    ends, _ = ends_with_a_stranger(None)
    reason = "RanksLost nodes: a rank has not proved within 2 s that it knows the secret"
    assert [end for end in ends if end.startswith(reason)], ends
    assert all(end.startswith("RanksLost") for end in ends), ends


def test_connections_that_send_nothing_hold_up_no_rank():
    ports = set()
    with ExitStack() as strangers:

        class Crowded(Rendezvous):
            def store(self, rank: int) -> Any:
                for found in psutil.Process().net_connections("tcp4"):
                    if found.status == psutil.CONN_LISTEN:
                        strangers.enter_context(socket.create_connection(found.laddr, timeout=5))
                        ports.add(found.laddr.port)
                return super().store(rank)

        with closing(Crowded(FIRST, 1)) as first:
            assert first.port is not None
            plan = replace(FIRST, node=1, host=first.host, port=first.port)
            other = Crowded(plan, 1)

            def meet(rendezvous: Rendezvous) -> list[int]:
                return GlooGroup(rendezvous, rendezvous.first_rank, broken).gather(0)

            with ThreadPoolExecutor(2) as pool:
                assert list(pool.map(meet, (first, other))) == [[0, 0], [0, 0]]
    assert len(ports) >= 3  # of the store, and of each rank


def test_an_address_that_a_stranger_leaves_in_the_store_is_refused_by_name():
    with closing(Rendezvous(FIRST, 1)) as first:
        store = first.store(0)
        store.set("0/0", b"mine")
        assert store.get("0/0") == b"mine"
        known = first.secret
        # It has read the other keys on the network, and writes under the same ones.
        raw: Any = PrefixStore(
            proof(known, "prefix").hex(), TCPStore("127.0.0.1", first.port, is_master=False)
        )
        signed = raw.get("0/0")
        raw.set("0/1", b"elsewhere")
        raw.set("0/2", signed)
        for key in ("0/1", "0/2"):
            with pytest.raises(JobFailed, match="is not signed with the secret of this job"):
                store.get(key)


def test_nodes_with_other_versions_or_model_files_are_refused_by_name():
    _require_equal([{"torch": "2.13.0", "model": None}] * 2)
    with pytest.raises(JobFailed, match=r"nodes: must have the same torch, got 2.13.0 and 2.12.1"):
        _require_equal([{"torch": "2.13.0"}, {"torch": "2.12.1"}])


def test_nodes_with_another_exchange_between_ranks_are_not_of_one_software(
    monkeypatch: pytest.MonkeyPatch,
):
    ours = machine.software_label()
    monkeypatch.setattr(machine, "RANK_EXCHANGE", 1)
    assert machine.software_label() != ours
