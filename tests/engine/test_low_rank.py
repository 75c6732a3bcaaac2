"""Adapters in the decoder: the results of PEFT, alone and in a batch of several adapters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from engines import NATIVE_SIZES, make, prompt
from needs import needs
from torch.nn import functional

from warmd.jobs.compute import onednn
from warmd.jobs.compute.batch_invariance import probe_rows
from warmd.jobs.engine import low_rank
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.kv_cache import CHUNK
from warmd.jobs.engine.layers import text_model
from warmd.jobs.engine.low_rank import FUSED, Adapted, Adapter, add_updates
from warmd.jobs.engine.parts import Part
from warmd.jobs.engine.request import Request, Sampling
from warmd.jobs.engine.sequence import keys_of


def with_adapter(model: Any, seed: int, **settings: Any) -> Any:
    """A PeftModel on a copy of a model, whose adapter changes it strongly."""
    chosen: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an attribute that transformers deprecates
        made = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**chosen))
    generator = torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        if weight.requires_grad:
            weight.data = 0.2 * torch.randn(weight.shape, generator=generator)
    return made.requires_grad_(False).eval()


OTHERS = pytest.mark.nightly(
    part="oracles", catches="an architecture on which an adapter in a batch differs from PEFT"
)


@pytest.fixture(
    scope="module",
    params=["Llama", *(pytest.param(one, marks=OTHERS) for one in ("Qwen2", "Qwen3")), "native"],
)
def model(request: pytest.FixtureRequest) -> Any:
    native = request.param == "native"
    return make("Qwen2", **NATIVE_SIZES) if native else make(request.param)


def adapter_of(model: Any) -> Adapter:
    return Adapter.served(text_model(model).layers)


@pytest.fixture
def anew() -> Iterator[None]:
    """Probe GEMMs again in this test and after it."""
    low_rank._batch_invariant.cache_clear()
    yield
    low_rank._batch_invariant.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("fastest", ["MKL", "oneDNN", "one row at a time"])
@pytest.mark.parametrize("shape", [(4, 1024), (8, 896), (16, 4864), (896, 8), (64, 4)])
def test_a_low_rank_product_has_the_same_bits_for_any_number_of_rows(monkeypatch, shape, fastest):
    if fastest != "MKL":  # as where MKL, or both, are batch-invariant for no number of rows
        refused = [functional.linear, low_rank._onednn][: 1 if fastest == "oneDNN" else 2]
        monkeypatch.setattr(
            "warmd.jobs.engine.low_rank.probe_rows",
            lambda forms, like: None if forms[0].func in refused else probe_rows(forms, like=like),
        )
    if fastest == "oneDNN":
        needs(onednn.is_available(), "oneDNN")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator)
    x = torch.randn(80, shape[1], generator=generator)
    whole = low_rank._linear(x, weight, True)
    torch.testing.assert_close(whole, functional.linear(x, weight), rtol=1e-4, atol=1e-3)
    for rows in (*range(1, 20), 31, 32, 33, 64, 79):
        assert torch.equal(low_rank._linear(x[:rows], weight, True), whole[:rows]), rows


SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "one layer": {"layers_to_transform": [1], "target_modules": ["q_proj", "o_proj"]},
    "some": {"target_modules": ["k_proj", "up_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "rslora": {"use_rslora": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_peft(model, name):
    wrapped = with_adapter(model, 1, **SETTINGS[name])
    ids = prompt(40)
    with torch.inference_mode():
        decoder = Decoder(model)
        part = Part(decoder.new(40), ids, True, adapter=adapter_of(wrapped))
        expected = wrapped(torch.tensor([ids])).logits[0, -1]
        plain = model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(decoder.forward([part])[0], expected, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(expected, plain, atol=0.1)


@pytest.mark.parametrize("name", SETTINGS)
def test_joined_products_are_the_same_but_for_rounding(model, name):
    wrapped = with_adapter(model, 1, **SETTINGS[name])
    adapter = adapter_of(wrapped)
    with torch.inference_mode():
        decoder = Decoder(model)
        found = [
            decoder.forward([Part(decoder.new(40), prompt(40), True, adapter=one)])[0]
            for one in (adapter, adapter.joined())
        ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-3)
    assert all(len(of_fused) <= 1 for of in adapter.joined().layers for of_fused in of.values())


@pytest.mark.parametrize("rows", [1, 5, 20])  # few: in native code, where it is supported
@pytest.mark.parametrize("name", ["all", "some", "patterns"])
def test_joined_updates_of_a_layer_add_the_same_but_for_rounding(model, name, rows):
    adapter = adapter_of(with_adapter(model, 1, **SETTINGS[name]))
    layer = text_model(model).layers[0]
    for fused, parts in FUSED.items():
        layers = [layer.get_submodule(part) for part in parts]
        x = torch.randn(rows, layers[0].in_features)
        y = torch.randn(rows, sum(each.out_features for each in layers))
        joined = y.clone()
        add_updates([Adapted(adapter, torch.arange(rows))], 0, fused, x, y)
        add_updates([Adapted(adapter.joined())], 0, fused, x, joined)
        torch.testing.assert_close(joined, y, rtol=1e-4, atol=1e-4)


def test_sequences_of_many_adapters_get_the_same_bits_in_a_batch_as_alone(model):
    adapters = [None, *(adapter_of(with_adapter(model, seed)) for seed in range(1, 4))]
    prompts = [prompt(length, length) for length in (3, CHUNK + 9, 17, 1, 40, 2 * CHUNK, 5, 23)]

    def answers(decoder: Decoder, numbers: list[int]) -> list[list[torch.Tensor]]:
        kvs = [decoder.new(2 * CHUNK + 9) for _ in numbers]
        found: list[list[torch.Tensor]] = [[] for _ in numbers]
        tokens = [list(prompts[number]) for number in numbers]
        for _ in range(6):
            parts = [
                Part(kv, ids, True, adapter=adapters[number % 4])
                for kv, ids, number in zip(kvs, tokens, numbers, strict=True)
            ]
            for row, logits in enumerate(decoder.forward(parts)):
                found[row].append(logits.clone())
                tokens[row] = [int(logits.argmax())]
        return found

    with torch.inference_mode():
        decoder = Decoder(model)
        while decoder.idle_step():
            pass
        together = answers(decoder, list(range(8)))
        for number in range(8):
            [alone] = answers(decoder, [number])
            assert all(torch.equal(a, b) for a, b in zip(alone, together[number], strict=True)), (
                number
            )


def test_merged_layers_equal_base_plus_adapter(model):
    adapter = adapter_of(with_adapter(model, 1))
    merged = copy.deepcopy(model)
    for layer, of_layer in zip(text_model(merged).layers, adapter.layers, strict=True):
        for update in (update for of_fused in of_layer.values() for update in of_fused):
            linear = layer.get_submodule(update.part)
            change = update.b @ update.a * update.scale
            linear.weight = torch.nn.Parameter(linear.weight.detach() + change)
    ids = prompt(20)
    with torch.inference_mode():
        decoder = Decoder(model)
        logits = decoder.forward([Part(decoder.new(20), ids, True, adapter=adapter)])[0]
        expected = merged(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def test_prompts_of_different_adapters_share_no_cached_prefix(model):
    one, other = (adapter_of(with_adapter(model, seed)) for seed in (1, 2))
    ids = prompt(30)
    keys = [
        keys_of(Request(ids=ids, sampling=Sampling(), max_tokens=1, adapter=adapter))
        for adapter in (None, one, other, one)
    ]
    assert not (keys[0] == keys[1]).any()
    assert not (keys[1] == keys[2]).any()
    assert (keys[1] == keys[3]).all()
