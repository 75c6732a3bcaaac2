"""Frameworks and other clients, unmodified, each in an environment of its own: today's packages.

They talk to a small model that a job of this module trains to call tools.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cross_encoders
import pytest
import tool_caller
from daemons import Daemon
from environments import environment
from needs import needs
from waiting import wait_until

from warmd.configs.config import ModelConfig, WorkerConfig
from warmd.daemon.client import control
from warmd.jobs import spec_class

logger = logging.getLogger(__name__)

SCRIPTS = Path(__file__).parent / "frameworks"
CALLERS = {
    "with_openai": ["openai"],
    "with_openai_agents": ["openai-agents"],
    "with_pydantic_ai": ["pydantic-ai-slim[openai]"],
    "with_langchain": ["langchain-openai"],
    "with_langchain_tests": ["langchain-openai", "langchain-tests"],
    "with_litellm": ["litellm"],
    "with_instructor": ["instructor"],
    "with_inspect_ai": ["inspect-ai", "openai"],
    "with_smolagents": ["smolagents[openai]"],
}
RERANKERS = {"with_cohere": ["cohere"]}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first test trains a model


@pytest.fixture(scope="module")
def url(daemons: Callable[..., Daemon], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that has trained a model to call tools, and serves it as `tools`."""
    start, short, rows = tool_caller.save(tmp_path_factory.mktemp("tools"))
    daemon = daemons(
        http_port=0,
        workers=(
            WorkerConfig(name="train-0", queue="train", threads=2),
            WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
        ),
    )
    daemon.start()
    control.load_model(daemon.config, ModelConfig(name="start", path=str(start)))
    first = trained(daemon, dataset=str(short), **tool_caller.SHORT)
    job = trained(daemon, first, dataset=str(rows), **tool_caller.TRAINING)
    path = daemon.client.rundir(job).path / "model"
    control.load_model(daemon.config, ModelConfig(name="tools", path=str(path)))
    yield f"{wait_until(lambda: daemon.status()['http']['url'])}/v1"
    daemon.close()


def trained(daemon: Daemon, init: str | None = None, **options: Any) -> str:
    """Train the start model, or the one that a job has trained, and return the job."""
    spec = spec_class("sft").parse({"model": "start", **options})
    weights = None if init is None else daemon.client.models.weights(init)
    job = daemon.client.jobs.submit(spec, init=weights)
    ended = daemon.wait(job, timeout_s=1500)
    assert ended["status"] == "finished", ended
    steps = daemon.events(job, "step")
    seconds = sum(step["seconds"] for step in steps)
    logger.info("%d steps in %.0f s: %s", len(steps), seconds, daemon.client.jobs.result(job))
    return job


@pytest.fixture(scope="module")
def scorer(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that serves a random cross-encoder."""
    folder = cross_encoders.save(tmp_path_factory.mktemp("scorer") / "model")
    control.load_model(shared_daemon.config, ModelConfig(name="scorer", path=str(folder)))
    yield f"{wait_until(lambda: shared_daemon.status()['http']['url'])}/v1"
    control.unload_model(shared_daemon.config, "scorer")


def check(folder: Path, script: str, packages: list[str], url: str) -> None:
    """Run a script in an environment of its own; it must end without an error."""
    python = environment(folder / "environment", *packages)
    ran = subprocess.run(
        [python, SCRIPTS / f"{script}.py", url], capture_output=True, text=True, timeout=300
    )
    logger.info("%s: %s", script, ran.stdout)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


@pytest.mark.nightly(
    part="callers", catches="an answer that a framework for agents does not understand"
)
@pytest.mark.parametrize("script", CALLERS)
def test_a_client_does_a_task_with_the_tools_that_a_trained_model_calls(
    tmp_path: Path, url: str, script: str
):
    check(tmp_path, script, CALLERS[script], url)


@pytest.mark.nightly(
    part="callers", catches="an answer that OpenAI's client for Node does not understand"
)
def test_openais_client_for_node_does_the_task(tmp_path: Path, url: str):
    needs(shutil.which("npm"), "npm")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(tmp_path)]
    subprocess.run([*install, "openai", "zod"], check=True)
    script = shutil.copy(SCRIPTS / "with_openai_node.mjs", tmp_path)
    ran = subprocess.run(["node", script, url], capture_output=True, text=True, timeout=300)
    logger.info("%s", ran.stdout)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


@pytest.mark.nightly(
    part="clients", catches="scores that a client for reranking does not understand"
)
@pytest.mark.parametrize("script", RERANKERS)
def test_a_client_for_reranking_reads_the_scores(tmp_path: Path, scorer: str, script: str):
    check(tmp_path, script, RERANKERS[script], scorer)
