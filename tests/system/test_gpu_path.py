"""The GPU code path, computed on a CPU: it gives the same results as the CPU code path.

The device "meta" stands in for a GPU where only shapes and places count: it has no numbers, so an
operation between it and the CPU fails, and so does reading a value from the device.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from breadth import mostly_slow
from engines import make, prompt
from group_trainers import train, trainer
from needs import needs
from peft import LoraConfig, get_peft_model

from warmd.daemon.fork.placement import Placement
from warmd.jobs.codegraph.encoder import CodeGraphConfig, new_encoder
from warmd.jobs.compute.device import free_bytes
from warmd.jobs.compute.linear_forms import PlainLinear
from warmd.jobs.compute.quantized import CastLinear
from warmd.jobs.context import WarmModel
from warmd.jobs.engine.cuda_graphs import Graphs
from warmd.jobs.engine.cuda_steps import SHORTEST, CudaSteps, KVSlots
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.kv_cache import CHUNK
from warmd.jobs.engine.layers import text_model
from warmd.jobs.engine.low_rank import Adapter
from warmd.jobs.engine.parts import Part
from warmd.jobs.errors import JobFailed
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.grpo.sampler import Sampler
from warmd.jobs.mlm.model import model_to_train
from warmd.jobs.mlm.options import MlmSpec
from warmd.jobs.sequences.attention import packed_attention
from warmd.jobs.sequences.packs import Pack
from warmd.jobs.sequences.passes import score_pack
from warmd.jobs.sequences.sequence import Sequence as Tokens

CAPACITY = SHORTEST + 100


@pytest.fixture(scope="module")
def model() -> Any:
    return make("Qwen2", max_position_embeddings=2 * SHORTEST)


def both(model: Any) -> tuple[Decoder, Decoder]:
    """A decoder with its forward pass, and one with fixed steps."""
    return Decoder(model), Decoder(model, use_cuda_steps=True)


class Twins:
    """One sequence in each of two decoders, which always compute the same parts of it."""

    def __init__(self, decoders: tuple[Decoder, Decoder], capacity: int = CAPACITY) -> None:
        self.kvs = [decoder.new(capacity) for decoder in decoders]


def step(
    decoders: tuple[Decoder, Decoder], work: list[tuple[Twins, list[int]]], **about: Any
) -> torch.Tensor:
    """Compute parts of some sequences in both, and return the logits, which are the same."""
    eager, fixed = (
        decoder.forward([Part(twins.kvs[i], ids, True, **about) for twins, ids in work])
        for i, decoder in enumerate(decoders)
    )
    torch.testing.assert_close(fixed, eager, rtol=1e-4, atol=1e-4)
    assert torch.equal(fixed.argmax(-1), eager.argmax(-1))
    return eager


@pytest.mark.parametrize("name", mostly_slow(["Llama", "Qwen2", "Qwen3"], but=["Qwen3"]))
@torch.inference_mode()
def test_a_sequence_decoded_in_fixed_steps_equals_the_decoders_pass(name):
    decoders = both(make(name))
    sequence = Twins(decoders)
    logits = step(decoders, [(sequence, prompt(CHUNK + 5))])
    for _ in range(20):
        logits = step(decoders, [(sequence, [int(logits[0].argmax())])])


@torch.inference_mode()
def test_sequences_join_and_leave_the_batch_at_any_token(model):
    decoders = both(model)
    # When each begins and ends, and how long its prompt is.
    plan = [(0, 9, 3), (1, 4, 70), (2, 12, 33), (2, 5, 1), (6, 14, 40), (7, 8, 2), (9, 14, 64)]
    running: dict[int, tuple[Twins, list[int]]] = {}
    for turn in range(15):
        for number in [number for number, (_, end, _) in enumerate(plan) if end == turn]:
            del running[number]
        work = list(running.values())
        begun = [number for number, (begin, _, _) in enumerate(plan) if begin == turn]
        work += [(Twins(decoders), prompt(plan[number][2], number)) for number in begun]
        if turn % 3 == 1:
            work.reverse()  # prompts before those that write
        if not work:
            continue
        logits = step(decoders, work)
        numbers = [*running, *begun]
        for number, (twins, _), row in zip(
            numbers[::-1] if turn % 3 == 1 else numbers, work, logits, strict=True
        ):
            running[number] = (twins, [int(row.argmax())])


@torch.inference_mode()
def test_a_sequence_that_outgrows_the_buffer_continues(model):
    decoders = both(model)
    sequence, other = Twins(decoders), Twins(decoders)
    step(decoders, [(sequence, prompt(SHORTEST - 2)), (other, prompt(5, 5))])
    for token in prompt(6, 1):
        step(decoders, [(sequence, [token]), (other, [token])])
    assert sequence.kvs[1].length == SHORTEST + 4


@torch.inference_mode()
def test_a_sequence_that_skips_a_step_loses_no_token(model):
    decoders = both(model)
    first, second = Twins(decoders), Twins(decoders)
    step(decoders, [(first, prompt(9)), (second, prompt(4, 4))])
    for token, work in zip(
        prompt(8, 2), [[first, second], [first], [second], [], [second, first]] * 2, strict=False
    ):
        if work:
            step(decoders, [(twins, [token]) for twins in work])
    step(decoders, [(first, prompt(5, 3))])  # many tokens at once, after those one by one


@torch.inference_mode()
def test_a_copied_sequence_has_the_kv_cache_of_fixed_steps(model):
    decoders = both(model)
    sequence = Twins(decoders)
    step(decoders, [(sequence, prompt(30))])
    for token in prompt(10, 1):
        step(decoders, [(sequence, [token])])
    copy = Twins(decoders)
    copy.kvs = [d.fork(kv, 38, CAPACITY) for d, kv in zip(decoders, sequence.kvs, strict=True)]
    step(decoders, [(copy, [7]), (sequence, [8])])


@torch.inference_mode()
def test_text_after_images_has_the_positions_of_the_decoders_pass(model):
    decoders = both(model)
    sequence = Twins(decoders)
    step(decoders, [(sequence, prompt(60))])
    for token in prompt(3, 1):
        step(decoders, [(sequence, [token])], offset=-24)


@torch.inference_mode()
def test_sequences_with_an_adapter_keep_it_beside_those_without(model):
    decoders = both(model)
    adapter = adapter_of(model)
    adapted, plain = Twins(decoders), Twins(decoders)
    step(decoders, [(adapted, prompt(9))], adapter=adapter)
    step(decoders, [(plain, prompt(4, 4))])
    for token in prompt(4, 1):
        own = step(decoders, [(adapted, [token])], adapter=adapter)
        step(decoders, [(plain, [token])])
    again = Twins(decoders)
    step(decoders, [(again, prompt(9))])
    for token in prompt(4, 1):
        without = step(decoders, [(again, [token])])
    assert not torch.allclose(own, without, atol=1e-2)


def adapter_of(model: Any) -> Adapter:
    """An adapter whose updates are as large as the weights."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an attribute that transformers deprecates
        adapted = get_peft_model(copy.deepcopy(model), config)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return Adapter.served(text_model(adapted).layers)


