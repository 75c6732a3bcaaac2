"""Native kernels and fused decode steps are bit-identical to the decoder's forward pass."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
from engines import NATIVE_SIZES, make, prompt
from needs import needs

import warmd
from warmd.configs.precision import PRECISIONS
from warmd.jobs.compute import linear_forms, native
from warmd.jobs.compute.levels import MANY_ROWS, levels
from warmd.jobs.compute.linear_forms import (
    NativeFloat32Linear,
    UnpackedLinear,
    compact_float32,
    compact_or_unpacked,
)
from warmd.jobs.compute.linears import innermost, packed_areas
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.kv_cache import CHUNK
from warmd.jobs.engine.layer_ops import DecodeRows, TorchLayerOps
from warmd.jobs.engine.native_layer_ops import NativeLayerOps
from warmd.jobs.engine.parts import Part

MAX_GEMM_ROWS = 512  # that were measured
MAX_ROWS = 14  # three groups: four, five and five
PACKED = 8  # steps after which every layer of these models is packed


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    needs(native.is_available(), "numba and PyTorch's OpenMP")
    from warmd.jobs.compute import fused

    # Use warmd's kernels even if oneDNN's were measured to be faster.
    ours = replace(levels(), float32="warmd", max_rows=MANY_ROWS, tiled_rows=MANY_ROWS)
    for module in (linear_forms, fused):
        monkeypatch.setattr(module, "levels", lambda: ours)
    with torch.inference_mode():
        yield


def small(name: str = "Qwen2", **sizes: Any) -> Any:
    return make(name, **{**NATIVE_SIZES, **sizes})


def packed(model: Any, precision: str = "native") -> Decoder:
    decoder = Decoder(model, precision=precision)
    for _ in range(PACKED):
        decoder.forward([Part(decoder.new(1), [3], True)])
    assert decoder._fused_steps is not None
    assert decoder._fused_steps.is_ready
    return decoder


def without_steps(decoder: Decoder, parts: list[Part]) -> torch.Tensor:
    steps, decoder._fused_steps = decoder._fused_steps, None
    logits = decoder.forward(parts)
    decoder._fused_steps = steps
    return logits


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("name", "sizes", "threads"),
    [
        ("Qwen2", {}, 1),  # with biases
        ("Qwen2", {}, 3),
        ("Qwen3", {"head_dim": 64}, 2),  # with norms of queries and keys
        ("Llama", {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}, 3),
        ("Llama", {"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64}, 2),
    ],
    indirect=["threads"],
)
def test_a_fused_step_has_the_bits_of_the_unfused_pass(name, sizes, precision, threads):
    decoder = packed(small(name, **sizes), precision)
    kvs = [decoder.new(200) for _ in range(2 * MAX_ROWS)]
    prompts = [prompt(1 + 37 * number % 100, number) for number in range(MAX_ROWS)]
    for kv, ids in zip(kvs, prompts * 2, strict=True):
        decoder.forward([Part(kv, ids, True)])
    pairs = list(zip(kvs[:MAX_ROWS], kvs[MAX_ROWS:], strict=True))
    for step in range(40):
        rows = 1 + step * 3 % MAX_ROWS
        one = decoder.forward([Part(kv, [step], True) for kv, _ in pairs[:rows]])
        other = without_steps(decoder, [Part(kv, [step], True) for _, kv in pairs[:rows]])
        assert torch.equal(one, other)
    for kv, copy in pairs:
        assert torch.equal(kv.data[..., : kv.length, :], copy.data[..., : kv.length, :])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_prefill_has_the_bits_of_onednns_gemm(precision, threads):
    decoder = packed(small("Qwen2"), precision)
    for rows in (5, 10, 48, MAX_GEMM_ROWS, MAX_GEMM_ROWS + 1):
        length = rows - 3  # three are of another prompt
        kv, copy, other = (decoder.new(max(3, length)) for _ in range(3))
        ids, neighbor = prompt(length), Part(other, prompt(3), True)
        one = decoder.forward([Part(kv, ids, True), neighbor])
        other.length = 0
        assert torch.equal(one, without_steps(decoder, [Part(copy, ids, True), neighbor]))
        assert torch.equal(kv.data[..., :length, :], copy.data[..., :length, :])


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_weights_of_bfloat16_values_take_half_of_the_memory_and_give_the_same_bits(threads):
    from warmd.jobs.compute.native import layout, panels

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(rows, 896, generator=generator).bfloat16().float() for rows in (192, 64)]
    bias, x = torch.randn(256, generator=generator), torch.randn(70, 896, generator=generator)
    compact = compact_float32(weights, bias)
    assert isinstance(compact, NativeFloat32Linear)
    assert compact.panels.num_bytes == 2 * 256 * 896
    k_block = int(compact.panels.words[layout.K_BLOCK])
    whole = panels.float32_linear(weights, bias, k_block=k_block)
    for rows in (1, 2, 5, 70):
        assert torch.equal(compact(x[:rows]), whole(x[:rows]))
    weights[1][-1, -1] += 1e-4  # not a bfloat16 number any more
    assert isinstance(compact_or_unpacked(weights, bias), UnpackedLinear)
    [(_, num_bytes)] = packed_areas([compact_float32(weights, bias)])
    assert num_bytes == 4 * 256 * 896


def test_a_model_of_bfloat16_numbers_gives_the_same_bits_with_half_of_the_packed_bytes():
    model = small()
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    unpacked, decoder = Decoder(model), packed(model)
    num_weights = 0
    for linear in decoder.linears:
        form = innermost(linear)
        assert isinstance(form, NativeFloat32Linear)
        num_weights += form.shape[0] * form.shape[1]
    assert sum(size for _, size in packed_areas(decoder.linears)) == 2 * num_weights
    for length in (1, 5, 70):
        kvs = [each.new(100) for each in (unpacked, decoder)]
        for ids in (prompt(length, length), [7]):
            one, other = (
                each.forward([Part(kv, ids, True)])
                for each, kv in zip((unpacked, decoder), kvs, strict=True)
            )
            assert torch.equal(one, other)


def test_rowwise_operations_equal_those_of_pytorch():
    decoder = Decoder(small("Qwen3", head_dim=64, num_attention_heads=6, num_key_value_heads=3))
    shape = decoder.shape
    ours, theirs = NativeLayerOps(shape), TorchLayerOps(shape)
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
    for rows in (1, 5, 300):
        x, weight = torch.randn(rows, 128) * 5, torch.randn(128)
        torch.testing.assert_close(ours.rms_norm(x, weight), theirs.rms_norm(x, weight))
        gate_up = torch.randn(rows, 2 * 192) * 20
        torch.testing.assert_close(ours.swiglu(gate_up), theirs.swiglu(gate_up))
        qkv = torch.randn(rows, heads + 2 * kv_heads, size)
        result, expected = qkv.clone(), qkv.clone()
        cos, sin = decoder.rope.at(torch.arange(rows))
        norms = (torch.randn(size), torch.randn(size))
        for given in (norms, None):
            ours.norm_and_rope(result, given, cos, sin)
            theirs.norm_and_rope(expected, given, cos, sin)
            torch.testing.assert_close(result, expected)
        kvs = [decoder.new(100) for _ in range(rows)]
        for kv in kvs:
            kv.data.normal_()
        own = [decoder.fork(kv, 100, 100) for kv in kvs]
        found, wanted = torch.zeros(2, rows, heads, size)
        for operations, sequences, attended in ((ours, own, found), (theirs, kvs, wanted)):
            decode_rows = [DecodeRows(row, kv, row % 99) for row, kv in enumerate(sequences)]
            operations.attend(qkv, attended, decode_rows, 1)
        torch.testing.assert_close(found, wanted)
        assert all(torch.equal(kv.data, other.data) for kv, other in zip(kvs, own, strict=True))


@pytest.mark.parametrize("gate", [0.0, 1e-30, -1e-30, 87.5, 100.0, 3e38, -87.5, -100.0, -3e38])
def test_swiglu_of_any_size_equals_that_of_pytorch(gate):
    decoder = Decoder(small())
    gate_up = torch.full((1, 384), gate)
    gate_up[:, 192:] = 1
    wanted = torch.nn.functional.silu(torch.tensor(gate))
    torch.testing.assert_close(
        NativeLayerOps(decoder.shape).swiglu(gate_up)[0, 5], wanted, atol=1e-35, rtol=1e-6
    )


def test_m_rope_equals_that_of_transformers():
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    model = tiny_vision.make("Qwen2VL", **NATIVE_SIZES, rope_parameters=rope)
    ids = prompt(CHUNK + 1)  # the last token is a chunk of its own
    places = torch.randint(0, 60, (3, len(ids)), generator=torch.Generator().manual_seed(0))
    decoder = packed(model)
    sequences = [decoder.new(len(ids) + 1) for _ in range(2)]
    read = decoder.forward([Part(kv, ids, True, positions=places) for kv in sequences])
    written = decoder.forward([Part(kv, [9], True, positions=places[:, :1]) for kv in sequences])
    hidden = model.model.language_model(
        input_ids=torch.tensor([[*ids, 9]]),
        position_ids=torch.cat([places, places[:, :1]], dim=1)[:, None],
    ).last_hidden_state
    wanted = model.lm_head(hidden[0, -2:])
    for found in (torch.stack([read[0], written[0]]), torch.stack([read[1], written[1]])):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("part", ["model.embed_tokens", "model.layers.1.mlp.down_proj"])
def test_nan_weights_give_nan_logits(precision, part):
    model = small(tie_word_embeddings=False)
    weight = model.get_submodule(part).weight
    weight[3] = math.nan
    decoder = packed(model, precision)
    logits = decoder.forward([Part(decoder.new(5), [3], True)])
    assert logits.isnan().all()


@pytest.mark.parametrize("sizes", [{"intermediate_size": 160}, {"vocab_size": 100}])
def test_sizes_that_are_not_multiples_of_the_block_fall_back_to_pytorch(sizes):
    decoder = Decoder(small(**sizes))
    for _ in range(PACKED + 1):
        logits = decoder.forward([Part(decoder.new(1), [3], True)])
    assert decoder._fused_steps is None
    assert logits.isfinite().all()


@pytest.mark.nightly(
    part="levels",
    catches="code compiled wrongly for another processor, or from a broken cache",
)
@pytest.mark.parametrize("variables", [{"NUMBA_CPU_NAME": "generic"}, {"NUMBA_ENABLE_AVX": "0"}])
def test_tokens_are_right_when_numba_compiles_for_fewer_instruction_sets(variables):
    """NUMBA_ENABLE_AVX is 0 of itself for what LLVM takes for a "nocona", as in some machines."""
    script = """
