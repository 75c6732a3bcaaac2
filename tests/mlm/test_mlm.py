"""The MLM kind: options that fit together, right losses, and a resume without a trace."""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tiny
import torch
from mlm_jobs import CONFIGS, SIZES, make_home, text_spec
from torch.nn import functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
)

from warmd import configs
from warmd.configs.yamlfile import read_mapping
from warmd.jobs import spec_class
from warmd.jobs.codegraph.encoder import CodeGraphConfig, CodeGraphEncoder
from warmd.jobs.codegraph.sequences import IGNORED, train_tokenizer
from warmd.jobs.data.texts import TAKES
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.mlm.corpus import as_pretrained
from warmd.jobs.mlm.curve import COLUMNS, Curve
from warmd.jobs.mlm.data_order import StepOrder
from warmd.jobs.mlm.kind import run
from warmd.jobs.mlm.model import set_dropout
from warmd.jobs.mlm.options import CODE_GRAPH_SIZES, MlmSpec
from warmd.jobs.mlm.trainer import MaskedTrainer, rank

CLOCK = {"seconds"}
SOURCE = '''
import json


def double(number: int) -> int:
    """Twice the number."""
    return add(number, number)


class Class{n}:
    limit = {n}

    def value(self) -> int:
        return double(self.limit)
'''