@torch.inference_mode()
def test_refreshed_fixed_steps_have_the_current_weights_in_the_same_memory():
    model = make("Qwen2", initializer_range=0.3)
    stepping = Decoder(model, make=CastLinear, use_cuda_steps=True)
    places = [linear._weight.data_ptr() for linear in stepping.linears]  # type: ignore[attr-defined]
    for change in (None, 0.1, 0.1):
        if change is not None:
            for weight in model.parameters():
                weight.data.add_(change * torch.randn_like(weight))
            stepping.refresh()
        decoders = Decoder(model, make=CastLinear), stepping
        sequence = Twins(decoders)
        step(decoders, [(sequence, prompt(12))])
        for token in prompt(3, 1):
            step(decoders, [(sequence, [token])])
    assert places == [linear._weight.data_ptr() for linear in stepping.linears]  # type: ignore[attr-defined]


@torch.inference_mode()
def test_nan_of_one_sequence_does_not_reach_the_next_one_in_its_row(model):
    decoders = both(model)
    spoilt, fine = Twins(decoders), Twins(decoders)
    decoders[1].forward([Part(spoilt.kvs[1], prompt(SHORTEST // 2), True)])
    spoilt.kvs[1].data.fill_(torch.nan)
    decoders[1].forward([Part(spoilt.kvs[1], [1], True)])
    step(decoders, [(fine, prompt(3))])
    assert step(decoders, [(fine, [5])]).isfinite().all()


@torch.inference_mode()
def test_without_memory_for_fixed_steps_the_decoders_pass_is_used(model):
    decoders = both(model)
    fixed = decoders[1]
    fixed._cuda_steps = CudaSteps(fixed, max_bytes=2 * fixed.num_bytes(SHORTEST))
    sequences = [Twins(decoders) for _ in range(3)]
    step(decoders, [(twins, prompt(5, 5)) for twins in sequences])
    for count in (2, 3, 1):  # two have room, three do not, one has again
        step(decoders, [(twins, [count]) for twins in sequences[:count]])


@torch.inference_mode()
def test_rows_are_freed_with_their_sequences(model):
    decoder = Decoder(model, use_cuda_steps=True)
    rows = KVSlots(decoder, 2**40)
    kept = [decoder.new(8) for _ in range(4)]
    assert rows.assign(kept) == [0, 1, 2, 3]
    del kept[1]
    assert rows.assign(kept) == [0, 2, 1]  # the last one has moved
    assert rows.data.shape[2] == 4


@torch.inference_mode()
def test_a_decoder_is_freed_with_its_last_reference(model):
    decoder = Decoder(model, use_cuda_steps=True)
    kv = decoder.new(8)
    decoder.forward([Part(kv, [1], True)])
    gone = weakref.ref(decoder)
    del decoder
    assert gone() is None  # and with it its memory, before the collector comes


class Repeated(Graphs):
    """Simulates a capture: computes a step three times, and returns the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, torch.Tensor] = {}

    def clear(self) -> None:
        self.results.clear()

    def run(self, key: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        for _ in range(3):
            found = compute()
        return self.results.setdefault(key, found).copy_(found)


@pytest.mark.slow
@torch.inference_mode()
def test_a_step_can_be_computed_again_and_its_logits_are_the_callers_own(model):
    decoders = both(model)
    graphs = Repeated()
    steps = decoders[1]._cuda_steps
    assert steps is not None
    steps._graphs = graphs
    sequences = [Twins(decoders) for _ in range(3)]
    step(decoders, [(twins, prompt(SHORTEST - 3)) for twins in sequences])
    first = decoders[1].forward([Part(twins.kvs[1], [9], True) for twins in sequences])
    kept = first.clone()
    decoders[0].forward([Part(twins.kvs[0], [9], True) for twins in sequences])
    for token in prompt(6, 1):
        step(decoders, [(twins, [token]) for twins in sequences])
    assert torch.equal(first, kept)
    # By rows and positions; those of the smaller buffer were forgotten.
    assert set(graphs.results) == {(4, 2 * SHORTEST)}


def test_each_decoder_captures_its_graphs_on_one_stream_of_its_own(monkeypatch):
    """cuBLAS keeps a workspace per stream, which a graph of another decoder must not free."""
    captured: list[Any] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    class Graph:
        def replay(self) -> None:
            pass

        def pool(self) -> str:
            return "pool"

    def capture(graph: Any, *, stream: Any, **_: Any) -> Any:
        captured.append(stream)
        return nullcontext()

    cuda: dict[str, Any] = {"Stream": Stream, "CUDAGraph": Graph, "graph": capture}
    cuda |= {"stream": lambda _: nullcontext(), "current_stream": Stream}
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    one, other = Graphs(), Graphs()
    one.run("a", lambda: torch.ones(1))
    one.clear()
    one.run("b", lambda: torch.ones(1))
    other.run("a", lambda: torch.ones(1))
    assert captured[0] is captured[1]
    assert captured[2] is not captured[0]


def test_a_fused_layer_is_no_second_copy_of_the_weights_on_a_gpu():
    model = make("Qwen2").to("meta")
    attention = model.model.layers[0].self_attn
    decoder = Decoder(model)
    storages = {
        layer.weight.untyped_storage()._cdata
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert len(storages) == 1
    assert not decoder.is_batch_invariant


def test_layers_that_share_a_fused_weight_keep_their_own_values():
    layers = [torch.nn.Linear(6, outputs) for outputs in (4, 2, 3)]
    before = [layer.weight.detach().clone() for layer in layers]
    fused = PlainLinear([layer.weight.detach() for layer in layers], None)
    fused.share_weight(layers)
    assert all(torch.equal(a.weight, b) for a, b in zip(layers, before, strict=True))
    layers[1].weight.data.zero_()
    assert not fused(torch.ones(1, 6))[0, 4:6].any()


@pytest.mark.parametrize(("share", "expected"), [(1.0, 50 + 5), (0.4, 40 - 15)])
def test_the_free_memory_of_a_gpu_is_what_the_share_of_the_process_leaves(
    monkeypatch, share, expected
):
    # Of 100 bytes 50 are free; this process holds 20, and uses 15 of them.
    for name, value in {
        "mem_get_info": (50, 100),
        "memory_reserved": 20,
        "memory_allocated": 15,
        "get_per_process_memory_fraction": share,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_bytes(torch.device("cuda:0")) == expected


@pytest.mark.gpu
@torch.inference_mode()
def test_captured_steps_equal_the_decoders_pass_on_a_gpu():
    needs(torch.cuda.is_available(), "a GPU")
    there = make("Qwen2").to("cuda:0")
    decoders = Decoder(there, use_cuda_steps=False), Decoder(there)
    sequences = [Twins(decoders) for _ in range(3)]
    step(decoders, [(twins, prompt(40)) for twins in sequences])
    for count in (1, 3, 3, 2, 1, 3):
        step(decoders, [(twins, [count]) for twins in sequences[:count]])


# No value is read from the device, and no operation mixes devices.


@torch.inference_mode()
def test_a_forward_pass_does_not_synchronize_with_the_device(model):
    decoder = Decoder(make("Qwen2").to("meta"), use_cuda_steps=False)
    kvs = [decoder.new(CAPACITY) for _ in range(3)]
    work = [Part(kv, prompt(length), True) for kv, length in zip(kvs, (1, 40, 70), strict=True)]
    assert decoder.forward(work).shape == (3, 200)
    assert decoder.forward([Part(kv, [1], True) for kv in kvs]).device.type == "meta"


@torch.inference_mode()
def test_a_fixed_step_does_not_synchronize_with_the_device():
    decoder = Decoder(make("Qwen3").to("meta"), use_cuda_steps=True)
    kvs = [decoder.new(CAPACITY) for _ in range(3)]
    decoder.forward([Part(kv, prompt(9), True) for kv in kvs])
    for count in (3, 2, 3):
        parts = [Part(kv, [1], True) for kv in kvs[:count]]
        assert decoder.forward(parts).shape == (count, 200)


# The models of a horse.


def test_weights_are_copied_to_the_device_once_for_all_jobs(tmp_path):
    warm = WarmModel(name="m", path=tmp_path, model=tiny.model(), tokenizer=tiny.tokenizer())
    placement = Placement("meta")
    placed = placement.shared(warm)
    assert {weight.device.type for weight in _tensors(placed.model)} == {"meta"}
    assert {weight.device.type for weight in _tensors(warm.model)} == {"cpu"}
    assert placement.shared(warm) is placed
    assert placed.tokenizer is warm.tokenizer  # to copy one takes a second
    assert placed.model.get_output_embeddings().weight is placed.model.get_input_embeddings().weight
    assert not any(weight.requires_grad for weight in placed.model.parameters())


def test_a_training_job_gets_its_own_model_on_the_device(tmp_path):
    warm = WarmModel(name="m", path=tmp_path, model=tiny.model(), tokenizer=tiny.tokenizer())
    placement = Placement("meta")
    one, other = placement.copied(warm), placement.copied(warm)
    assert {weight.device.type for weight in _tensors(one.model)} == {"meta"}
    assert not {id(t) for t in _tensors(one.model)} & {id(t) for t in _tensors(other.model)}


@pytest.mark.parametrize(
    "architecture", [pytest.param("code-graph", marks=pytest.mark.slow), "bert"]
)
def test_a_new_model_is_created_on_the_device(tmp_path, architecture):
    if architecture == "bert":
        config = transformers.BertConfig(
            hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1
        )
        config.save_pretrained(tmp_path)
        architecture = str(tmp_path)
    objective = "mlm+mnm" if architecture == "code-graph" else "mlm"
    spec = MlmSpec.parse({"architecture": architecture, "objective": objective})
    tokenizer = tiny.tokenizer()
    tokenizer.mask_token = tokenizer.pad_token
    made = model_to_train(spec, None, tokenizer, is_trained=True, device="meta")
    assert {weight.device.type for weight in _tensors(made)} == {"meta"}


def _tensors(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


# bfloat16.


def test_bfloat16_layers_of_a_gpu_are_those_of_the_cpu_to_rounding():
    torch.manual_seed(0)
    weights, bias = [torch.randn(20, 48), torch.randn(12, 48)], torch.randn(32)
    x = torch.randn(5, 48)
    found = CastLinear(weights, bias)(x)
    assert found.dtype == torch.float32
    wanted = torch.nn.functional.linear(x, torch.cat(weights), bias)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-1)


def gradients(model: Any, *, is_half: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of two completions, and what they teach each weight."""
    first = Tokens((5, 6, 7, 8, 9, 10), (0, 0, 0, 1, 1, 1), 0, shared=3)
    pack = Pack([first, Tokens((5, 6, 7, 11, 12), (0, 0, 0, 1, 1), 1, shared=3)])
    model.requires_grad_(True).zero_grad()
    with packed_attention(model):
        with torch.no_grad():  # as for a reference: its casts have no gradient
            before, *_ = score_pack(model, pack, 1.0, is_half=is_half)
        logps, entropies, _ = score_pack(model, pack, 1.0, is_half=is_half)
    assert torch.equal(before, logps)
    assert logps.dtype == entropies.dtype == torch.float32
    logps.sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in model.parameters())
    return logps.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_log_probabilities_in_bfloat16_and_their_gradients_are_those_of_float32_to_rounding():
    model = make("Qwen2", initializer_range=0.1)
    exact, exact_gradient = gradients(model, is_half=False)
    half, half_gradient = gradients(model, is_half=True)
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, rtol=2e-2, atol=5e-2)
    similarity = torch.cosine_similarity(half_gradient, exact_gradient, dim=0)
    assert similarity > 0.99


def test_grpo_with_bfloat16_trains_weights_of_float32(tmp_path):
    made = trainer("warmd", tmp_path, tiny.model())
    made.args.bf16 = True  # as on a GPU that has it
    before = [weight.detach().clone() for weight in made.model.parameters()]
    logged, weights = train(made)
    assert len(logged) == 5
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert any(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))


@pytest.mark.parametrize("beta", [0.1, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_policy_is_sampled_with_its_current_weights_in_every_step(tmp_path, monkeypatch, beta):
    """With a reference the policy shares its weights until the first update moves them."""

    def trained(folder: Path) -> list[torch.Tensor]:
        model = make("Qwen2", initializer_range=0.3, vocab_size=len(tiny.tokenizer()))
        folder.mkdir()
        made = trainer("warmd", folder, model, beta=beta, learning_rate=0.05)
        made.args.bf16 = True
        if beta:
            reference = made.task._reference
            for weight, its in zip(made.model.parameters(), reference.parameters(), strict=True):
                weight.data = its.data
        return train(made)[1]

    found = trained(tmp_path / "kept")
    kept, anew = Sampler._current_steps, []

    def current(sampler: Sampler) -> Decoder:
        sampler._stepping = None
        anew.append(kept(sampler))
        return anew[-1]

    monkeypatch.setattr(Sampler, "_current_steps", current)
    wanted = trained(tmp_path / "anew")
    assert len(anew) >= 5
    assert all(map(torch.equal, found, wanted))


def test_the_code_graph_encoder_has_nearly_the_same_losses_in_bfloat16():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    encoder = new_encoder(CodeGraphConfig(vocab_size=50, intermediate_size=64, **sizes)).eval()
    ids = torch.randint(5, 50, (2, 12))
    graph = {
        "rel_ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 1, 0, 0, 0, 0]] * 2),
        "chain_ids": torch.zeros_like(ids),
        "depth_ids": torch.tensor([[0, 0, 0, 3, 0, 2, 0, 1, 0, 0, 0, 0]] * 2),
        "role_ids": torch.tensor([[0, 1, 1, 2, 3, 2, 3, 2, 0, 0, 0, 0]] * 2),
    }
    found = []
    for is_half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            output = encoder(ids, torch.ones_like(ids), **graph, mlm_labels=ids, mnm_labels=ids)
        assert output.constraint_loss.dtype == output.loss.dtype == torch.float32
        found.append(output)
    for name in ("mlm_loss", "mnm_loss", "constraint_loss"):
        torch.testing.assert_close(found[1][name], found[0][name], rtol=2e-2, atol=2e-2)


def test_int8_completions_are_refused_on_a_gpu(tmp_path):
    there = tiny.surroundings(tmp_path)
    ctx = replace(there.ctx, device="cuda:0")
    with pytest.raises(JobFailed, match="rollout_dtype: must be float32 on a GPU"):
        run(GrpoSpec(samples=4, rollout_dtype="int8"), ctx)
