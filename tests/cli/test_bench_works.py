"""`warmd bench` on synthetic workloads: warmd, the stock library and the floor."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import warmd
from transformers import AutoConfig, AutoModelForCausalLM

from warmd.jobs.bench import model as bench_model, works
from warmd.jobs.compute.levels import levels


def test_the_floor_counts_gemms_decoding_and_adamw():
    shape = works.Shape(layers=1, vocab_size=10, hidden_size=4)
    work = works.GrpoWork(shape=shape, prompt=5, completion=3, generations=2)
    # A backbone of 100 weights and a head of 40: 5 + 2 x 2 tokens through the one, 2 x 3 through
    # the other, three products each; the prompt once more. 140 weights are read 3 + 4 times and
    # written 3 times.
    operations = 2 * 3 * (9 * 100 + 6 * 40) + 2 * 5 * 100
    assert work.floor_s(140, 10.0, 1e9) == pytest.approx(operations / 10, rel=1e-3)
    assert work.floor_s(140, 1e12, 8.0) == pytest.approx(4 * 140 * 10 / 8, rel=1e-3)
    int8 = replace(work, rollout_dtype="int8")
    assert int8.floor_s(140, 1e12, 8.0) == pytest.approx(140 * (3 + 4 * 7) / 8, rel=1e-3)
    # Of a frozen model weights have no gradients, and AdamW does not write them.
    lora = replace(work, lora=8)
    operations = 2 * 2 * (9 * 100 + 6 * 40) + 2 * 5 * 100
    assert lora.floor_s(140, 10.0, 1e9) == pytest.approx(operations / 10, rel=1e-3)
    assert lora.floor_s(140, 1e12, 8.0) == pytest.approx(140 * 4 * 3 / 8, rel=1e-3)
    base = replace(lora, base_precision="int8")
    assert base.floor_s(140, 1e12, 8.0) == pytest.approx((100 + 40 * 4) * 3 / 8, rel=1e-3)


def test_the_0_5b_workload_has_as_many_weights_as_the_model_of_that_name():
    config = AutoConfig.for_model("qwen2", **works.GRPO["0.5b"].shape.settings())
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == works.GRPO["0.5b"].shape.parameters == 494_032_768


@pytest.mark.slow
def test_prompts_have_the_documented_length():
    work = works.GRPO["0.5b"]
    tokenizer = bench_model.tokenizer(work.shape)
    ids = tokenizer(bench_model.prompts(work.shape, work.prompt, 20))["input_ids"]
    assert [len(prompt) for prompt in ids] == [work.prompt] * 20
    assert not set(tokenizer.all_special_ids) & {token for prompt in ids for token in prompt}


def rows(home: Path, *arguments: str) -> list[dict[str, Any]]:
    done = warmd("bench", *arguments, "--pairs", "1", "--threads", "1", "--json", home=home)
    assert done.code == 0, done.err
    assert done.err == ""
    for row in done.objects:
        assert all(row[name] > 0 for name in ("stock", "warmd", "faster", "floor", "bytes_s"))
        assert 0 < row["share"] < 1
    return done.objects


@pytest.mark.nightly(
    part="oracles", catches="a benchmark of GRPO whose two sides do not do the same work"
)
def test_grpo_is_compared_with_trl_in_time_and_memory(tmp_path):
    [row] = rows(tmp_path, "grpo", "--work", "tiny")
    assert row["work"] == "GRPO tiny: 2 x 8+4, beta 0.1, a step"
    assert row["unit"] == "s"
    assert row["faster"] == row["stock"] / row["warmd"]
    assert row["share"] == row["floor"] / row["warmd"]
    assert min(row["stock_private_bytes"], row["warmd_private_bytes"]) > 10**8


@pytest.mark.nightly(
    part="oracles", catches="a benchmark that no longer runs beside the stock library"
)
def test_grpo_with_an_adapter_is_compared_with_trl_and_peft(tmp_path):
    [row] = rows(tmp_path, "grpo", "--work", "tiny-lora")
    assert row["work"] == "GRPO tiny-lora: 2 x 8+4, beta 0.1, rank 4, a step"


@pytest.mark.nightly(
    part="oracles", catches="a benchmark that no longer runs beside the stock library"
)
def test_sft_is_compared_with_trl_in_time_and_memory(tmp_path):
    [row] = rows(tmp_path, "sft", "--work", "tiny")
    assert row["work"] == "SFT tiny: 2 x 4..8+2..6, a step"
    assert row["unit"] == "s"
    assert row["faster"] == row["stock"] / row["warmd"]
    assert min(row["stock_private_bytes"], row["warmd_private_bytes"]) > 10**8


@pytest.mark.nightly(
    part="oracles", catches="a benchmark that no longer runs beside the stock library"
)
def test_dpo_is_compared_with_trl_in_time_and_memory(tmp_path):
    [row] = rows(tmp_path, "dpo", "--work", "tiny")
    assert row["work"] == "DPO tiny: 2 x (4..8)+2x(2..6), a step"
    assert row["unit"] == "s"
    assert row["faster"] == row["stock"] / row["warmd"]
    assert min(row["stock_private_bytes"], row["warmd_private_bytes"]) > 10**8


@pytest.mark.nightly(
    part="oracles", catches="a benchmark that no longer runs beside the stock library"
)
def test_mlm_is_compared_with_stock_kernels_and_many_updates_are_projected(tmp_path):
    step, updates, bert = rows(tmp_path, "mlm", "--work", "tiny-encoder", "--work", "tiny-bert")
    assert step["work"] == "code-graph encoder tiny-encoder: 2 x 40, forward + backward"
    assert updates["work"] == "code-graph encoder tiny-encoder: 2 x 40, 100 updates by 3"
    assert [row["unit"] for row in (step, updates, bert)] == ["s", "h", "s"]
    assert updates["floor"] * 3600 > 100 * step["floor"]


@pytest.mark.nightly(
    part="oracles", catches="a benchmark of decoding that no longer runs beside transformers"
)
def test_decoding_in_each_precision_is_compared_with_transformers(tmp_path):
    own, *others = rows(tmp_path, "infer", "--work", "tiny")
    bytes_per_weight = {"float32": 4, "bf16": 2, "int8": 1, "int4": 0.5625}
    if levels().bfloat16 is None:
        del bytes_per_weight["bf16"]
    assert [row["work"].rsplit(", ")[-1] for row in (own, *others)] == list(bytes_per_weight)
    for row, weight_bytes in zip((own, *others), bytes_per_weight.values(), strict=True):
        assert row["unit"] == "tok/s"
        assert row["stock"] == own["stock"]
        weights = row["bytes_s"] / row["floor"] / weight_bytes
        assert weights == pytest.approx(own["bytes_s"] / own["floor"] / 4)
    assert own["share"] == own["warmd"] / own["floor"]  # of one round


@pytest.mark.slow
@pytest.mark.nightly(
    part="oracles", catches="a benchmark whose table has another work or figure than its JSON"
)
def test_a_table_is_printed_for_people(tmp_path):
    done = warmd("bench", "mlm", "--work", "tiny-bert", "--pairs", "1", home=tmp_path)
    head, line = done.out.splitlines()
    assert head.split()[:4] == ["WORK", "STOCK", "WARMD", "FASTER"]
    assert line.startswith("BERT tiny-bert: 2 x 40, forward + backward ")
    assert "x  " in line
    assert "%" in line
    work, seconds = "BERT tiny-bert: 2 x 40, forward + backward", r"[\d.e-]+ s"
    assert re.fullmatch(rf"{re.escape(work)}: {seconds} against {seconds}, [\d.]+x\n", done.err)


def test_a_workload_and_options_of_a_job_are_mutually_exclusive(tmp_path):
    refused = warmd("bench", "mlm", "--work", "bert", "--seed", "1", home=tmp_path)
    assert refused.is_refusal(2)
    assert "work: must be given without options of a job, got both" in refused.err


@pytest.mark.parametrize(
    ("device", "code", "message"),
    [
        ("gpu", 2, "device: must be auto, cpu, cuda:N or the UUID of a GPU"),
        pytest.param(
            "cuda:63", 1, "device: must be a GPU that CUDA can use", marks=pytest.mark.slow
        ),
    ],
)
def test_a_missing_device_is_refused_without_a_fallback(tmp_path, device, code, message):
    done = warmd("bench", "infer", "--work", "tiny", "--device", device, home=tmp_path)
    assert done.code == code
    assert message in done.err