pytestmark = pytest.mark.usefixtures("like_a_work_horse")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data, configurations, and a cache that all tests share."""
    folder = make_home(tmp_path_factory.mktemp("home"))
    (folder / "sources").mkdir()
    for n in range(8):
        (folder / "sources" / f"module{n}.py").write_text(SOURCE.format(n=n))
    return folder


def graph_spec(home: Path, **options: Any) -> MlmSpec:
    """A job of 8 steps of a tiny code-graph encoder."""
    small = {
        "data": str(home / "sources"),
        "vocab_size": 300,
        "seq_len": 64,
        "hidden_size": 16,
        "layers": 2,
        "heads": 2,
        "ffn_size": 32,
        "learning_rate": 3e-3,
        "batch_size": 2,
        "gradient_accumulation": 2,
        "steps": 8,
        "mnm_ramp_steps": 4,
        "validation": 0.25,
        "eval_every": 3,
        "save_every": 3,
        "keep": 100,
    }
    return MlmSpec.parse(small | options)


def begin(home: Path, name: str) -> tiny.Surroundings:
    return tiny.surroundings(home / "runs" / name)


@pytest.fixture
def name(request):
    """The name of a run directory, unique to this test."""
    return "".join(letter if letter.isalnum() else "_" for letter in request.node.name)


def weights(folder: Path, auto: Any = AutoModelForMaskedLM) -> dict[str, torch.Tensor]:
    return dict(auto.from_pretrained(folder).state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def told(events: list[dict[str, Any]], type: str) -> dict[int, dict[str, Any]]:
    """The events of one type by step, without times."""
    return {
        event["step"]: {key: event[key] for key in event.keys() - CLOCK}
        for event in events
        if event["type"] == type
    }


# Options.


def test_every_option_has_help_and_the_defaults_are_a_valid_job():
    assert all(info.help for info in MlmSpec.options().values())
    assert spec_class("mlm") is MlmSpec
    defaults = MlmSpec.parse({})
    assert MlmSpec.parse(defaults.to_json()) == defaults
    defaults.check_inputs(None)


def test_the_command_line_can_read_the_options_without_torch_or_numpy():
    code = (
        "import warmd.jobs.mlm.kind as m, sys; m.MlmSpec.options();"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "[]\n", child.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"objective": "mlm"},
            "architecture: must be a model folder or a config.json for the objective mlm (or give "
            "model, to train that one), got code-graph",
        ),
        (
            {"objective": "mlm", "architecture": "x", "mnm_weight": 0.5},
            "mnm_weight: must not be given for objective mlm, got 0.5",
        ),
        ({"seq_len": 32}, "seq_len: must be at least 64 for mlm+mnm, got 32"),
        ({"tokenizer": "own"}, "tokenizer: must be train or a folder for code-graph, got 'own'"),
        (
            {"model": "m", "tokenizer": "train"},
            "tokenizer: must be own or a folder for a model that exists, got 'train'",
        ),
        ({"model": "m", "layers": 2}, "layers: must not be given for a model that exists, got 2"),
        (
            {"eval_every": 0, "eval_first": True},
            "eval_first: must go with eval_every, got it alone",
        ),
        (
            {"lr_scheduler": "constant", "warmup_steps": 10},
            "lr_scheduler: must be constant_with_warmup or another for 10 warmup_steps, "
            "got constant",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused_by_name(options, message):
    with pytest.raises(SpecError) as caught:
        MlmSpec.parse(options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "nowhere"}, f"data: must be {TAKES}, got 'nowhere'"),
        (
            {"architecture": "/nowhere"},
            "architecture: must be code-graph, a model folder or a config.json, got '/nowhere'",
        ),
        ({"seq_len": 65}, "seq_len: must be at most 64 (the positions of the model), got 65"),
        ({"heads": 3}, "heads: must divide the hidden size of 16, got 3"),
    ],
)
def test_inputs_that_cannot_work_are_refused_before_they_are_queued(home, options, message):
    with pytest.raises(SpecError) as caught:
        text_spec(home, **options).check_inputs(None)
    assert str(caught.value) == message


PROFILES = Path(configs.__file__).parent / "profiles"


@pytest.mark.parametrize("profile", ["train_cpu", "train_cpu_optimized", "quick"])
def test_the_shipped_profiles_are_valid_jobs(profile):
    spec = MlmSpec.parse(read_mapping(PROFILES / f"{profile}.yaml"))
    spec.check_inputs(None)
    assert spec.seq_len == (512 if profile == "train_cpu" else 128)


def test_the_sizes_that_the_shell_checks_are_those_of_the_encoder():
    config = CodeGraphConfig().to_dict()
    assert {name: config[name] for name in CODE_GRAPH_SIZES} == CODE_GRAPH_SIZES


def test_a_path_is_that_of_the_shell_it_was_written_in(tmp_path):
    spec = MlmSpec.parse({"data": "a", "architecture": "b", "tokenizer": "c"}).located(tmp_path)
    assert (spec.data, spec.architecture, spec.tokenizer) == (
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        str(tmp_path / "c"),
    )
    assert MlmSpec.parse({}).located(tmp_path) == MlmSpec.parse({})


def test_warm_up_is_a_tenth_unless_it_is_given():
    assert MlmSpec.parse({"steps": 200}).warmup == 20
    assert MlmSpec.parse({"steps": 10_000}).warmup == 500
    assert MlmSpec.parse({"warmup_steps": 0}).warmup == 0
    assert MlmSpec.parse({"lr_scheduler": "constant"}).warmup == 0


# What a step sees.


def order(lengths: Any, **changes: Any) -> StepOrder:
    usual = {"micro_batch": 2, "accumulation": 2, "steps": 40, "seed": 1}
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
    assert len(set(found.max(1).tolist()[:20])) > 5  # long and short ones take turns


def test_a_step_does_not_depend_on_its_micro_batches():
    lengths = np.arange(100) % 13
    whole = list(order(lengths, micro_batch=4, accumulation=1))
    cut = list(order(lengths, micro_batch=1, accumulation=4))
    assert [[*chain(*cut[i : i + 4])] for i in range(0, len(cut), 4)] == whole


# The loss.


def losses_of(home: Path, name: str, spec: MlmSpec) -> dict[int, tuple[float, float]]:
    job = begin(home, name)
    run(spec, job.ctx)
    return {step: (e["loss"], e["grad_norm"]) for step, e in told(job.events, "step").items()}


@pytest.mark.parametrize("architecture", CONFIGS)
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


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_loss_is_the_mean_over_the_masked_tokens_of_the_step(
    home, name, architecture, monkeypatch
):
    """The reference: all examples of a step in one batch, with the model's own loss."""
    seen: dict[str, Any] = {}
    original = MaskedTrainer.get_batch_samples

    def keep(self: MaskedTrainer, *args: Any) -> Any:
        batches, counts = original(self, *args)
        seen.setdefault("batches", batches)
        model: Any = self.model
        seen.setdefault("state", {k: v.clone() for k, v in model.state_dict().items()})
        seen.setdefault("model", model)
        return batches, counts

    monkeypatch.setattr(MaskedTrainer, "get_batch_samples", keep)
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
    for step, event in told(job.events, "step").items():
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


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_head_is_computed_for_masked_tokens_only(home, name, architecture, monkeypatch):
    sizes = []
    original = F.cross_entropy

    def look(logits: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(logits))
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", look)
    run(text_spec(home, architecture, steps=1, eval_every=0, batch_size=8), begin(home, name).ctx)
    assert max(sizes) < 8 * 32 * 0.3


