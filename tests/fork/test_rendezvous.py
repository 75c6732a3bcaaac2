"""The rendezvous of ranks of several machines, with real stores and connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch.distributed import DistNetworkError

from warmd.daemon.fork.rank_processes import _require_equal
from warmd.daemon.fork.rendezvous import Rendezvous
from warmd.daemon.host.messages import GangPlan
from warmd.jobs.errors import JobFailed
from warmd.jobs.training.gloo_group import GlooGroup

FIRST = GangPlan(["a", "b"], node=0, address="127.0.0.1", token="t1")


def second(first: Rendezvous, token: str = "t1") -> Rendezvous:
    """The rendezvous of the other node, as it reads the address of rank 0 in Redis."""
    assert first.port is not None
    return Rendezvous(
        replace(FIRST, node=1, token=token, host=first.host, port=first.port), first.per_node
    )


def broken(error: Exception) -> NoReturn:
    raise error


def test_ranks_of_two_nodes_connect_and_know_their_numbers():
    with closing(Rendezvous(FIRST, 2)) as first, closing(second(first)) as other:
        assert [rendezvous.first_rank for rendezvous in (first, other)] == [0, 2]
    with closing(Rendezvous(FIRST, 1)) as first, closing(second(first)) as other:

        def meet(rendezvous: Rendezvous) -> tuple[list[int], dict[str, str]]:
            group = GlooGroup(rendezvous, rendezvous.first_rank, broken)
            return group.gather(group.rank), dict(group.environment)

        with ThreadPoolExecutor(2) as pool:
            met = list(pool.map(meet, (first, other)))
    assert [ranks for ranks, _ in met] == [[0, 1], [0, 1]]
    for number, (_, environment) in enumerate(met):
        assert environment == {
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
        store: Any = first.store(0)
        store.set("where", "here")
        assert second(first).store(1).check(["where"])
        assert not second(first, token="t0").store(1).check(["where"])


# In a process of its own: a fork of this one, with the threads of other tests, may hang.
LEADER = """
import signal
from test_rendezvous import FIRST, Rendezvous
first = Rendezvous(FIRST, 1)
port, store = first.port, first.store(0)
print(port, flush=True)
signal.pause()
"""


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
            assert not store.check(["ready"])
        finally:
            leader.kill()
    begun = time.monotonic()
    with pytest.raises(DistNetworkError):
        store.get("ready")
    assert time.monotonic() - begun < 10  # its timeout is 60 s


def test_nodes_with_other_versions_or_model_files_are_refused_by_name():
    _require_equal([{"torch": "2.13.0", "model": None}] * 2)
    with pytest.raises(JobFailed, match=r"nodes: must have the same torch, got 2.13.0 and 2.12.1"):
        _require_equal([{"torch": "2.13.0"}, {"torch": "2.12.1"}])
