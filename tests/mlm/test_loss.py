"""The examples of an MLM step and its loss: independent of micro-batches, at masked tokens only."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlm_jobs import CONFIGS, begin, by_step, graph_spec, text_spec
from torch.nn import functional as F
from transformers import (
    AutoModelForMaskedLM,
)

from warmd.jobs.codegraph.sequences import IGNORED
from warmd.jobs.mlm.data_order import StepOrder
from warmd.jobs.mlm.kind import run
from warmd.jobs.mlm.model import set_dropout
from warmd.jobs.mlm.options import MlmSpec
from warmd.jobs.mlm.task import MaskedModeling

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def order(lengths: Any, **changes: Any) -> StepOrder:
    usual = {"micro_batch": 2, "accumulation": 2, "seed": 1}
    return StepOrder(np.asarray(lengths), **usual | changes)


def test_every_epoch_has_each_example_at_most_once_and_its_own_order():
    lengths = np.random.default_rng(0).integers(5, 100, 42)
    passes = [order(lengths).order_of_epoch(number) for number in range(3)]
    for found in passes:
        assert found.shape == (10, 4)
        assert len(set(found.flatten())) == 40
    assert not np.array_equal(passes[0], passes[1])
    assert {*passes[0].flatten(), *passes[1].flatten(), *passes[2].flatten()} == set(range(42))


def test_a_step_has_examples_of_similar_length():
    lengths = np.random.default_rng(0).integers(5, 100, 1000)
    found = lengths[order(lengths).order_of_epoch(0)]
    padded = found.max(1).sum() * found.shape[1]
    assert found.sum() > 0.93 * padded
    assert len(set(found.max(1).tolist()[:20])) > 5  # long and short ones alternate


def test_a_step_does_not_depend_on_its_micro_batches():
    lengths = np.arange(100) % 13
    whole = order(lengths, micro_batch=4, accumulation=1).steps_from(0)
    cut = order(lengths, micro_batch=1, accumulation=4).steps_from(0)
    for _ in range(40):
        assert [*chain(*next(cut))] == [*chain(*next(whole))]


def test_steps_that_are_skipped_change_no_later_one():
    lengths = np.arange(100) % 13
    every = order(lengths).steps_from(0)
    for step in range(60):
        assert next(order(lengths).steps_from(step)) == next(every)


def losses_of(home: Path, name: str, spec: MlmSpec) -> dict[int, tuple[float, float]]:
    job = begin(home, name)
    run(spec, job.ctx)
    return {step: (e["loss"], e["grad_norm"]) for step, e in by_step(job.events, "step").items()}


DAILY = ("bert", "modernbert")
OTHERS = pytest.mark.nightly(
    part="oracles", catches="an encoder whose loss depends on how a step is divided"
)
EACH = [pytest.param(one, marks=() if one in DAILY else OTHERS) for one in CONFIGS]


@pytest.mark.parametrize("architecture", EACH)
def test_accumulated_steps_are_those_of_one_large_batch(home, name, architecture):
    same_steps = {"steps": 2, "dropout": 0.0, "eval_every": 0, "lr_scheduler": "constant"}
    found = {
        (batch_size, accumulation): losses_of(
            home,
            f"{name}_{batch_size}",
            text_spec(
                home,
                architecture,
                batch_size=batch_size,
                gradient_accumulation=accumulation,
                **same_steps,
            ),
        )
        for batch_size, accumulation in ((16, 1), (2, 8))
    }
    for step in (1, 2):
        assert found[2, 8][step] == pytest.approx(found[16, 1][step], rel=1e-4)


@pytest.mark.parametrize("architecture", EACH)
def test_the_loss_is_the_mean_over_the_masked_tokens_of_the_step(
    home, name, architecture, monkeypatch
):
    """The reference: all examples of a step in one batch, with the model's own loss."""
    seen: dict[str, Any] = {}
    original = MaskedModeling.batches

    def keep(self: MaskedModeling, first_step: int) -> Any:
        for batch in original(self, first_step):
            model: Any = self._model
            seen.setdefault("batches", [part.batch for part in batch])
            seen.setdefault("state", {k: v.clone() for k, v in model.state_dict().items()})
            seen.setdefault("model", model)
            yield batch

    monkeypatch.setattr(MaskedModeling, "batches", keep)
    spec = text_spec(home, architecture, steps=1, dropout=0.0, eval_every=0, batch_size=4)
    ((loss, grad_norm),) = losses_of(home, name, spec).values()

    model = seen["model"]
    model.load_state_dict(seen["state"])
    model.zero_grad()
    total, count = torch.tensor(0.0), 0
    for batch in seen["batches"]:
        for i in range(len(batch["input_ids"])):
            length = int(batch["attention_mask"][i].sum())
            logits = model(input_ids=batch["input_ids"][i : i + 1, :length]).logits
            labels = batch["mlm_labels"][i : i + 1, :length]
            total = total + F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            count += int((labels != IGNORED).sum())
    by_hand = total / count
    by_hand.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert loss == pytest.approx(float(by_hand.detach()), rel=1e-4)
    assert grad_norm == pytest.approx(float(norm), rel=1e-3)