@pytest.mark.parametrize("architecture", CONFIGS)
def test_dropout_is_set_wherever_a_model_keeps_it(home, name, architecture):
    config = CONFIGS[architecture]
    torch.manual_seed(0)
    model: Any = AutoModelForMaskedLM.from_config(config)
    ids = torch.arange(10, 20)[None]
    set_dropout(model, 0.0)
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)
    set_dropout(model, 0.5)
    assert not torch.allclose(model.train()(ids).logits, model.eval()(ids).logits)


# Events, files, evaluation.


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


def test_metrics_csv_has_a_row_per_step_with_accuracies_at_evaluations(home, name):
    job = begin(home, name)
    run(graph_spec(home), job.ctx)
    with (home / "runs" / name / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    events, evals = told(job.events, "step"), told(job.events, "eval")
    assert list(evals) == [3, 6, 8]
    for row in rows:
        step = int(row["step"])
        assert float(row["total_loss"]) == events[step]["loss"]
        assert float(row["mnm_loss"]) == events[step]["mnm_loss"]
        assert float(row["mnm_weight"]) == events[step]["mnm_weight"]
        for part in ("mlm", "mnm"):
            expected = str(evals[step][f"{part}_acc"]) if step in evals else ""
            assert row[f"{part}_validation_accuracy"] == expected


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


def test_an_evaluation_uses_all_held_out_examples_or_eval_samples_of_them(home, name):
    for most, expected in ((0, 16), (5, 5), (1000, 16)):
        job = begin(home, f"{name}_{most}")
        run(text_spec(home, steps=1, eval_every=1, validation_examples=most), job.ctx)
        assert job.of_type("eval")[0]["n"] == expected


def test_without_held_out_examples_nothing_is_evaluated(home, name):
    job = begin(home, name)
    result = run(text_spec(home, steps=2, validation=0.0), job.ctx)
    assert result["eval"] is None
    assert not job.of_type("eval")


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


def test_link_prediction_ranks_the_hidden_tail_among_those_of_its_length(home, name):
    job = begin(home, name)
    result = run(graph_spec(home, steps=1, eval_every=1), job.ctx)
    assert result["eval"]["links"] == result["eval"]["n"]
    assert result["eval"]["link_candidates"] >= 1
    assert 0 < result["eval"]["link_mrr"] <= 1


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


# What does not fit.


def test_too_few_examples_fail_by_their_number(home, name):
    with pytest.raises(JobFailed, match=r"^data: must have at least 100 examples to train on"):
        run(text_spec(home, batch_size=100, gradient_accumulation=1), begin(home, name).ctx)


def test_an_objective_that_the_model_does_not_support_fails(home, name):
    with pytest.raises(JobFailed, match=r"^objective: mlm\+mnm is not for a BertForMaskedLM$"):
        run(graph_spec(home, architecture=str(home / "bert")), begin(home, name).ctx)


def test_a_tokenizer_without_a_mask_token_fails(home, name):
    folder = home / "maskless"
    tiny.tokenizer().save_pretrained(folder)
    with pytest.raises(JobFailed, match=r"^tokenizer: must have a mask token, got none$"):
        run(text_spec(home, tokenizer=str(folder)), begin(home, name).ctx)


def test_a_tokenizer_that_is_too_large_for_the_model_fails(home, name):
    folder = home / "large"
    texts = [" ".join(f"{n:x}{n * 7:x}" for n in range(5000))]
    as_pretrained(train_tokenizer(texts, 400)).save_pretrained(folder)
    BertConfig(vocab_size=300, intermediate_size=32, **SIZES).save_pretrained(home / "small")
    with pytest.raises(JobFailed, match=r"^tokenizer: must have at most 300 tokens .* got 400$"):
        run(text_spec(home, "small", tokenizer=str(folder)), begin(home, name).ctx)


# Stop and resume.


class PowerCut(BaseException):
    """Ends a run like a kill: nothing is saved any more."""


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
            again = told(job.events, type)
            assert all(again[s] == found[s] for s in again.keys() & found.keys())
            found |= again
    for type, found in events.items():
        assert found == told(whole.events, type)
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


@pytest.mark.parametrize(
    "architecture", ["bert", pytest.param("modernbert", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_every": 5, "mask_80_10_10": True, "lr_scheduler": "cosine"},
        {"save_every": 1, "batch_size": 8, "gradient_accumulation": 4, "masks": "static"},
    ],
    ids=["accumulated", "second pass", "every step"],
)
def test_a_run_that_died_resumes_bit_by_bit(home, name, architecture, options):
    spec = text_spec(home, architecture, **options)
    check_resume(home, name, spec, at=[2, 6, 11], auto=AutoModelForMaskedLM)


@pytest.mark.parametrize("save_every", [3, pytest.param(1, marks=pytest.mark.slow)])
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
    assert list(told(second.events, "step")) == list(range(5, 13))
    runs = home / "runs"
    assert same(weights(runs / f"{name}_killed/model"), weights(runs / f"{name}_whole/model"))
    assert (runs / f"{name}_killed/metrics.csv").read_text() == (
        runs / f"{name}_whole/metrics.csv"
    ).read_text()


@pytest.mark.parametrize(
    "step", [5, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 12))]
)
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
        assert told(first.events, type) | told(second.events, type) == told(whole.events, type)
    assert again["eval"]["mlm_loss"] == result["eval"]["mlm_loss"]
    runs = home / "runs"
    assert (runs / f"{name}_stopped/metrics.csv").read_text() == (
        runs / f"{name}_whole/metrics.csv"
    ).read_text()


