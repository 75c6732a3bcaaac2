"""The best checkpoint: told by what was measured of its own weights, or said not to be told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import tiny
import torch
from test_mlm import CONFIGS, text_spec

from warmd.daemon.checkpoints import Checkpoints
from warmd.jobs.mlm import run


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    rows = [{"text": f"number {n}, then {n + 1} and {n + 2}{' more' * (n % 9)}"} for n in range(80)]
    (tmp_path / "texts.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    CONFIGS["bert"].save_pretrained(tmp_path / "bert")
    (tmp_path / "runs").mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def test_a_checkpoint_is_judged_by_the_evaluation_of_its_own_weights_alone(home):
    spec = text_spec(home, eval_every=4, save_every="2", keep_best="eval_mlm_loss")
    around = tiny.surroundings(home / "runs" / "job")
    run(spec, around.ctx)
    checkpoints = Checkpoints(home / "runs" / "job" / "checkpoints", best=spec.best)
    evaluated = {event["step"]: event for event in around.of_type("eval")}
    assert sorted(evaluated) == [4, 8, 12]
    for path in checkpoints.list():
        metrics = checkpoints.about(path)["metrics"]
        event = evaluated.get(int(path.name.removeprefix("checkpoint-")))
        assert metrics.get("mlm_acc") == (event and event["mlm_acc"])
        assert metrics.get("eval_mlm_loss") == (event and event["mlm_loss"])
    best = min(evaluated, key=lambda step: evaluated[step]["mlm_loss"])
    assert checkpoints.best_one() == checkpoints.folder / f"checkpoint-{best}"


def test_a_metric_that_no_checkpoint_has_is_said_once(home):
    around = tiny.surroundings(home / "runs" / "job")
    run(text_spec(home, keep_best="link_mrr"), around.ctx)
    [warning] = around.of_type("warning")
    assert warning["message"].startswith("keep_best: step 4 has no link_mrr to judge its")
    assert "mlm_loss" in warning["message"]
