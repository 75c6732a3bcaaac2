"""Supervised fine-tuning by a real daemon: weights of another job, and refusals at submit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sft_jobs
from daemons import Daemon

from warmd.jobs.errors import SpecError
from warmd.jobs.sft.options import SftSpec


def spec(folder: Path, **options: Any) -> SftSpec:
    usual: dict[str, Any] = {
        "model": "tiny",
        "epochs": 6,
        "save_every": 4,
        "eval_samples": 4,
        "eval_every": 10,
    }
    return sft_jobs.spec(folder, **usual | options)


@pytest.mark.slow
def test_a_job_begins_with_the_weights_of_another(sturdy: Daemon, tmp_path: Path):
    first = sturdy.client.jobs.submit(spec(tmp_path))
    before = sturdy.wait(first)["result"]["eval_after"]
    second = sturdy.client.jobs.submit(
        spec(tmp_path, epochs=1), init=sturdy.client.models.weights(first)
    )
    assert sturdy.wait(second)["result"]["eval_before"] == before


def test_a_bad_row_is_refused_before_the_job_is_queued(shared_daemon: Daemon, tmp_path: Path):
    path = sft_jobs.write(tmp_path / "bad.jsonl", [{"prompt": "a", "completion": ""}])
    unlocated = SftSpec.parse({"model": "tiny", "dataset": path})
    with pytest.raises(SpecError, match="line 1: completion: must be text, got an empty one"):
        shared_daemon.client.jobs.submit(unlocated)
