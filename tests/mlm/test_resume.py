"""MLM jobs that are stopped, killed or extended: the resume is exact."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from breadth import mostly_slow
from mlm_jobs import begin, by_step, graph_spec, same, text_spec, weights
from transformers import (
    AutoModelForMaskedLM,
)

from warmd.jobs.codegraph.encoder import CodeGraphEncoder
from warmd.jobs.errors import JobFailed, Stopped
from warmd.jobs.mlm.kind import run
from warmd.jobs.mlm.options import MlmSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


class PowerCut(BaseException):
    """Ends a run like a power failure: nothing more is saved."""


def check_resume(home: Path, name: str, spec: MlmSpec, *, at: list[int], auto: Any) -> None:
    """Compare a run that dies after each step of `at` with one that does not."""
    whole = begin(home, f"{name}_whole")
    result = run(spec, whole.ctx)
    events: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "eval": {}}
    folder = f"{name}_died"
    for step in [*at, None]:
        job = begin(home, folder)
        if step is not None:
            job.raise_at_step[step] = PowerCut()
            with pytest.raises(PowerCut):
                run(spec, job.ctx)
        else:
            assert run(spec, job.ctx)["metrics"]["loss"] == result["metrics"]["loss"]
        torch.rand(7)  # the next process has used up randomness differently
        for type, found in events.items():
            again = by_step(job.events, type)
            assert all(again[s] == found[s] for s in again.keys() & found.keys())
            found |= again
    for type, found in events.items():
        assert found == by_step(whole.events, type)
    runs = home / "runs"
    assert same(weights(runs / folder / "model", auto), weights(runs / f"{name}_whole/model", auto))
    last = f"checkpoints/checkpoint-{spec.steps}/optimizer.pt"
    one, other = (
        torch.load(runs / f"{name}_{end}" / last, weights_only=True)["state"]
        for end in ("died", "whole")
    )
    assert all(same(one[key], other[key]) for key in other)
    assert (runs / folder / "metrics.csv").read_text() == (
        runs / f"{name}_whole" / "metrics.csv"
    ).read_text()


OTHERS = pytest.mark.nightly(
    part="oracles", catches="an encoder or a moment with which a resumed job has other bits"
)


@pytest.mark.parametrize("architecture", ["bert", pytest.param("modernbert", marks=OTHERS)])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"save_every": 5, "mask_80_10_10": True, "lr_scheduler": "cosine"},
        pytest.param(
            {"save_every": 1, "batch_size": 8, "gradient_accumulation": 4, "masks": "static"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["accumulated", "second pass", "every step"],
)
def test_a_run_that_died_resumes_bit_by_bit(home, name, architecture, options):
    spec = text_spec(home, architecture, **options)
    check_resume(home, name, spec, at=[2, 6, 11], auto=AutoModelForMaskedLM)


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [3, pytest.param(1, marks=OTHERS)])
def test_the_encoder_resumes_bit_by_bit_with_dropout_and_ramp(home, name, save_every):
    spec = graph_spec(home, save_every=save_every, dropout=0.2)
    check_resume(home, name, spec, at=[2, 5, 8], auto=CodeGraphEncoder)


def test_kill_9_in_mid_run_loses_nothing_but_the_steps_since_the_checkpoint(home, name):
    spec = text_spec(home)
    run(spec, begin(home, f"{name}_whole").ctx)
    child = os.fork()
    if child == 0:
        job = begin(home, f"{name}_killed")
        job.kill_at_step = 7
        run(spec, job.ctx)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    second = begin(home, f"{name}_killed")
    run(spec, second.ctx)
    assert list(by_step(second.events, "step")) == list(range(5, 13))
    runs = home / "runs"
    assert same(weights(runs / f"{name}_killed/model"), weights(runs / f"{name}_whole/model"))
    assert (runs / f"{name}_killed/metrics.csv").read_text() == (
        runs / f"{name}_whole/metrics.csv"
    ).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, *(pytest.param(step, marks=OTHERS) for step in (3, 12))])
def test_an_evaluation_that_a_stop_interrupts_is_run_after_the_resume(home, name, step):
    # The stop is set by the step event: after the check at the step's end, before its evaluation.
    spec = text_spec(home, eval_every=1 if step == 3 else 5)
    whole = begin(home, f"{name}_whole")
    result = run(spec, whole.ctx)
    first = begin(home, f"{name}_stopped")
    emit = first.ctx.emit

    def stop_at_step(type: str, /, *, step: int | None = None, **fields: Any) -> None:
        emit(type, step=step, **fields)
        if type == "step" and step == stop_step:
            first.stop.set()

    stop_step = step
    object.__setattr__(first.ctx, "emit", stop_at_step)
    with pytest.raises(Stopped) as stopped:
        run(spec, first.ctx)
    assert stopped.value.step == step
    second = begin(home, f"{name}_stopped")
    again = run(spec, second.ctx)
    for type in ("step", "eval"):
        assert by_step(first.events, type) | by_step(second.events, type) == by_step(
            whole.events, type
        )
    assert again["eval"]["mlm_loss"] == result["eval"]["mlm_loss"]
    runs = home / "runs"
    assert (runs / f"{name}_stopped/metrics.csv").read_text() == (
        runs / f"{name}_whole/metrics.csv"
    ).read_text()


@pytest.mark.slow
def test_a_finished_run_does_not_train_or_evaluate_again(home, name):
    result = run(text_spec(home), begin(home, name).ctx)
    again = begin(home, name)
    assert run(text_spec(home), again.ctx) == result
    assert {event["type"] for event in again.events} == {"data", "begin"}


@pytest.mark.slow
def test_a_finished_run_can_be_given_more_steps(home, name):
    run(text_spec(home), begin(home, name).ctx)
    more = begin(home, name)
    assert run(text_spec(home).extended(20), more.ctx)["steps"] == 20
    assert list(by_step(more.events, "step")) == list(range(13, 21))
    with (home / "runs" / name / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 21))


# 8000: as many as the data give
@pytest.mark.parametrize("vocab_size", mostly_slow([300, 8000], but=[300]))
def test_a_resume_on_other_data_is_refused(home, name, tmp_path, vocab_size):
    data = tmp_path / "texts.jsonl"
    data.write_bytes((home / "texts.jsonl").read_bytes())
    spec = text_spec(home, data=str(data), steps=4, vocab_size=vocab_size)
    run(spec, begin(home, name).ctx)
    data.write_bytes(data.read_bytes() + b'\n{"text": "one more, zwei mehr, trois de plus"}')
    with pytest.raises(JobFailed, match=r"^data: must be the data that the checkpoint was "):
        run(spec.extended(12), begin(home, name).ctx)
