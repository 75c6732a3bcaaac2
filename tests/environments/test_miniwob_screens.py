"""A vision model on screenshots of MiniWoB++, whose actions an expression forces."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import tiny
import tiny_vision
from gateways import Gateway

sys.path.insert(0, str(Path(__file__).parent))
from test_miniwob import TASKS, package, pages  # noqa: F401

from warmd.jobs.eval.kind import run as evaluate
from warmd.jobs.eval.options import EvalSpec

pytestmark = [pytest.mark.usefixtures("like_a_work_horse"), pytest.mark.timeout(900)]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:  # a short path, for sockets
        made = Gateway(Path(folder, "home"), tiny_model)
        yield made
        made.close()


@pytest.fixture
def job(gateway: Gateway, tmp_path: Path) -> tiny.Surroundings:
    """The surroundings of a job, with a random model that sees screens and writes bytes."""
    model, tokenizer = tiny_vision.save_chatting(tmp_path, max_position_embeddings=4096)
    made = tiny.surroundings(gateway.home.runs / "screens", model)
    models = cast(tiny.Models, made.ctx.models)
    models.tokenizer, models.path = tokenizer, tmp_path
    made.ctx = replace(made.ctx, code_folders=(str(HERE),), job_id="eval-screens")
    return made


@pytest.mark.nightly(
    part="episodes", catches="screens that are lost, mixed up or too many in a conversation"
)
def test_a_vision_model_acts_on_eight_pages_at_once(pages, job, tmp_path):  # noqa: F811
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_bytes(b"".join(orjson.dumps({"task": task}) + b"\n" for task in TASKS))
    options: dict[str, Any] = {
        "agent": "miniwob_agents:plays",
        "dataset": str(tasks),
        "repeats": 2,
        "temperature": 1.0,
        "concurrency": 8,
        "max_turns": 15,
        "max_turn_length": 120,
        "max_tokens": 4000,
    }
    result = evaluate(EvalSpec.parse(options).located(Path.cwd()), job.ctx)
    lines = (job.ctx.run_dir / "rows.jsonl").read_bytes().splitlines()
    episodes = [one for line in lines for one in orjson.loads(line)["completions"]]
    assert len(episodes) == len(TASKS) * 2
    assert {one["finish_reason"] for one in episodes} == {"returned"}
    assert all(1 <= one["turns"] <= 15 for one in episodes)
    assert max(one["turns"] for one in episodes) == 15
    metrics: dict[str, Any] = result["metrics"]
    assert metrics["format"]["value"] == 1
    assert metrics["success"]["n"] == len(TASKS)
    for one in episodes:
        opening = one["messages"][0][0]["content"]
        assert opening.startswith("[image 160x210]")
