"""Every mode of the daemon, and every kind of job, listens only where docs/security.md says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import dpo_jobs
import mlm_jobs
import psutil
import pytest
import sft_jobs
import tiny
from clusters import Cluster, cluster
from daemons import Daemon
from gangs import SETTINGS, run_nodes, submit_sft
from listeners import Listeners, documented
from ports import free_port
from waiting import wait_until

from warmd.configs.values import num_cores
from warmd.daemon.client import control
from warmd.daemon.host.home import Home
from warmd.jobs import KINDS, spec_class
from warmd.jobs.spec import Spec

pytestmark = pytest.mark.slow

FOLDER = "HOME/sockets"
CONTROL, ZYGOTE, NEW = (
    f"{FOLDER}/{name}" for name in ("control.sock", "zygote.sock", "zygote.new")
)
COMMANDS, REDIS, EMPTY = (
    f"{FOLDER}/{name}" for name in ("commands.sock", "redis.sock", "empty.sock")
)
GATEWAY, RANKS = "TCP http_host:http_port", "TCP gang_address, free ports"


def names(home: Home, *, gateway: str = "", ranks: str = "") -> Callable[[str], str]:
    """Names of addresses in the manual; `gateway`, `ranks`: where these may listen."""

    def name(address: str) -> str:
        kind, _, rest = address.partition(":")
        if kind == "unix":
            return rest.replace(f"{home.sockets}/", "HOME/sockets/")
        if address == f"tcp:{gateway}":
            return GATEWAY
        return RANKS if ranks and address.startswith(f"tcp:{ranks}:") else address

    return name


def gateway_of(daemon: Daemon) -> str:
    url: str = wait_until(lambda: daemon.status()["http"]["url"])
    return url.removeprefix("http://")


def test_the_manual_lists_all_sockets():
    assert documented() == {CONTROL, COMMANDS, ZYGOTE, NEW, REDIS, EMPTY, GATEWAY, RANKS}


def specs(folder: Path) -> Iterator[Spec]:
    """A short job of each kind; also of two processes, where it takes them."""
    for name in ("sft", "dpo", "mlm"):
        (folder / name).mkdir()
    mlm_jobs.make_home(folder / "mlm")
    questions = {"samples": 2, "reward": ["tiny:digit_share"]}
    few = {"num_generations": 2, "max_completion_length": 4}
    for processes in (1, 2):
        several: dict[str, Any] = {"model": "tiny", "steps": 2, "processes": processes}
        yield sft_jobs.spec(folder / "sft", **several)
        yield dpo_jobs.spec(folder / "dpo", **several)
        yield mlm_jobs.text_spec(folder / "mlm", steps=2, processes=processes)
        yield spec_class("grpo").parse(several | questions | few)
    # With a process for rewards.
    yield spec_class("grpo").parse({"model": "tiny", "reward_timeout": 60} | questions | few)
    yield spec_class("eval").parse({"model": "tiny", "samples": 2, "max_tokens": 4})
    yield spec_class("infer").parse({"model": "tiny", "prompt": "a", "max_tokens": 4})
    yield spec_class("encode").parse({"model": "tiny", "text": ["a"]})


@pytest.mark.skipif(num_cores() < 2, reason="needs two cores")
def test_a_daemon_with_a_gateway_and_jobs_of_each_kind(shared_daemon: Daemon, tmp_path: Path):
    daemon = shared_daemon
    made = list(specs(tmp_path))
    assert {one.kind for one in made} == set(KINDS.own)
    watch = Listeners(daemon.processes, names(daemon.home, gateway=gateway_of(daemon)))
    with watch, chdir(Path(tiny.__file__).parent):
        jobs = [daemon.client.jobs.submit(one) for one in made]
        for job_id, one in zip(jobs, made, strict=True):
            job = daemon.wait(job_id, timeout_s=120)
            assert job["status"] == "finished", (one, job["error"])
    assert watch.found == {CONTROL, ZYGOTE, REDIS, GATEWAY}


def test_a_daemon_without_a_gateway(sturdy: Daemon):
    with Listeners(sturdy.processes, names(sturdy.home)) as watch:
        job = sturdy.submit(samples=2)
        assert sturdy.wait(job)["status"] == "finished"
    assert watch.found == {CONTROL, ZYGOTE, REDIS}


@pytest.mark.nightly(part="networks", catches="a socket that is left open, or opened, by a reload")
def test_a_daemon_that_is_reloaded(make_daemon: Callable[..., Daemon]):
    daemon = make_daemon()
    daemon.start()
    with Listeners(daemon.processes, names(daemon.home)) as watch:
        before = daemon.pid("zygote")
        for _ in control.reload(daemon.config):
            pass
        wait_until(lambda: daemon.is_settled() and daemon.pid("zygote") != before)
        job = daemon.submit(samples=2)
        assert daemon.wait(job)["status"] == "finished"
    assert watch.found == {CONTROL, ZYGOTE, NEW, REDIS}


@pytest.fixture(scope="module")
def machines(tiny_model: Path) -> Iterator[Cluster]:
    """Nodes on an external Redis."""
    with cluster(tiny_model) as made:
        made.settings = dict(SETTINGS)
        yield made


def watch_node(machines: Cluster, name: str) -> Listeners:
    root = psutil.Process(machines.nodes[name].pid)
    known = names(machines.home(name), ranks="127.0.0.1")
    return Listeners(lambda: [root, *root.children(recursive=True)], known)


def test_a_node_of_an_external_redis(machines: Cluster):
    run_nodes(machines, "a")
    with watch_node(machines, "a") as watch:
        job = submit_sft(machines, nodes=1, processes=min(2, num_cores()))
        assert machines.wait(job)["status"] == "finished"
    assert watch.found == {CONTROL, ZYGOTE}


@pytest.mark.nightly(part="networks", catches="nodes that listen beyond gang_address or their jobs")
def test_nodes_listen_for_others_only_during_a_job_of_several(machines: Cluster):
    run_nodes(machines, "a", "b")
    with watch_node(machines, "a") as first, watch_node(machines, "b") as second:
        job = submit_sft(machines)
        assert machines.wait(job)["status"] == "finished"
    assert first.found == second.found == {CONTROL, ZYGOTE, RANKS}
    with watch_node(machines, "a") as first, watch_node(machines, "b") as second:
        job = submit_sft(machines, nodes=1)
        assert machines.wait(job)["status"] == "finished"
    assert first.found == second.found == {CONTROL, ZYGOTE}


@pytest.mark.nightly(
    part="networks", catches="a gateway of its own that listens at more than one port"
)
def test_a_gateway_of_its_own(machines: Cluster):
    port = free_port()
    machines.settings["WARMD_HTTP_PORT"] = str(port)
    gateway = machines.node("alone", command="gateway")
    root = psutil.Process(gateway.pid)
    known = names(machines.home("alone"), gateway=f"127.0.0.1:{port}")
    with Listeners(lambda: [root, *root.children(recursive=True)], known) as watch:
        wait_until(lambda: GATEWAY in watch.found, timeout_s=60)
    assert watch.found <= {CONTROL, GATEWAY}