def test_a_finished_run_does_not_train_or_evaluate_again(home, name):
    result = run(text_spec(home), begin(home, name).ctx)
    again = begin(home, name)
    assert run(text_spec(home), again.ctx) == result
    assert {event["type"] for event in again.events} == {"data", "begin"}


def test_a_finished_run_can_be_given_more_steps(home, name):
    run(text_spec(home), begin(home, name).ctx)
    more = begin(home, name)
    assert run(text_spec(home).extended(20), more.ctx)["steps"] == 20
    assert list(told(more.events, "step")) == list(range(13, 21))
    with (home / "runs" / name / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 21))


@pytest.mark.parametrize("vocab_size", [300, 8000])  # 8000: as many as the data give
def test_a_resume_on_other_data_is_refused(home, name, tmp_path, vocab_size):
    data = tmp_path / "texts.jsonl"
    data.write_bytes((home / "texts.jsonl").read_bytes())
    spec = text_spec(home, data=str(data), steps=4, vocab_size=vocab_size)
    run(spec, begin(home, name).ctx)
    data.write_bytes(data.read_bytes() + b'\n{"text": "one more, zwei mehr, trois de plus"}')
    with pytest.raises(JobFailed, match=r"^data: must be the data that the checkpoint was "):
        run(spec.extended(12), begin(home, name).ctx)
