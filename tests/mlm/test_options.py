"""The options of the MLM kind: combinations that are refused, also with data and model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from mlm_jobs import SIZES, begin, graph_spec, text_spec
from transformers import (
    BertConfig,
)

from warmd import configs
from warmd.configs.yamlfile import read_mapping
from warmd.jobs import spec_class
from warmd.jobs.codegraph.encoder import CodeGraphConfig
from warmd.jobs.codegraph.sequences import train_tokenizer
from warmd.jobs.data.texts import TAKES
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.mlm.corpus import as_pretrained
from warmd.jobs.mlm.kind import run
from warmd.jobs.mlm.options import CODE_GRAPH_SIZES, MlmSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


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
            "objective: must go with model or architecture other than code-graph, got mlm with "
            "model none and architecture code-graph",
        ),
        (
            {"objective": "mlm", "architecture": "x", "mnm_weight": 0.5},
            "mnm_weight: must go with objective mlm+mnm, got 0.5 with objective mlm",
        ),
        ({"seq_len": 32}, "seq_len: must be at least 64 for mlm+mnm, got 32"),
        (
            {"tokenizer": "own"},
            "tokenizer: must go with model or architecture other than code-graph, got own with "
            "model none and architecture code-graph",
        ),
        (
            {"model": "m", "tokenizer": "train"},
            "tokenizer: must not be train with model, got train with model m",
        ),
        ({"model": "m", "layers": 2}, "layers: must not go with model, got 2 with model m"),
        (
            {"eval_every": 0, "eval_first": True},
            "eval_first: must go with eval_every above 0, got true with eval_every 0",
        ),
        (
            {"lr_scheduler": "constant", "warmup_steps": 10},
            "warmup_steps: must not be above 0 with lr_scheduler constant, got 10 with "
            "lr_scheduler constant",
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


def test_the_sizes_checked_at_submission_are_those_of_the_encoder():
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


def test_a_tokenizer_without_a_mask_token_is_refused_at_submission(home):
    folder = home / "without a mask"
    tiny.tokenizer().save_pretrained(folder)
    of_model = MlmSpec.parse({"model": "m", "objective": "mlm"})
    with pytest.raises(SpecError, match=r"^model: must have a tokenizer with a mask token, got m$"):
        of_model.check_model_files(folder)
    with pytest.raises(SpecError, match=r"^tokenizer: must have a tokenizer with a mask token"):
        text_spec(home, tokenizer=str(folder)).check_inputs({})
    replace(of_model, tokenizer="train").check_model_files(folder)


def test_a_tokenizer_that_is_too_large_for_the_model_fails(home, name):
    folder = home / "large"
    texts = [" ".join(f"{n:x}{n * 7:x}" for n in range(5000))]
    as_pretrained(train_tokenizer(texts, 400)).save_pretrained(folder)
    BertConfig(vocab_size=300, intermediate_size=32, **SIZES).save_pretrained(home / "small")
    with pytest.raises(
        JobFailed,
        match=r"^tokenizer: must have at most 300 tokens .* got 100 without an embedding: ",
    ):
        run(text_spec(home, "small", tokenizer=str(folder)), begin(home, name).ctx)
