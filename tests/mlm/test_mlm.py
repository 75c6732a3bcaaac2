"""The MLM kind: training that learns, its events, files and evaluations."""

from __future__ import annotations

import csv
import math
from typing import Any

import orjson
import pytest
import torch
from mlm_jobs import begin, by_step, graph_spec, same, text_spec, weights
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
)

from warmd.jobs.codegraph.encoder import CodeGraphEncoder
from warmd.jobs.errors import Stopped
from warmd.jobs.mlm.curve import COLUMNS, Curve
from warmd.jobs.mlm.kind import run
from warmd.jobs.mlm.options import MlmSpec
from warmd.jobs.mlm.task import rank

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


@pytest.mark.slow
def test_a_job_on_text_learns_and_leaves_a_model_that_loads(home, name):
    job = begin(home, name)
    result = run(text_spec(home, steps=60, eval_every=30, eval_first=True), job.ctx)
    (data,) = job.of_type("data")
    assert data["documents"] == 80
    assert data["examples_held_out"] == 16
    (event,) = job.of_type("begin")
    assert event["gemm"] == (job.ctx.run_dir / "gemm").read_text()
    assert (event["steps_total"], event["micro_steps_total"]) == (60, 120)
    before, during, after = job.of_type("eval")
    assert [e["phase"] for e in (before, during, after)] == ["before", "during", "after"]
    assert after["mlm_loss"] < during["mlm_loss"] < before["mlm_loss"]
    assert after["mlm_mrr"] > 2 * before["mlm_mrr"]
    assert result["eval"] == {k: v for k, v in after.items() if k not in ("type", "step", "phase")}
    for event in job.events:
        orjson.dumps(event)  # plain JSON values
    folder = home / "runs" / name / "model"
    assert same(weights(folder), weights(home / "runs" / name / "checkpoints" / "checkpoint-60"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("then 7")["input_ids"]) == "[CLS]then 7[SEP]"


@pytest.mark.slow
def test_what_is_not_read_is_counted_in_the_begin_event_also_of_a_cached_corpus(home, name):
    folder = home / name
    folder.mkdir()
    rows = (home / "texts.jsonl").read_bytes()
    (folder / "rows.jsonl").write_bytes(b"\n\n" + rows + b'\n{"text": "of", "id": 3}\n')
    (folder / "._rows.jsonl").write_bytes(rows)
    for number in range(2):
        job = begin(home, f"{name}_{number}")
        run(text_spec(home, data=str(folder), steps=1), job.ctx)
        assert job.of_type("data")[0]["built"] == (number == 0)
        assert job.of_type("begin")[0]["left_out"] == (
            "files: 1 hidden (._rows.jsonl); blank lines: 2; columns (records): id (1)"
        )


def test_metrics_csv_has_a_row_per_step_with_accuracies_at_evaluations(home, name):
    job = begin(home, name)
    run(graph_spec(home), job.ctx)
    with (home / "runs" / name / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    events, evals = by_step(job.events, "step"), by_step(job.events, "eval")
    assert list(evals) == [3, 6, 8]
    for row in rows:
        step = int(row["step"])
        assert float(row["total_loss"]) == events[step]["loss"]
        assert float(row["mnm_loss"]) == events[step]["mnm_loss"]
        assert float(row["mnm_weight"]) == events[step]["mnm_weight"]
        for part in ("mlm", "mnm"):
            expected = str(evals[step][f"{part}_acc"]) if step in evals else ""
            assert row[f"{part}_validation_accuracy"] == expected


@pytest.mark.slow
def test_trained_and_random_weights_score_differently_and_the_trained_ones_are_loaded(home, name):
    first = begin(home, name)
    run(text_spec(home, steps=60, eval_every=60, eval_first=True), first.ctx)
    random, trained = first.of_type("eval")

    folder = home / "runs" / name / "model"
    model: Any = AutoModelForMaskedLM.from_pretrained(folder)
    again = begin(home, f"{name}_again")
    again.ctx.models.warm = model  # type: ignore[attr-defined]
    again.ctx.models.tokenizer = AutoTokenizer.from_pretrained(folder)  # type: ignore[attr-defined]
    spec = text_spec(home, "code-graph", model="demo", steps=1, eval_every=1, eval_first=True)
    run(spec, again.ctx)
    loaded = again.of_type("eval")[0]
    scores = ("mlm_loss", "mlm_acc", "mlm_mrr", "mlm_hits10", "mlm_tokens")
    assert {key: loaded[key] for key in scores} == {key: trained[key] for key in scores}
    assert loaded["mlm_loss"] < random["mlm_loss"] - 0.5


@pytest.mark.slow
def test_a_trained_encoder_is_trained_on_from_its_weights(home, name):
    first = begin(home, name)
    run(graph_spec(home, steps=40, eval_every=40), first.ctx)
    folder = home / "runs" / name / "model"
    again = begin(home, f"{name}_again")
    again.ctx.models.warm = CodeGraphEncoder.from_pretrained(folder)  # type: ignore[attr-defined]
    again.ctx.models.tokenizer = AutoTokenizer.from_pretrained(folder)  # type: ignore[attr-defined]
    by_default = {name: MlmSpec.options()[name].default for name in ("layers", "heads", "ffn_size")}
    spec = graph_spec(home, model="demo", hidden_size=None, steps=1, eval_first=True, **by_default)
    run(spec, again.ctx)
    trained, loaded = first.of_type("eval")[-1], again.of_type("eval")[0]
    for score in ("mlm_loss", "mlm_mrr", "mnm_loss", "mnm_mrr", "link_mrr", "n"):
        assert loaded[score] == trained[score]


@pytest.mark.slow
def test_an_evaluation_uses_all_held_out_examples_or_eval_samples_of_them(home, name):
    for most, expected in ((0, 16), (5, 5), (1000, 16)):
        job = begin(home, f"{name}_{most}")
        run(text_spec(home, steps=1, eval_every=1, validation_examples=most), job.ctx)
        assert job.of_type("eval")[0]["n"] == expected


@pytest.mark.slow
def test_without_held_out_examples_nothing_is_evaluated(home, name):
    job = begin(home, name)
    result = run(text_spec(home, steps=2, validation=0.0), job.ctx)
    assert result["eval"] is None
    assert not job.of_type("eval")


@pytest.mark.slow
def test_an_evaluation_does_not_advance_the_random_state_of_training(home, name):
    run(text_spec(home, eval_every=1), begin(home, f"{name}_with").ctx)
    run(text_spec(home, eval_every=0), begin(home, f"{name}_without").ctx)
    runs = home / "runs"
    assert same(weights(runs / f"{name}_with/model"), weights(runs / f"{name}_without/model"))


def test_a_stop_while_the_corpus_is_built_takes_effect(home, name):
    job = begin(home, name)
    job.stop.set()
    with pytest.raises(Stopped) as stopped:
        run(text_spec(home, seq_len=28), job.ctx)
    assert stopped.value.step == 0
    assert not job.of_type("begin")


def test_tied_predictions_get_their_mean_rank():
    logits = torch.tensor([[3.0, 1.0, 2.0], [5.0, 5.0, 5.0], [0.0, 4.0, 4.0]])
    assert rank(logits, torch.tensor([0, 1, 2])).tolist() == [1.0, 2.0, 1.5]


@pytest.mark.slow
def test_link_prediction_ranks_the_hidden_tail_among_those_of_its_length(home, name):
    job = begin(home, name)
    result = run(graph_spec(home, steps=1, eval_every=1), job.ctx)
    assert result["eval"]["links"] == result["eval"]["n"]
    assert result["eval"]["link_candidates"] >= 1
    assert 0 < result["eval"]["link_mrr"] <= 1


@pytest.mark.slow
def test_the_second_job_builds_no_data(home, name):
    for number in (1, 2):
        job = begin(home, f"{name}_{number}")
        run(text_spec(home, steps=1, seq_len=24), job.ctx)
        assert job.of_type("data")[0]["built"] is (number == 1)


def test_a_curve_may_be_amended_and_added_to(tmp_path):
    curve = Curve(tmp_path / "a.csv", [[1, 0.5, 0.5, math.nan, math.nan, math.nan, 1.0, 0.0]])
    curve.add({"step": 2, "total_loss": 0.25})
    curve.amend({"mlm_validation_accuracy": 1 / 3})
    curve.add({"step": 3, "total_loss": 1e-7})
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert lines[1:] == ["1,0.5,0.5,,,,1.0,0.0", f"2,0.25,,,{1 / 3},,,", "3,1e-07,,,,,,"]
