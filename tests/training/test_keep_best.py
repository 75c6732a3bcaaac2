"""keep_best: the best checkpoint by an evaluation of its own weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from mlm_jobs import make_home, text_spec

from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.jobs.mlm.kind import run

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path)


def test_keep_best_ranks_a_checkpoint_by_the_evaluation_of_its_own_weights(home):
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


@pytest.mark.slow
def test_a_metric_missing_from_all_checkpoints_is_reported_once(home):
    around = tiny.surroundings(home / "runs" / "job")
    run(text_spec(home, keep_best="link_mrr"), around.ctx)
    [warning] = around.of_type("warning")
    assert warning["message"].startswith("keep_best: step 4 has no link_mrr to judge its")
    assert "mlm_loss" in warning["message"]
