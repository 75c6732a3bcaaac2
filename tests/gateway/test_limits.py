"""Limits of the gateway per user: uploads, training options, full queues."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from gateway_requests import image_url
from gateways import Execution, Gateway
from small_disks import small_disk

from warmd.daemon.queue import keys
from warmd.jobs import KINDS, spec_class
from warmd.jobs.errors import SpecError

TRAINING = "reinforcement"


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        gateway = Gateway(Path(folder, "home"), tiny_model)
        yield gateway
        gateway.close()


def message_of(error: openai.APIStatusError) -> str:
    return str(error.response.json()["error"]["message"])


def upload(gateway: Gateway, content: bytes) -> Any:
    return gateway.openai().files.create(file=("a.jsonl", content), purpose="fine-tune")


def tune(gateway: Gateway, /, training_file: str = "arithmetic", **options: Any) -> Any:
    method: Any = {"type": TRAINING, TRAINING: {"hyperparameters": options}}
    return gateway.openai().fine_tuning.jobs.create(
        model="tiny", training_file=training_file, method=method
    )


# --- uploads


@pytest.mark.slow
def test_upload_beyond_the_limit_is_refused_until_a_file_is_deleted(make_gateway):
    gateway = make_gateway(max_uploads_bytes=10_000)
    first = upload(gateway, b"x" * 6_000)
    with pytest.raises(openai.APIStatusError) as caught:
        upload(gateway, b"x" * 6_000)
    assert caught.value.status_code == 507
    assert "max_uploads" in caught.value.message
    assert "\n" not in message_of(caught.value)
    gateway.openai().files.delete(first.id)
    assert upload(gateway, b"x" * 6_000).bytes == 6_000


@pytest.mark.slow
def test_concurrent_uploads_stay_within_the_limit(make_gateway):
    gateway = make_gateway(max_uploads_bytes=10_000)

    def try_it(_: int) -> None:
        with contextlib.suppress(openai.APIStatusError):
            upload(gateway, b"x" * 3_000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(try_it, range(8)))
    assert 1 <= len(gateway.openai().files.list().data) <= 3


@pytest.mark.slow
def test_file_unused_for_long_is_removed_and_a_used_one_stays(make_gateway):
    gateway = make_gateway(keep_uploads_s=3600.0)
    row = b'{"question": "1 + 1", "answer": "2"}\n'
    old, used = upload(gateway, row), upload(gateway, row * 2)
    for file in (old, used):
        os.utime(gateway.home.path / "files" / file.id, (1, 1))
    tune(gateway, used.id, samples=1)
    upload(gateway, b"x")
    ids = [file.id for file in gateway.openai().files.list()]
    assert used.id in ids
    assert old.id not in ids


def test_upload_is_one_file_and_few_fields(gateway):
    files = [("file", (f"{n}.jsonl", b"{}")) for n in range(20)]
    answer = httpx.post(f"{gateway.url}/v1/files", files=files)
    assert answer.status_code == 400
    data = {f"field{n}": "x" for n in range(50)}
    answer = httpx.post(f"{gateway.url}/v1/files", files=files[:1], data=data)
    assert answer.status_code == 400
    twice = {"purpose": ["assistants", "fine-tune"]}
    answer = httpx.post(f"{gateway.url}/v1/files", files=files[:1], data=twice)
    assert answer.json()["error"]["message"] == "purpose: must be given once"
    answer = httpx.post(f"{gateway.url}/v1/files?purpose=fine-tune", files=files[:1])
    assert answer.json()["error"]["message"] == "purpose: unknown or not supported"


def test_files_are_listed_by_purpose_and_in_both_orders(make_gateway):
    gateway = make_gateway()
    client = gateway.openai()
    ids = [upload(gateway, content).id for content in (b"{}", b"{}\n{}")]
    assert {file.id for file in client.files.list()} == set(ids)
    newest_first = [file.id for file in client.files.list()]
    assert [file.id for file in client.files.list(order="asc")] == newest_first[::-1]
    assert [file.id for file in client.files.list(purpose="fine-tune", limit=1)] == newest_first
    assert list(client.files.list(purpose="assistants")) == []


# --- a full disk


@pytest.fixture
def full_disk(gateway: Gateway) -> Iterator[None]:
    """Run directories are on a disk without room."""
    with small_disk(gateway.home.runs, "64k") as runs:
        with contextlib.suppress(OSError):
            (runs / "filler").write_bytes(bytes(1 << 20))
        yield


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_not_blamed_on_the_request(gateway):
    image: Any = {"type": "image_url", "image_url": {"url": image_url(4, 3)}}
    client = gateway.openai()
    for ask in (
        lambda: client.completions.create(model="tiny", prompt="1"),
        lambda: client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": [image]}]
        ),
        lambda: tune(gateway, samples=1),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            ask()
        assert (caught.value.status_code, caught.value.code) == (507, "disk_full")
        assert "No space left on device" in message_of(caught.value)
    assert gateway.waiting() == []
    assert set(os.listdir(gateway.home.runs)) - {".images", ".lock"} == {"filler"}


# --- trainings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_generations", 10**9),
        ("learning_rate", 1e308),
        ("temperature", 1e-300),
        ("temperature", 1e300),
        ("steps", 2**62),
        ("n_epochs", 10**12),
        ("batch_size", 10**9),
        ("samples", 10**15),
        ("max_completion_length", 10**12),
        ("max_prompt_length", 10**12),
        ("top_k", 10**15),
        ("epsilon", 1e300),
        ("beta", 1e300),
        ("weight_decay", 1e300),
        ("max_grad_norm", 1e300),
        ("warmup_steps", 10**15),
        ("keep", 10**9),
        ("log_completions", 10**9),
        ("template", "{question}" * 100_000),
        ("template", "{question}" * 17),
        ("system", "x" * 1_000_000),
    ],
)
def test_absurdly_large_training_option_is_refused_by_name(gateway, name, value):
    more: dict[str, Any] = {"chat_template": True} if name == "system" else {}
    with pytest.raises(openai.BadRequestError) as caught:
        tune(gateway, **more, **{name: value})
    inner = {"n_epochs": "epochs", "batch_size": "prompts_per_step"}.get(name, name)
    assert caught.value.param == f"method.{TRAINING}.hyperparameters.{inner}"
    assert len(message_of(caught.value)) < 300


@pytest.mark.parametrize("kind", KINDS)
def test_every_numeric_option_has_a_minimum_and_a_maximum(kind):
    for name, option in spec_class(kind).options().items():
        if option.type in (int, float):
            assert option.maximum is not None, name
            assert option.minimum is not None or option.above is not None, name
            with pytest.raises(SpecError, match=f"^{name}: must be "):
                spec_class(kind).parse({name: option.maximum * 2 + 1})


@pytest.mark.slow
def test_retry_after_of_a_full_train_queue_is_when_a_training_ends(make_gateway):
    gateway = make_gateway(http_queue_limit=1)
    tune(gateway)
    with pytest.raises(openai.RateLimitError) as caught:
        tune(gateway)
    assert int(caught.value.response.headers["retry-after"]) == 60  # none runs that could tell
    running = begin_training(gateway)
    for step in range(1, 5):
        then = time.time() - 30 * (4 - step)  # 30 s each
        running.emit("step", step=step, loss=1.0, steps_total=104, time=then)
    tune(gateway)
    with pytest.raises(openai.RateLimitError) as caught:
        tune(gateway)
    assert int(caught.value.response.headers["retry-after"]) == pytest.approx(3000, abs=10)
    assert "queue train" in caught.value.message


def begin_training(gateway: Gateway) -> Execution:
    """Begin the next training as a worker does."""
    store, worker = gateway.client.store, "train-0:test:1"
    source, target = store.queue("train").key, keys.taken(worker)
    popped: Any = store.connection.lmove(source, target, "LEFT", "RIGHT")
    begun = store.begin(popped, "train", worker)
    assert begun is not None
    return Execution(gateway, *begun)


# --- completions


@pytest.mark.slow
def test_completions_of_one_request_are_bounded_by_a_setting(make_gateway):
    gateway = make_gateway(max_completions=10)
    openai_of = gateway.openai()
    with pytest.raises(openai.BadRequestError) as caught:
        openai_of.completions.create(model="tiny", prompt=["a"] * 4, n=3)
    assert caught.value.param == "n"
    assert message_of(caught.value) == (
        "n: must be at most 2 with 4 prompts (10 completions of one request: max_completions), "
        "got 3"
    )
    with pytest.raises(openai.BadRequestError) as caught:
        openai_of.completions.create(model="tiny", prompt=["a"] * 11)
    assert caught.value.param == "prompt"
    assert message_of(caught.value) == "prompt: must be at most 10 (max_completions), got 11"
    with pytest.raises(openai.BadRequestError, match="n: must be at most 10 with 1 prompt "):
        openai_of.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], n=11
        )
    assert not gateway.waiting()


# --- Idempotency-Key


def test_concurrent_requests_with_one_key_and_different_bodies_make_one_job(gateway):
    def request(prompt: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt}
        headers = {"idempotency-key": "at-once"}
        return httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=30)

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(request, prompt) for prompt in ("a", "b", "c") * 2]
        job = gateway.take()
        job.finish("one")
        statuses = sorted(answer.result(20).status_code for answer in answers)
    assert statuses == [200, 200, 409, 409, 409, 409]
    refused = next(a.result() for a in answers if a.result().status_code == 409)
    assert refused.json()["error"]["code"] == "idempotency_key_reused"
    assert "use a new one" in refused.json()["error"]["message"]
    assert gateway.waiting() == []


# --- what others on the machine and in the network see


@pytest.mark.slow
def test_token_over_plain_http_is_warned_about_once_at_start(make_gateway, capfd):
    make_gateway(http_host="0.0.0.0", http_token="a-token-of-tests")
    make_gateway()
    assert capfd.readouterr().err.count("unencrypted") == 1


def test_files_with_prompts_are_readable_by_their_owner_only(gateway):
    upload(gateway, b"{}")
    for folder in ("server", "logs", "files"):
        found = [p for p in (gateway.home.path / folder).rglob("*") if p.is_file()]
        assert found
        for path in found:
            assert path.stat().st_mode & 0o077 == 0, path
