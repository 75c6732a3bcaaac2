"""Models of all architectures are served with their own forward pass, or refused in one line."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from architectures import OTHERS, bert, make, t5
from breadth import mostly_slow
from transformers.utils.generic import ModelOutput

from warmd.jobs.context import WarmModel
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.fallback import FallbackRunner
from warmd.jobs.engine.request import End, Request, Sampling
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.grpo.kind import run as run_grpo
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.infer.kind import run as run_infer
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.mlm.kind import run as run_mlm
from warmd.jobs.mlm.options import MlmSpec
from warmd.jobs.sequences.attention import can_pack

# Those that return no cache: a token is computed from its whole sequence.
UNCACHED = {"OpenAIGPT", "RecurrentGemma"}


def warm(model: Any) -> WarmModel:
    return WarmModel(name="m", path=Path("none"), model=model, tokenizer=tiny.tokenizer())


def text_of(request: Request) -> str:
    text = ""
    while not isinstance(piece := request.pieces.get(timeout=60), End):
        text += piece.text
    if piece.error is not None:
        raise piece.error
    return text


def by_transformers(model: Any, ids: list[int], max_tokens: int) -> str:
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False, max_new_tokens=max_tokens, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    text: str = tiny.tokenizer().decode(out[0, len(ids) :], skip_special_tokens=True)
    return text


DAILY = ("Bloom", "Falcon", "GPT2", "Gemma2", "Mamba", "Mixtral", "OpenAIGPT", "Qwen3Next", "Rwkv")
WIDE = pytest.mark.nightly(
    part="oracles", catches="an architecture whose answers differ from those of transformers"
)


@pytest.mark.parametrize(
    "kind",
    mostly_slow(
        [pytest.param(kind, marks=() if kind in DAILY else WIDE) for kind in OTHERS],
        but=("GPT2", "Mamba", "Mixtral"),
    ),
)
def test_models_of_other_structures_are_served_as_transformers_serves_them(kind):
    model = make(kind)
    assert not Decoder.supports(model)
    assert not can_pack(model)
    prompts = [[5, 9, 14, 20, 33, 7, 41], [60, 61, 12], [8] * 20]
    wanted = [by_transformers(model, ids, 8) for ids in prompts]
    engine = Engine(warm(model))
    requested = [
        Request(ids=ids, sampling=Sampling(temperature=0), max_tokens=8) for ids in prompts
    ]
    for request in requested:  # computed alternately, token by token
        engine.submit(request)
    assert [text_of(request) for request in requested] == wanted
    assert (engine.uncached is not None) == (kind in UNCACHED)
    engine.close()


@dataclass
class RenamedOutput(ModelOutput):
    logits: Any = None
    memory: Any = None


class Renamed(transformers.MambaForCausalLM):
    """A model whose argument for the cache has a name of its own."""

    def forward(self, input_ids: Any, memory: Any = None, use_cache: bool = False) -> Any:
        theirs = next(name for name in signature(super().forward).parameters if "cache" in name)
        out = super().forward(input_ids, use_cache=use_cache, **{theirs: memory})
        return RenamedOutput(logits=out.logits, memory=out.get(theirs))


def test_a_cache_is_used_whatever_the_model_calls_it():
    model = make("Mamba")
    model.__class__ = Renamed
    assert FallbackRunner(model).uncached is None
    assert FallbackRunner(model).num_bytes(10) > 0


def test_an_unused_cache_is_reported_by_the_job_and_in_the_log(tmp_path, caplog):
    job = tiny.surroundings(tmp_path / "job", make("OpenAIGPT"))
    run_infer(InferSpec.parse({"model": "demo", "prompt": "12", "max_tokens": 2}), job.ctx)
    why = "OpenAIGPTLMHeadModel computes each token from the whole sequence, which is slow"
    assert job.of_type("warning")[0]["message"] == f"model: {why}: it returns no cache"
    assert f"{why}: it returns no cache" in caplog.messages


def test_the_memory_of_a_sequence_is_that_of_its_kv_cache():
    assert (
        FallbackRunner(make("Mamba")).num_bytes(10)
        == FallbackRunner(make("Mamba")).num_bytes(1000)
        > 0
    )
    grows = FallbackRunner(make("Phi3"))
    assert grows.num_bytes(10) == 2 * 2 * 2 * 8 * 10 * 4
    assert (
        FallbackRunner(make("Bamba")).num_bytes(10) > FallbackRunner(make("Bamba")).num_bytes(9) > 0
    )
    assert FallbackRunner(make("RecurrentGemma")).num_bytes(10) == 0  # computed anew for each token


@pytest.mark.usefixtures("like_a_work_horse")
@pytest.mark.parametrize("kind", ["Phi3", "Bamba"])
def test_models_of_other_structures_are_trained_without_packing(tmp_path, kind):
    job = tiny.surroundings(tmp_path / "job", make(kind))
    options = {"samples": 1, "num_generations": 2, "max_completion_length": 4, "save_every": 5,
               "reward": ["tiny:digit_share"]}  # fmt: skip
    result = run_grpo(GrpoSpec.parse(options), job.ctx)
    assert result["steps"] == 1
    assert job.of_type("begin")[0]["pack_tokens"] is None


# --- Models that a kind of job is not for ---------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bert("BertForMaskedLM"), r"got bert \(BertForMaskedLM\); mlm and encode take it"),
        (lambda: bert("BertModel"), r"got bert \(BertModel\); encode takes it"),
        (t5, r"got t5 \(T5ForConditionalGeneration\); no kind of job takes it"),
    ],
    ids=["masked", "headless", "encoder-decoder"],
)
def test_a_model_that_generates_no_text_is_refused_in_one_line(tmp_path, make, words):
    job = tiny.surroundings(tmp_path / "job", make())
    with pytest.raises(JobFailed, match=f"^model: must be a decoder that generates .*{words}$"):
        run_infer(InferSpec.parse({"prompt": "a"}), job.ctx)
    with pytest.raises(JobFailed, match=f"^model: must be a decoder that generates .*{words}$"):
        run_grpo(GrpoSpec.parse({"samples": 2}), job.ctx)


def test_a_model_without_a_head_for_masks_is_refused_in_one_line(tmp_path):
    job = tiny.surroundings(tmp_path / "job", bert("BertModel"))
    tokenizer: Any = job.ctx.models.take("demo").tokenizer
    tokenizer.add_special_tokens({"mask_token": "?"})
    (tmp_path / "data.txt").write_text("\n\n".join(f"abc def {n}" for n in range(60)))
    spec = MlmSpec.parse(
        {"model": "demo", "objective": "mlm", "data": str(tmp_path / "data.txt"), "steps": 1,
         "seq_len": 16, "eval_every": 0}
    )  # fmt: skip
    with pytest.raises(JobFailed, match=r"^model: must have a head .*BertModel\); encode takes it"):
        run_mlm(spec, job.ctx)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
        {"model_type": "llama", "architectures": ["LlamaModel"]},
        {"model_type": "code_graph", "architectures": ["CodeGraphEncoder"]},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"],
         "is_encoder_decoder": True},
    ],
    ids=lambda config: config["architectures"][0],
)  # fmt: skip
def test_models_that_generate_no_text_are_refused_at_the_command_line(config):
    for spec in (InferSpec.parse({"prompt": "a"}), GrpoSpec.parse({"samples": 2})):
        with pytest.raises(SpecError, match=r"^model: must be a decoder that generates text"):
            spec.check_inputs(config)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", None])
def test_models_that_generate_text_are_accepted_at_the_command_line(name):
    config = {"model_type": "any", **({"architectures": [name]} if name else {})}
    InferSpec.parse({"prompt": "a"}).check_inputs(config)


def test_models_without_an_mlm_head_are_refused_at_the_command_line(tmp_path):
    (tmp_path / "data.txt").write_text("abc")
    spec = MlmSpec.parse({"model": "m", "objective": "mlm", "data": str(tmp_path / "data.txt")})
    with pytest.raises(SpecError, match=r"^model: must have a head for masked tokens"):
        spec.check_inputs({"model_type": "bert", "architectures": ["BertModel"]})