import torch
from engines import NATIVE_SIZES, make
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.parts import Part
torch.inference_mode().__enter__()
model = make("Qwen2", **NATIVE_SIZES)
wanted = model(torch.tensor([[3]])).logits[0, 0]
decoder = Decoder(model)
for _ in range(9):
    found = decoder.forward([Part(decoder.new(1), [3], True)])[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
"""
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.parametrize("name", ["norm", "layers.1.input_layernorm", "layers.1.self_attn.k_norm"])
@pytest.mark.parametrize("change", ["half", "apart"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # PyTorch falls back to a slower path
def test_unsupported_norms_fall_back_to_pytorch(name, change):
    model = small("Qwen3", head_dim=64)
    weight = model.model.get_submodule(name).weight
    weight.data = weight.bfloat16() if change == "half" else weight.repeat_interleave(2)[::2]
    decoder = Decoder(model)
    for _ in range(PACKED + 1):
        logits = decoder.forward([Part(decoder.new(1), [3], True)])
    assert decoder._fused_steps is None
    torch.testing.assert_close(logits[0], model(torch.tensor([[3]])).logits[0, 0])


@pytest.mark.parametrize("is_step", [True, False])
def test_a_sequence_at_its_capacity_accepts_no_more_tokens(is_step):
    decoder = packed(small())
    full = decoder.new(1)
    decoder.forward([Part(full, [3], True)])
    parts = [Part(full, [4], True)]
    with pytest.raises(IndexError, match="room for 1"):
        decoder.forward(parts) if is_step else without_steps(decoder, parts)


def test_layers_of_different_sizes_fall_back_to_pytorch():
    model = small()
    other = small(intermediate_size=320).model.layers[1].mlp
    model.model.layers[1].mlp = other
    decoder = Decoder(model)
    for _ in range(PACKED + 1):
        logits = decoder.forward([Part(decoder.new(1), [3], True)])
    assert decoder._fused_steps is None
    torch.testing.assert_close(logits[0], model(torch.tensor([[3]])).logits[0, 0])


@pytest.mark.parametrize("precision", ["native", "bf16"])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj", "lm_head"])
def test_weights_of_zeros_do_not_decide_the_order_of_summation(name, precision):
    model = small(intermediate_size=1536, hidden_size=896, vocab_size=2048)
    model.get_submodule(name).weight[:1024] = 0
    decoder = packed(model, precision)
    for token in range(3, 30):
        parts = [[Part(decoder.new(1), [token], True)] for _ in range(2)]
        assert torch.equal(decoder.forward(parts[0]), without_steps(decoder, parts[1]))


@pytest.mark.slow
def test_bits_do_not_change_while_layers_are_packed_if_onednn_packs_in_another_order():
    """Simulates an older processor by oneDNN's environment variable."""
    script = """
import torch
from engines import NATIVE_SIZES, make
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.parts import Part
torch.inference_mode().__enter__()
for precision in ("native", "bf16", "int8", "int4"):
    decoder = Decoder(make("Qwen2", **NATIVE_SIZES), precision=precision)
    ones = [decoder.forward([Part(decoder.new(1), [3], True)]) for _ in range(9)]
    assert all(torch.equal(one, ones[0]) for one in ones)
"""
    environment = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.nightly(
    part="levels",
    catches="code compiled wrongly for another processor, or from a broken cache",
)
@pytest.mark.parametrize("trouble", ["damaged", "nowhere to write", "several at once", "no JIT"])
def test_machine_code_is_compiled_whatever_the_state_of_the_cache(tmp_path, trouble):
    sources = tmp_path / "warmd" / "jobs" / "compute"
    for part in ("__init__.py", "configs", "jobs"):
        place, copy = Path(warmd.__file__).parent / part, tmp_path / "warmd" / part
        if place.is_dir():
            shutil.copytree(place, copy, ignore=shutil.ignore_patterns("__py*"))
        else:
            copy.parent.mkdir()
            shutil.copy(place, copy)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from warmd.jobs.compute.native import linear; from warmd.jobs.compute import cache; "
        "assert cache.__file__.startswith(sys.argv[1]); assert linear.linear_entry.address; "
        "print(cache.folder())"
    )
    settings = {"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"}  # and no home

    def start(**environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(tmp_path)]
        return subprocess.Popen(command, env={**settings, **environment}, stdout=-1, text=True)

    def kept(process: subprocess.Popen[str]) -> str:
        out, _ = process.communicate()
        assert process.returncode == 0
        return out.strip()

    if trouble == "several at once":
        assert len({kept(process) for process in [start() for _ in range(4)]}) == 1
    elif trouble == "no JIT":
        assert kept(start(NUMBA_DISABLE_JIT="1")) != "None"
    elif trouble == "nowhere to write":
        (sources / "__pycache__").write_text("a file, so that no folder can be made there")
        assert kept(start(HOME="/dev/null")) == "None"
    else:
        folder = Path(kept(start()))
        indexes = list(folder.rglob("*.nbi"))
        assert indexes
        measurement = folder / "levels-0.json"  # of the processor: other processes read it
        measurement.touch()
        for index in indexes:
            index.write_bytes(b"damaged")
        assert Path(kept(start())) == folder
        assert all(index.read_bytes() != b"damaged" for index in indexes)
        assert measurement.exists()
