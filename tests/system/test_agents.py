"""Agents with a whole daemon: requests pass its gateway, and their jobs listen for it only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import tiny
from daemons import Daemon
from listeners import Listeners
from waiting import wait_until

from warmd.configs.config import ModelConfig
from warmd.daemon.client import control
from warmd.jobs import spec_class

pytestmark = pytest.mark.slow

AGENTS = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a model whose chat template takes agents."""
    folder = tmp_path_factory.mktemp("talking")
    model, tokenizer = tiny.chatting()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    control.load_model(shared_daemon.config, ModelConfig(name="talking", path=str(folder)))
    wait_until(lambda: shared_daemon.status()["http"]["url"])
    yield shared_daemon
    control.unload_model(shared_daemon.config, "talking")


def submitted(daemon: Daemon, kind: str, agent: str, **options: Any) -> dict[str, Any]:
    """Submit a job, and wait for its end."""
    small = {"model": "talking", "agent": f"talkers:{agent}", "samples": 4, "max_turn_length": 12}
    with chdir(AGENTS):
        job_id = daemon.client.jobs.submit(spec_class(kind).parse(small | options))
    job: dict[str, Any] = daemon.wait(job_id, timeout_s=180)
    assert job["status"] == "finished", job["error"]
    return job


ALONE = pytest.mark.nightly(
    part="episodes", catches="a job of one process that leaves the socket of its agents behind"
)


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=ALONE)])
def test_a_job_listens_for_its_agents_while_it_runs(daemon, processes):
    sockets = daemon.home.sockets
    with Listeners(daemon.processes, lambda address: address) as watch:
        job = submitted(
            daemon, "grpo", "vowels", prompts_per_step=2, num_generations=4, processes=processes
        )
    assert job["result"]["steps"] == 2
    own = {one for one in watch.found if one.startswith(f"unix:{sockets}/a-")}
    assert len(own) == processes
    assert not list(sockets.glob("a-*"))


def test_an_agent_is_evaluated_by_the_daemon(daemon):
    job = submitted(daemon, "eval", "vowels", temperature=1.0, repeats=2)
    assert job["result"]["metrics"]["turns"]["value"] > 1


def test_a_program_in_another_language_is_an_agent(daemon):
    job = submitted(daemon, "eval", "in_node", temperature=1.0)
    assert job["result"]["metrics"]["turns"]["value"] == 2
    assert job["result"]["metrics"]["reward"]["value"] == 0.25


def test_an_agent_that_cannot_be_imported_is_refused_at_submit(daemon):
    spec = spec_class("grpo").parse({"model": "talking", "agent": "talkers:nobody"})
    with chdir(AGENTS), pytest.raises(Exception, match="agent: talkers:nobody must be a function"):
        daemon.client.jobs.submit(spec)
