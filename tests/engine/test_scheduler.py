"""Continuous batching: a sequence gets the same tokens alone and in a batch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from engines import NATIVE_SIZES, make, prompt
from prefill import FailsAtStep, FixedSpeed
from waiting import wait_until

from warmd.configs.precision import PRECISIONS
from warmd.jobs.compute.levels import levels
from warmd.jobs.compute.linear_forms import UnpackedLinear, packed_float32
from warmd.jobs.compute.linears import innermost
from warmd.jobs.context import WarmModel
from warmd.jobs.engine import engines
from warmd.jobs.engine.compute_thread import COMPUTE_THREAD
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.engines import engine_of
from warmd.jobs.engine.fallback import FallbackRunner
from warmd.jobs.engine.kv_cache import CHUNK, MAX_PREFIXES, PrefixCache
from warmd.jobs.engine.parts import Part
from warmd.jobs.engine.request import End, Piece, Request, Sampling
from warmd.jobs.errors import LOST_CONTEXT_EXIT, JobFailed

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", params=["pytorch", "native"])
def qwen(request: pytest.FixtureRequest) -> Any:
    known = len(tiny.SPECIAL) + len(tiny.CHARACTERS)
    if request.param == "pytorch":
        return make("Qwen2", vocab_size=known)
    model = make("Qwen2", **NATIVE_SIZES)
    for without_text in (slice(len(tiny.SPECIAL)), slice(known, None)):
        model.lm_head.weight[without_text] = 0  # such tokens would be rarely written
    return model


@pytest.fixture
def engine(qwen: Any) -> Iterable[Engine]:
    engine = start(qwen)
    yield engine
    engine.close()


def start(model: Any, **settings: Any) -> Engine:
    warm = WarmModel(name="m", path=Path("none"), model=model, tokenizer=tiny.tokenizer())
    return Engine(warm, **settings)


def collect(request: Request, timeout_s: float = 60) -> list[tuple[str, str | None, int]]:
    """The text, finish reason and number of tokens of every choice."""
    choices: list[tuple[str, str | None, int]] = [("", None, 0)] * request.num_completions
    while True:
        piece = request.pieces.get(timeout=timeout_s)
        if isinstance(piece, End):
            if piece.error is not None:
                raise piece.error
            return choices
        text, _, tokens = choices[piece.index]
        choices[piece.index] = (text + piece.text, piece.finish_reason, tokens + len(piece.ids))


def generate(engine: Engine, request: Request) -> list[tuple[str, str | None, int]]:
    engine.submit(request)
    return collect(request)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_logits_equal_those_of_transformers(name):
    extra = {"head_dim": 24} if name == "Qwen3" else {}
    model = make(name, **({"sliding_window": None} if name == "Mistral" else {}), **extra)
    assert Decoder.supports(model)
    ids = prompt(CHUNK * 2 + 7)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0, [-3, -2, -1]]
        decoder = Decoder(model)
        kv = decoder.new(len(ids))
        logits = [
            decoder.forward([Part(kv, part, True)])[0] for part in (ids[:-2], ids[-2:-1], ids[-1:])
        ]
    torch.testing.assert_close(torch.stack(logits), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bfloat16_models_are_served(precision):
    model = make("Qwen2", vocab_size=81).to(torch.bfloat16)
    engine = start(model, precision=precision)
    requested = Request(ids=prompt(50), sampling=GREEDY, max_tokens=5)
    assert generate(engine, requested)[0][2] == 5
    engine.close()


def test_rope_of_llama_3_equals_that_of_transformers():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            "rope_theta": 10000.0}  # fmt: skip
    model = make("Llama", rope_parameters=rope)
    assert Decoder.supports(model)
    ids = prompt(150)
    with torch.inference_mode():
        decoder = Decoder(model)
        logits = decoder.forward([Part(decoder.new(150), ids, True)])
        wanted = model(torch.tensor([ids])).logits[0, -1:]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_are_batch_invariant(qwen, precision):
    with torch.inference_mode():
        decoder = Decoder(qwen, precision=precision)
        prompts = [prompt(length, length) for length in (1, 5, 31, 32, 33, 64, 100, 7, 2, 3)]
        alone = []
        for ids in prompts:
            kv = decoder.new(200)
            first = decoder.forward([Part(kv, ids, True)])[0]
            alone.append((first, decoder.forward([Part(kv, [9], True)])[0]))
        kvs = [decoder.new(200) for _ in prompts]
        first = decoder.forward([Part(kv, ids, True) for kv, ids in zip(kvs, prompts, strict=True)])
        second = decoder.forward([Part(kv, [9], True) for kv in kvs])
    assert decoder.is_batch_invariant
    for number, (one, two) in enumerate(alone):
        assert torch.equal(first[number], one)
        assert torch.equal(second[number], two)


@pytest.mark.slow
@pytest.mark.parametrize(
    "qwen",
    [
        pytest.param(
            "pytorch",
            marks=pytest.mark.nightly(
                part="oracles", catches="tokens that depend on the batch without native kernels"
            ),
        ),
        "native",
    ],
    indirect=True,
)
def test_mixed_requests_get_the_same_tokens_alone_and_batched(engine, qwen):
    def make_request(number: int) -> Request:
        sampling = GREEDY if number % 2 else Sampling(seed=number, top_p=0.9, top_k=50)
        return Request(
            ids=prompt(1 + 17 * number % 150, number),
            sampling=sampling,
            max_tokens=5 + number % 40,
            num_completions=3 if number % 7 == 0 else 1,
        )

    alone = []
    for number in range(32):
        fresh = start(qwen)
        alone.append(generate(fresh, make_request(number)))
        fresh.close()
    together = [make_request(number) for number in range(32)]
    for request in together:
        engine.submit(request)
    assert [collect(request) for request in together] == alone


QUICK_ENGINE = pytest.mark.parametrize(
    "qwen", [pytest.param("pytorch", marks=pytest.mark.slow), "native"], indirect=True
)


@QUICK_ENGINE
def test_reused_prefixes_change_nothing_and_are_counted(engine, qwen):
    first = prompt(3 * CHUNK + 10)
    longer = [*first, *prompt(50, 1)]
    other = [*first[: CHUNK + 5], *prompt(100, 2)]
    for ids, cached in ((first, 0), (longer, 3 * CHUNK), (other, CHUNK), (first, 3 * CHUNK)):
        with_reuse = Request(ids=ids, sampling=GREEDY, max_tokens=30)
        answer = generate(engine, with_reuse)
        fresh = start(qwen)
        assert answer == generate(fresh, Request(ids=ids, sampling=GREEDY, max_tokens=30))
        fresh.close()
        assert with_reuse.stats.cached_tokens == cached


def test_bits_do_not_change_while_layers_are_packed(qwen):
    with torch.inference_mode():
        decoder = Decoder(qwen)
        logits = [decoder.forward([Part(decoder.new(9), prompt(9), True)]) for _ in range(20)]
        while decoder.idle_step():
            logits.append(decoder.forward([Part(decoder.new(9), prompt(9), True)]))
    assert all(torch.equal(found, logits[0]) for found in logits)


def test_layers_are_packed_while_the_engine_is_idle(engine):
    requested = Request(ids=prompt(5), sampling=GREEDY, max_tokens=1)
    generate(engine, requested)
    wait_until(lambda: engine._idle_work_done)
    packed = [innermost(linear) for linear in engine._runner.linears]
    assert {type(form) for form in packed} == {type(packed_float32([torch.ones(64, 64)], None))}
    again = Request(ids=prompt(5), sampling=GREEDY, max_tokens=20)
    assert generate(engine, again)[0][2] == 20


def test_reused_prefixes_give_the_same_bits(qwen):
    ids = prompt(150)
    with torch.inference_mode():
        decoder = Decoder(qwen)
        whole = decoder.new(150)
        wanted = decoder.forward([Part(whole, ids, True)])
        other = decoder.fork(whole, 2 * CHUNK, 150)
        assert torch.equal(decoder.forward([Part(other, ids[2 * CHUNK :], True)]), wanted)


def test_prefixes_are_evicted_when_memory_is_short(qwen):
    room = Decoder(qwen).num_bytes(300)
    engine = start(qwen, budget_bytes=room)
    for number in range(6):
        ids = prompt(2 * CHUNK, number)
        generate(engine, Request(ids=ids, sampling=GREEDY, max_tokens=5))
    assert 0 < engine._prefix_cache.num_bytes <= room
    again = Request(ids=prompt(2 * CHUNK, 0), sampling=GREEDY, max_tokens=5)
    generate(engine, again)
    assert again.stats.cached_tokens == 0
    engine.close()


def test_the_prefix_cache_and_running_sequences_share_the_budget(qwen):
    num_bytes = Decoder(qwen).num_bytes
    engine = start(qwen, budget_bytes=num_bytes(400))
    for number in range(3):
        generate(engine, Request(ids=prompt(64, number), sampling=GREEDY, max_tokens=5))
    assert engine._prefix_cache.num_bytes == num_bytes(3 * 64)
    longer = [*prompt(64, 3), *prompt(32, 4)]  # replaces its own prefix in the cache
    for ids, room, kept in ((prompt(64, 3), 130, 128), (longer, 100, 96), (prompt(64, 5), 63, 0)):
        enough = threading.Event()
        writer = Request(
            ids=ids,
            sampling=GREEDY,
            max_tokens=400 - room - len(ids),
            is_canceled=enough.is_set,
        )
        engine.submit(writer)
        writer.pieces.get(timeout=30)
        assert engine._prefix_cache.num_bytes == num_bytes(kept)
        enough.set()
        collect(writer)
    engine.close()


def test_the_number_of_cached_prefixes_is_bounded(qwen):
    decoder, prefixes = Decoder(qwen), PrefixCache()
    for number in range(MAX_PREFIXES + 3):
        prefixes.add(np.array([number, *range(CHUNK - 1)]), decoder.new(CHUNK))
    assert len(prefixes) == MAX_PREFIXES
    assert prefixes.num_bytes == MAX_PREFIXES * decoder.num_bytes(CHUNK)
    assert not prefixes.has(np.array([2, *range(CHUNK - 1)]))
    assert prefixes.has(np.array([3, *range(CHUNK - 1)]))


def test_a_request_that_needs_more_than_the_budget_runs_alone(qwen):
    engine = start(qwen, budget_bytes=1)
    requested = [
        Request(ids=prompt(40, number), sampling=GREEDY, max_tokens=20) for number in range(3)
    ]
    for request in requested:
        engine.submit(request)
    assert [len(collect(request)) for request in requested] == [1, 1, 1]
    engine.close()


@QUICK_ENGINE
def test_a_canceled_request_ends_at_the_next_token_and_others_continue(engine):
    leave = threading.Event()
    ids = prompt(20)
    leaving = Request(ids=ids, sampling=GREEDY, max_tokens=400, is_canceled=leave.is_set)
    staying = Request(ids=ids, sampling=GREEDY, max_tokens=400)
    engine.submit(leaving)
    engine.submit(staying)
    begun = leaving.pieces.get(timeout=30)
    leave.set()
    ((text, reason, tokens),) = collect(leaving)
    ((whole, _, all_tokens),) = collect(staying)
    assert isinstance(begun, Piece)
    assert reason == "cancelled"
    assert len(begun.ids) + tokens < all_tokens
    assert whole.startswith(begun.text + text)
    alone = Request(ids=ids, sampling=GREEDY, max_tokens=400)
    assert generate(engine, alone)[0][0] == whole


def test_a_waiting_request_is_canceled_without_output(qwen):
    engine = start(qwen, budget_bytes=1)
    first = Request(ids=prompt(9), sampling=GREEDY, max_tokens=400)
    second = Request(ids=prompt(9), sampling=GREEDY, max_tokens=400, is_canceled=lambda: True)
    engine.submit(first)
    engine.submit(second)
    assert isinstance(second.pieces.get(timeout=30), End)
    collect(first)
    engine.close()


def test_a_long_prompt_does_not_delay_decoding(qwen):
    """While a prompt of 400 tokens is prefilled, another sequence decodes between its chunks."""
    engine = start(qwen, prefill=FixedSpeed(1.0))
    writer = Request(ids=prompt(4), sampling=GREEDY, max_tokens=500)
    engine.submit(writer)
    writer.pieces.get(timeout=30)
    reader = Request(ids=prompt(400, 5), sampling=GREEDY, max_tokens=1)
    before = writer.pieces.qsize()
    engine.submit(reader)
    collect(reader)
    assert writer.pieces.qsize() >= before + 400 // CHUNK - 1
    engine.close()


def test_a_token_id_outside_the_vocabulary_is_refused(engine, qwen):
    known = qwen.config.vocab_size
    with pytest.raises(JobFailed, match=f"token 1000000 is not among the {known}"):
        engine.submit(Request(ids=[10**6], sampling=GREEDY, max_tokens=5))


def test_an_error_in_a_step_is_reported_and_the_engine_continues(qwen):
    engine = start(qwen, prefill=FailsAtStep(3, MemoryError("no memory")))
    requested = [Request(ids=prompt(60), sampling=GREEDY, max_tokens=50) for _ in range(3)]
    for request in requested:
        engine.submit(request)
    errors = []
    for request in requested:
        with pytest.raises(RuntimeError, match=r"^engine: MemoryError: no memory$") as caught:
            collect(request)
        errors.append(caught.value)
    assert len(set(map(id, errors))) == len(requested)  # raising an exception changes its traceback
    (cause,) = {error.__cause__ for error in errors}  # it has the traceback of the step
    assert isinstance(cause, MemoryError)
    assert cause.__traceback__ is not None
    fine = Request(ids=prompt(5), sampling=GREEDY, max_tokens=5)
    assert generate(engine, fine)[0][2] == 5
    engine.close()


@pytest.mark.parametrize(
    ("way", "length"),
    [("new", 9), ("fork", CHUNK), ("fork", 9)],
    ids=["of its own", "to be kept", "of a second choice"],
)
def test_a_request_without_memory_for_its_kv_cache_fails_without_affecting_others(
    engine, monkeypatch, way, length
):
    def refuse(*_: Any) -> None:
        raise MemoryError("no memory")

    def requested() -> Request:
        return Request(ids=prompt(length), sampling=GREEDY, max_tokens=5, num_completions=2)

    enough = threading.Event()
    other = Request(ids=prompt(4), sampling=GREEDY, max_tokens=500, is_canceled=enough.is_set)
    engine.submit(other)
    other.pieces.get(timeout=30)
    with monkeypatch.context() as full:
        full.setattr(Decoder, way, refuse)
        with pytest.raises(MemoryError, match="no memory"):
            generate(engine, requested())
    assert [tokens for _, _, tokens in generate(engine, requested())] == [5, 5]
    enough.set()
    collect(other)


def test_a_sequence_larger_than_all_memory_fails_without_affecting_others(engine):
    endless = Request(ids=prompt(9), sampling=GREEDY, max_tokens=10**15)
    behind = Request(ids=prompt(5), sampling=GREEDY, max_tokens=5)
    with COMPUTE_THREAD.changed:  # so that both are there for the first step
        engine.submit(endless)
        engine.submit(behind)
    with pytest.raises(RuntimeError, match="memory"):
        collect(endless)
    assert collect(behind)[0][2] == 5


def test_an_unread_error_keeps_no_sequence_alive(qwen, monkeypatch):
    made = []

    def new(decoder: Decoder, capacity: int, new: Any = Decoder.new) -> Any:
        kv = new(decoder, capacity)
        made.append(weakref.ref(kv))
        return kv

    monkeypatch.setattr(Decoder, "new", new)
    engine = start(qwen, prefill=FailsAtStep(3, MemoryError("no memory")))
    requested = Request(ids=prompt(9), sampling=GREEDY, max_tokens=50)
    engine.submit(requested)
    engine.close()
    assert [kv() for kv in made] == [None]
    with pytest.raises(RuntimeError, match="MemoryError: no memory"):
        collect(requested)


def test_nan_logits_are_an_error():
    model = make("Llama", vocab_size=83)
    model.model.norm.weight.fill_(float("nan"))
    engine = start(model)
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(JobFailed, match="NaN or Inf in its logits"):
            generate(engine, Request(ids=prompt(5), sampling=sampling, max_tokens=5))
    # A scored prompt, of one part and of several.
    for length in (5, 100):
        with pytest.raises(JobFailed, match="NaN or Inf in its logits"):
            generate(
                engine,
                Request(ids=prompt(length), sampling=GREEDY, max_tokens=0, scored_from=1),
            )
    engine.close()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=83, n_positions=128, n_embd=32, n_layer=2, n_head=2, eos_token_id=None,
        bos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).requires_grad_(False).eval()


def test_jobs_with_the_same_served_precision_share_an_engine(monkeypatch):
    monkeypatch.setattr(engines, "_engines", {})  # those of this test alone
    served = {levels().served(precision) for precision in PRECISIONS}
    for model, kinds in ((gpt2(), 1), (make("Qwen2"), len(served))):
        warm = WarmModel(name="m", path=Path("none"), model=model, tokenizer=tiny.tokenizer())
        requested = {precision: engine_of(warm, precision) for precision in PRECISIONS}
        assert len(set(requested.values())) == kinds
        for engine in set(requested.values()):
            generate(engine, Request(ids=prompt(5), sampling=GREEDY, max_tokens=1))
            assert requested[engine.precision] is engine
            engine.close()


def test_other_architectures_are_served_one_by_one_and_equal_transformers():
    model = gpt2()
    assert not Decoder.supports(model)
    assert FallbackRunner(model).num_bytes(10) == 2 * 2 * 32 * 10 * 4
    engine = start(model)
    prompts = [prompt(length, length) for length in (3, 20, 9)]
    requested = [
        Request(ids=ids, sampling=GREEDY, max_tokens=20, num_completions=2) for ids in prompts
    ]
    for request in requested:
        engine.submit(request)
    tokenizer = tiny.tokenizer()
    for ids, request in zip(prompts, requested, strict=True):
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False,
            max_new_tokens=20, pad_token_id=0,
        )  # fmt: skip
        text = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        assert [choice[0] for choice in collect(request)] == [text, text]
    engine.close()


def test_memory_of_an_idle_engine_does_not_grow_with_requests(engine):
    ids = prompt(10)  # shorter than a chunk: nothing of it is kept
    for _ in range(50):
        generate(engine, Request(ids=ids, sampling=GREEDY, max_tokens=3))
    wait_until(lambda: engine.is_idle, timeout_s=10)
    assert engine._prefix_cache.num_bytes == 0


def test_a_model_whose_packed_copy_the_memory_budget_has_no_room_for_is_served_unpacked(qwen):
    warm = WarmModel(
        name="m", path=Path("none"), model=qwen, tokenizer=tiny.tokenizer(), may_pack=False
    )
    engine, packing = Engine(warm), start(qwen)
    answers = []
    for one in (engine, packing):
        generate(one, Request(ids=prompt(5), sampling=GREEDY, max_tokens=20))
        wait_until(partial(getattr, one, "_idle_work_done"))
        answers.append(generate(one, Request(ids=prompt(9), sampling=GREEDY, max_tokens=20)))
    forms = [{type(innermost(linear)) for linear in e._runner.linears} for e in (engine, packing)]
    assert forms[0] == {UnpackedLinear}
    assert forms[0] != forms[1]
    assert answers[0] == answers[1]
    engine.close()
    packing.close()


def test_batched_sampling_equals_sampling_one_by_one():
    model = make("Qwen2")
    completions = []
    for together in (False, True):
        engine = start(model)
        engine._samples_batches = together
        requested = [
            Request(ids=prompt(4, seed), sampling=Sampling(temperature=heat, seed=9), max_tokens=12)
            for seed, heat in enumerate((0.0, 1.0, 0.5))
        ]
        for request in requested:
            engine.submit(request)
        completions.append([collect(request) for request in requested])
        engine.close()
    assert completions[0] == completions[1]


# The third step of one engine raises a lack of memory, that of another one a lost context.
LOSING_THE_GPU = """
import torch
from pathlib import Path
import tiny
from engines import make, prompt
from prefill import FailsAtStep
from warmd.jobs.context import WarmModel
from warmd.jobs.engine.request import End, Request, Sampling
from warmd.jobs.engine.engine import Engine

warm = WarmModel(name="m", path=Path("m"), model=make("Qwen2"), tokenizer=tiny.tokenizer())
for kind in (torch.OutOfMemoryError, torch.AcceleratorError):
    error = kind("CUDA error: device-side assert triggered")
    engine = Engine(warm, prefill=FailsAtStep(3, error))
    for _ in range(2):
        request = Request(ids=prompt(4), sampling=Sampling(temperature=0), max_tokens=5)
        engine.submit(request)
        while not isinstance(piece := request.pieces.get(timeout=60), End):
            pass
        print(piece.error is None, flush=True)
    engine.close()
"""


@pytest.mark.nightly(
    part="episodes", catches="an engine that waits forever after its CUDA context is lost"
)
def test_a_lost_cuda_context_ends_the_process_and_a_lack_of_memory_does_not():
    done = subprocess.run(
        [sys.executable, "-c", LOSING_THE_GPU],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    printed = ["False", "True"]  # of the first engine
    assert (done.returncode, done.stdout.splitlines()) == (LOST_CONTEXT_EXIT, printed), done.stderr
