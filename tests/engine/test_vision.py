"""Images in prompts: completions are equal to those of transformers."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_vision
import torch
from PIL import Image
from prefill import FixedSpeed
from tiny_vision import IMAGE, png, url

from warmd.jobs.context import WarmModel
from warmd.jobs.engine import engine as engines, images
from warmd.jobs.engine.compute_thread import COMPUTE_THREAD
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.image_encoding import PromptImages, VisionEncoder, rope_positions_of
from warmd.jobs.engine.image_tokens import insert_image_tokens
from warmd.jobs.engine.images import Budget
from warmd.jobs.engine.request import End, Patches, Request, Sampling
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.files.jsonl import Place
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.models import image_parts

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> WarmModel:
    folder = tmp_path_factory.mktemp("vision")
    model, tokenizer = tiny_vision.save(folder)
    return WarmModel(name="demo", path=folder, model=model, tokenizer=tokenizer)


# Models that images are shown to, and whether the decoder takes their text part.
KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "Qwen2VL": (True, {}),
    "Qwen2_5_VL": (True, {}),
    "Qwen3VL": (True, {}),
    "Qwen2VL with a window": (False, {"use_sliding_window": True, "sliding_window": 16,
                                      "max_window_layers": 1}),
    "Qwen2_5_VL with a window": (False, {"use_sliding_window": True, "sliding_window": 16,
                                         "max_window_layers": 1}),
    "Qwen3VL with features for its last layer": (False, {"num_hidden_layers": 1}),
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WarmModel:
    """Each model that accepts images."""
    is_taken, sizes = KINDS[request.param]
    model = tiny_vision.make(request.param.partition(" ")[0], **sizes)
    assert Decoder.supports(model) is is_taken
    folder = tmp_path_factory.mktemp("each")
    model, tokenizer = tiny_vision.save(folder, model)
    return WarmModel(name="demo", path=folder, model=model, tokenizer=tokenizer)


@pytest.fixture
def engine(warm: WarmModel) -> Iterable[Engine]:
    engine = Engine(warm)
    yield engine
    engine.close()


def make_request(
    warm: WarmModel, *parts: str | bytes, budget: Budget | None = None, **how: Any
) -> Request:
    """A request whose prompt is of texts and images."""
    urls = [url(part) for part in parts if isinstance(part, bytes)]
    ids = [
        token
        for part in parts
        for token in ([2, IMAGE] if isinstance(part, bytes) else warm.tokenizer(part)["input_ids"])
    ]
    ids, seen = insert_image_tokens(warm, ids, urls, budget or Budget())
    return Request(ids=ids, images=seen, **{"sampling": GREEDY, "max_tokens": 12, **how})


def answer(engine: Engine, request: Request) -> str:
    engine.submit(request)
    text = ""
    while not isinstance(piece := request.pieces.get(timeout=60), End):
        text += piece.text
    if piece.error is not None:
        raise piece.error
    return text


def by_transformers(warm: WarmModel, request: Request) -> str:
    """What transformers generates."""
    ids = torch.tensor([request.ids])
    inputs = {}
    if request.images:
        inputs = {
            "pixel_values": torch.cat([p.patches() for p in request.images]),
            "image_grid_thw": torch.tensor([p.grid for p in request.images]),
            "mm_token_type_ids": (ids == IMAGE).long(),
        }
    out = warm.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
        eos_token_id=warm.tokenizer.eos_token_id, **inputs,
    )  # fmt: skip
    text: str = warm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def test_completions_with_images_equal_those_of_transformers(each):
    engine = Engine(each)
    answers = []
    for parts in (
        ("what is ", png(120, 60), "?"),
        (png(60, 200), png(100, 100, 1), "a" * 50, png(57, 57, 2), "and?"),
        ("no image" * 9,),
        ("what is ", png(300, 90, 3), "?"),
        ("what is ", png(300, 90, 4), "?"),
    ):
        request = make_request(each, *parts)
        answers.append(answer(engine, request))
        assert answers[-1] == by_transformers(each, request)
    assert answers[-1] != answers[-2]  # what is seen counts
    engine.close()


# The sizes of Qwen2.5-VL-3B, but for layers, words, and the feed-forward network of the text.
REAL_TEXT = {
    "hidden_size": 2048, "intermediate_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 128_000, "initializer_range": 0.05,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24],
                        "rope_theta": 1000000.0},
}  # fmt: skip
REAL_VISION = {
    "depth": 4, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
    "out_hidden_size": 2048, "window_size": 112, "fullatt_block_indexes": [3],
    "initializer_range": 0.02,
}  # fmt: skip


@pytest.mark.nightly(
    part="oracles", catches="a vision encoder that is wrong at the sizes of a real model only"
)
def test_completions_of_layers_of_the_real_shape_equal_those_of_transformers(tmp_path):
    _, tokenizer = tiny_vision.save(tmp_path)
    model = tiny_vision.make("Qwen2_5_VL", vision=REAL_VISION, **REAL_TEXT)
    warm = WarmModel(name="real", path=tmp_path, model=model, tokenizer=tokenizer)
    engine = Engine(warm)
    answers = []
    for parts in (
        ("what is ", png(420, 260), "?"),  # windows that its sides are no multiples of
        ("what is ", png(420, 260, 1), "?"),
        (png(140, 140, 2), "and ", png(90, 230, 3), "?"),
    ):
        request = make_request(warm, *parts)
        answers.append(answer(engine, request))
        assert answers[-1] == by_transformers(warm, request)
    assert answers[0] != answers[1]  # what is seen counts
    engine.close()


def test_several_choices_and_batched_requests_with_images_equal_transformers(each):
    engine = Engine(each)
    requested = [
        make_request(each, "what is ", png(150, 100, 5), "?", num_completions=2),
        make_request(each, "text alone " * 5),
        make_request(each, png(90, 90, 6), "b" * 70, png(150, 100, 5), "?"),
    ]
    wanted = [by_transformers(each, request) for request in requested]
    with COMPUTE_THREAD.changed:  # so that all of them are there for the first step
        for request in requested:
            engine.submit(request)
    for request, text in zip(requested, wanted, strict=True):
        texts = [""] * request.num_completions
        while not isinstance(piece := request.pieces.get(timeout=60), End):
            texts[piece.index] += piece.text
        assert piece.error is None
        assert texts == [text] * len(texts)
    engine.close()


def test_prefill_time_includes_the_vision_encoder(warm):
    engine = Engine(warm, prefill=FixedSpeed(1.0))  # chunk by chunk
    answer(engine, make_request(warm, "a" * 40))
    request = make_request(warm, png(120, 60), "a" * 500)
    begun = time.perf_counter()
    engine.submit(request)
    request.pieces.get(timeout=60)
    waited = time.perf_counter() - begun
    stats = request.stats
    assert stats.queued_s + stats.vision_s + stats.prefill_s > waited / 2
    engine.close()


def test_prompts_with_images_share_the_time_budget_of_a_step(warm, monkeypatch):
    engine = Engine(warm, prefill=FixedSpeed(1e9))  # all prompts in one step
    answer(engine, make_request(warm, "a"))
    ends: list[float] = []

    def encode(one: PromptImages, *, until: float, encode: Any = PromptImages.encode) -> None:
        ends.append(until)
        encode(one, until=until)

    monkeypatch.setattr(PromptImages, "encode", encode)
    requested = [make_request(warm, "what is ", png(60, 60, seed)) for seed in range(3)]
    with COMPUTE_THREAD.changed:  # so that all of them are there for the first step
        for request in requested:
            engine.submit(request)
    for request in requested:
        request.pieces.get(timeout=60)
    assert ends[:3] == [ends[0]] * 3
    engine.close()


def test_an_image_that_cannot_be_encoded_fails_its_request_only(warm, engine):
    enough = threading.Event()
    other = make_request(warm, "text alone", max_tokens=10_000, is_canceled=enough.is_set)
    engine.submit(other)
    other.pieces.get(timeout=60)
    spoilt = make_request(warm, "what is ", png(60, 60))
    (image,) = spoilt.images
    spoilt.images = [replace(image, patches=Patches(image.patches()[:-1], list))]
    with pytest.raises(RuntimeError, match="size"):
        answer(engine, spoilt)
    enough.set()
    while not isinstance(piece := other.pieces.get(timeout=60), End):
        reason = piece.finish_reason
    assert (reason, piece.error) == ("cancelled", None)


def test_rope_positions_equal_those_of_transformers(each):
    request = make_request(each, "what ", png(120, 60), png(60, 120), "is ", png(300, 90), "it?")
    ids = torch.tensor([request.ids])
    wanted, delta = each.model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == IMAGE).int(),
        image_grid_thw=torch.tensor([p.grid for p in request.images]),
    )
    places = rope_positions_of(len(request.ids), request.images, 2)
    assert torch.equal(places, wanted[:, 0])
    assert places.max() + 1 - len(request.ids) == delta.item()


def test_prompts_with_images_are_batch_invariant(warm, engine):
    def requested() -> list[Request]:
        return [
            make_request(warm, "what is ", png(150, 100, 5), "?", num_completions=2),
            make_request(warm, "text alone " * 5, max_tokens=40),
            make_request(warm, png(90, 90, 6), "b" * 70, png(150, 100, 5), max_tokens=30),
        ]

    alone = []
    for request in requested():
        fresh = Engine(warm)
        alone.append(answer(fresh, request))
        fresh.close()
    together = requested()
    for request in together:
        engine.submit(request)
    texts = []
    for request in together:
        pieces = []
        while not isinstance(piece := request.pieces.get(timeout=60), End):
            pieces.append(piece)
        assert piece.error is None
        texts.append("".join(piece.text for piece in pieces if piece.index == 0))
    first = alone[0]
    assert len(first) == 2 * len(texts[0])  # of both choices, which are the same
    assert [texts[1], texts[2]] == alone[1:]


def test_an_image_is_encoded_once_and_later_answers_are_equal(warm, engine, monkeypatch):
    encoded: list[Any] = []
    encode = VisionEncoder._encode_image

    def counting(self: VisionEncoder, image: Any) -> Any:
        encoded.append(image)
        return encode(self, image)

    monkeypatch.setattr(VisionEncoder, "_encode_image", counting)
    first = make_request(warm, "one ", png(150, 100), "turn " * 9)
    answer(engine, first)
    second = make_request(
        warm, "one ", png(150, 100), "turn " * 9, "then ", png(150, 100, 1), "two"
    )
    text = answer(engine, second)
    other = make_request(warm, "another prompt with it ", png(150, 100), "!")
    answer(engine, other)
    assert len(encoded) == 2
    assert second.stats.cached_tokens >= 32
    assert other.stats.cached_tokens == 0
    fresh = Engine(warm)
    assert answer(fresh, make_request(warm, "one ", png(150, 100), "turn " * 9, "then ", png(150, 100, 1), "two")) == text  # fmt: skip # noqa: E501
    fresh.close()


def test_another_image_of_the_same_size_does_not_hit_the_prefix_cache(warm, engine):
    answer(engine, make_request(warm, png(300, 200), "what?"))
    other = make_request(warm, png(300, 200, 1), "what?")
    fresh = Engine(warm)
    assert answer(engine, other) == answer(fresh, make_request(warm, png(300, 200, 1), "what?"))
    assert other.stats.cached_tokens == 0
    fresh.close()


@pytest.mark.slow
def test_large_images_are_resized(warm):
    def tokens(budget: Budget) -> int:
        return make_request(warm, png(1920, 1080), budget=budget).images[0].num_tokens

    assert tokens(Budget(thumbnail=800, max_pixels=10**6)) == 464
    assert tokens(Budget()) <= 200_000 // 28**2
    assert tokens(Budget(max_pixels=28 * 28 * 10)) <= 10


# --- What comes in --------------------------------------------------------------------------------


def bomb() -> bytes:
    """A PNG whose header claims 50,000 x 50,000 pixels."""
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )


@pytest.mark.parametrize(
    "spoilt",
    [
        url(b""), url(b"no image"), url(bomb()), url(png(50, 50)[:100]), url(png(9000, 30)[:-900]),
        "data:image/png;base64,???", "data:image/png,abc", "file:///nowhere.png", "file://\0",
    ],
)  # fmt: skip
def test_data_that_is_not_an_image_is_refused(spoilt):
    with pytest.raises(JobFailed, match="image"):
        images.read(spoilt, Budget())


def test_an_extreme_aspect_ratio_is_refused(warm):
    with pytest.raises(JobFailed, match="image"):
        make_request(warm, png(7000, 28))


@pytest.mark.parametrize("place", ["http://example.org/a.png", "/etc/passwd", 5, None])
def test_images_come_from_data_urls_and_files_only(place):
    part = {"type": "image_url", "image_url": {"url": place}}
    with pytest.raises(SpecError, match="image_url"):
        image_parts.read([{"role": "user", "content": [part]}], Place("messages", "chat", 0))


def test_text_cannot_contain_image_tokens(warm):
    with pytest.raises(JobFailed, match="2 image tokens of 1 images"):
        insert_image_tokens(warm, [5, IMAGE, IMAGE], [url(png(60, 60))], Budget())


def test_a_failed_preparation_of_the_vision_encoder_is_retried(warm, engine, monkeypatch):
    class Broken(VisionEncoder):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise MemoryError("no room for them")

    with monkeypatch.context() as full:
        full.setattr(engines, "VisionEncoder", Broken)
        with pytest.raises(RuntimeError, match="MemoryError: no room for them"):
            answer(engine, make_request(warm, "what is ", png(60, 60)))
    assert len(answer(engine, make_request(warm, "what is ", png(60, 60)))) == 12


def test_a_model_without_vision_encoder_refuses_images():
    model = tiny.model()
    blind = WarmModel(name="m", path=Path("none"), model=model, tokenizer=tiny.tokenizer())
    with pytest.raises(JobFailed, match=r"qwen2_vl or .* got m of type llama"):
        insert_image_tokens(blind, [5], [url(png(60, 60))], Budget())


@pytest.mark.parametrize("options", [
    {"prompt": "what?", "image": ["a.png"]},
    {"messages": json.dumps([{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url(png(60, 60))}}]}])},
])  # fmt: skip
def test_images_for_a_text_model_are_refused_at_the_command_line(tmp_path, options):
    (tmp_path / "a.png").write_bytes(png(60, 60))
    spec = InferSpec.parse(options).located(tmp_path)
    with pytest.raises(SpecError, match=r"images must go with .*qwen2_vl.*, got one of type llama"):
        spec.check_inputs({"model_type": "llama"})
    spec.check_inputs({"model_type": "qwen2_vl"})


@pytest.mark.parametrize(("orientation", "size"), [(1, (120, 60)), (6, (60, 120))])
def test_an_image_is_rotated_by_its_exif_orientation(tmp_path, orientation, size):
    path = tmp_path / "a.jpg"
    image = Image.new("RGB", (120, 60), "white")
    image.paste("black", (0, 0, 60, 60))  # its left half
    exif = Image.Exif()
    exif[0x0112] = orientation  # 6: rotate by 90 degrees to the right
    image.save(path, exif=exif)
    seen, found, _ = images.read(image_parts.FILE + str(path), Budget())
    assert (seen.size, found) == (size, size)
    grey = seen.convert("L").tobytes()
    is_dark = [grey[place] < 100 for place in (0, size[0] - 1)]  # the corners above
    assert is_dark == [True, orientation == 6]


def test_the_usage_of_a_job_with_images_counts_their_tokens(warm, tmp_path):
    class Models:
        def take(self, name: str) -> Any:
            return warm

    job = tiny.surroundings(tmp_path / "job")
    context: Any = job.ctx.__class__(**{**job.ctx.__dict__, "models": Models()})
    (tmp_path / "a.png").write_bytes(png(120, 60))
    options = {"prompt": "what?", "image": ["a.png"], "temperature": 0, "max_tokens": 8}
    spec = InferSpec.parse(options).located(tmp_path)
    spec.check_inputs(None)
    by_file = run(spec, context)
    part = {"type": "image_url", "image_url": {"url": url(png(120, 60))}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    options = {"messages": json.dumps(messages), "temperature": 0, "max_tokens": 8}
    by_url = run(InferSpec.parse(options), context)
    assert job.of_type("begin")[0]["image_tokens"] == [8]
    assert by_url["choices"] == by_file["choices"]
    assert by_file["timings"]["vision_s"] > 0
    with pytest.raises(SpecError, match="image"):
        InferSpec.parse({**options, "messages": "", "prompt": "a", "image": ["no"]}).check_inputs(
            {}
        )


def test_an_image_is_read_from_a_regular_file_only(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((str(tmp_path / "pipe"), "a named pipe"), ("/dev/zero", "a device")):
        with pytest.raises(SpecError, match=f"image: .*must be a regular file, got {kind}"):
            images.check(path)
        with pytest.raises(JobFailed, match=f"image: .*must be a regular file, got {kind}"):
            images.read(f"file://{path}", Budget())