def test_steps_of_the_encoder_do_not_depend_on_their_micro_batches(home, name):
    same_steps = {"steps": 2, "dropout": 0.0, "eval_every": 0, "lr_scheduler": "constant"}
    one, other = (
        losses_of(
            home,
            f"{name}_{size}",
            graph_spec(home, batch_size=size, gradient_accumulation=8 // size, **same_steps),
        )
        for size in (8, 2)
    )
    assert other[1] == pytest.approx(one[1], rel=1e-4)
    assert other[2] == pytest.approx(one[2], rel=1e-4)


def test_the_parts_add_up_by_their_weights_and_the_ramp(home, name):
    job = begin(home, name)
    run(graph_spec(home, mlm_weight=0.7, mnm_weight=0.6, constraint_weight=0.5), job.ctx)
    for step, event in by_step(job.events, "step").items():
        assert event["mnm_weight"] == pytest.approx(0.6 * min(1, step / 4))
        assert event["loss"] == pytest.approx(
            0.7 * event["mlm_loss"]
            + event["mnm_weight"] * event["mnm_loss"]
            + 0.5 * event["constraint_loss"],
            rel=1e-5,
        )
        assert event["micro_steps"] == 2 * step


def test_without_its_weight_there_is_no_constraint(home, name):
    job = begin(home, name)
    run(graph_spec(home, constraint_weight=0.0, steps=1), job.ctx)
    assert "constraint_loss" not in job.of_type("step")[0]


@pytest.mark.parametrize("architecture", EACH)
def test_the_head_is_computed_for_masked_tokens_only(home, name, architecture, monkeypatch):
    sizes = []
    original = F.cross_entropy

    def look(logits: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(logits))
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", look)
    run(text_spec(home, architecture, steps=1, eval_every=0, batch_size=8), begin(home, name).ctx)
    assert max(sizes) < 8 * 32 * 0.3


@pytest.mark.parametrize("architecture", EACH)
def test_every_dropout_probability_of_a_model_is_set(home, name, architecture):
    config = CONFIGS[architecture]
    torch.manual_seed(0)
    model: Any = AutoModelForMaskedLM.from_config(config)
    ids = torch.arange(10, 20)[None]
    set_dropout(model, 0.0)
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)
    set_dropout(model, 0.5)
    assert not torch.allclose(model.train()(ids).logits, model.eval()(ids).logits)


def test_static_masks_are_those_of_the_first_epoch(home, name):
    # One step is a whole pass here, so that the same masks give the same loss but for training.
    options: dict[str, Any] = {
        "batch_size": 32,
        "gradient_accumulation": 2,
        "learning_rate": 1e-12,
        "dropout": 0.0,
    }
    for masks, is_same in (("static", True), ("dynamic", False)):
        found = losses_of(
            home, f"{name}_{masks}", text_spec(home, steps=2, masks=masks, eval_every=0, **options)
        )
        assert (found[1] == pytest.approx(found[2], rel=1e-5)) is is_same
