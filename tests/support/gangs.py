"""Jobs of several nodes on a cluster whose nodes all listen on the loopback interface."""

from __future__ import annotations

import subprocess
from typing import Any

import psutil
import sft_jobs
import torch
from clusters import Cluster
from safetensors.torch import load_file

from warmd.daemon.queue.gangs import Gangs

SETTINGS = {"WARMD_GANG_ADDRESS": "127.0.0.1", "WARMD_GANG_WAIT": "5s"}


def run_nodes(machines: Cluster, *names: str) -> dict[str, subprocess.Popen[bytes]]:
    """Make exactly these nodes run and be ready, whatever ran before; return them by node name."""
    running = {name: one for name, one in machines.nodes.items() if one.poll() is None}
    for name, process in running.items():
        if name not in names:
            process.terminate()
            assert process.wait(timeout=60) == 0
    for name in names:
        if name not in running:
            machines.node(name)
    machines.wait_ready(*names)
    return {machines.name_of(name): machines.nodes[name] for name in names}


def submit_sft(machines: Cluster, **options: Any) -> str:
    """Submit a job of some seconds, by default on two nodes."""
    folder = machines.folder / "data"
    folder.mkdir(exist_ok=True)
    usual: dict[str, Any] = {"model": "tiny", "epochs": 8, "save_every": 2, "nodes": 2}
    return machines.client.jobs.submit(sft_jobs.spec(folder, **usual | options))


def weights(machines: Cluster, job_id: str) -> dict[str, torch.Tensor]:
    return load_file(machines.runs / job_id / "model" / "model.safetensors")


def are_equal(machines: Cluster, one: str, other: str) -> bool:
    """Whether two jobs have the same weights, bit for bit."""
    ours, theirs = weights(machines, one), weights(machines, other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def seats(machines: Cluster, job_id: str) -> dict[str, str]:
    """The state of each node of a running job but the first, by its name."""
    gang = Gangs(machines.client.connection).gang(job_id)
    return {} if gang is None else {seat.node: seat.state for seat in gang.seats.values()}


def horses(process: psutil.Process) -> list[psutil.Process]:
    """The processes of jobs of a node: children of its zygote."""
    zygotes = filter(_is_zygote, process.children(recursive=True))
    return [child for zygote in zygotes for child in zygote.children(recursive=True)]


def _is_zygote(process: psutil.Process) -> bool:
    try:
        return any("fork.zygote" in word for word in process.cmdline())
    except psutil.NoSuchProcess:  # a horse that has ended meanwhile, or a zombie
        return False
