"""The HTTP gateway in a daemon: inference with a real model, fine-tuning with OpenAI's client."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import cross_encoders
import httpx2 as httpx
import openai
import orjson
import psutil
import pytest
import tiny
from daemons import Daemon
from gateways import openai_client
from waiting import wait_until

from warmd.configs.config import ModelConfig, WorkerConfig
from warmd.daemon.client import control

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ROWS = b"".join(b'{"question": "%d + 1", "answer": "%d"}\n' % (n, n + 1) for n in range(6))
QUICK = {
    "num_generations": 2,
    "max_completion_length": 4,
    "save_every": "2",
    "template": "{question}=",
}


class Served:
    """A daemon and a client of its gateway."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.url: str = wait_until(lambda: self.http()["url"])
        self.openai = openai_client(self.url)

    def http(self) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.status()["http"]
        return found

    def jobs(self) -> list[str]:
        return [job["id"] for job in self.daemon.client.jobs.all() if job["kind"] == "infer"]

    def tune(self, **options: Any) -> Any:
        hyperparameters = {**QUICK, **options}
        method: Any = {
            "type": "reinforcement",
            "reinforcement": {
                "grader": {"type": "warmd", "reward": ["correctness"]},
                "hyperparameters": hyperparameters,
            },
        }
        return self.openai.fine_tuning.jobs.create(
            model="chat", training_file=self.file_id, method=method, seed=7, metadata={"a": "b"}
        )

    @property
    def file_id(self) -> str:
        return self.openai.files.create(file=("sums.jsonl", ROWS), purpose="fine-tune").id

    def tuned(self, job_id: str, *statuses: str) -> Any:
        def reached() -> Any:
            job = self.openai.fine_tuning.jobs.retrieve(job_id)
            return job if job.status in statuses else None

        return wait_until(reached, timeout_s=90)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for long texts and a template for chats."""
    folder = tmp_path_factory.mktemp("chat") / "chat"
    tiny.model(positions=4096).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(daemon: Daemon, model: Path) -> Iterator[Served]:
    """Load the model `chat` and yield a client of the daemon; unload the model at the end."""
    control.load_model(daemon.config, ModelConfig(name="chat", path=str(model)))
    served = Served(daemon)
    yield served
    served.openai.close()
    control.unload_model(daemon.config, "chat")


@pytest.fixture(scope="module")
def served(shared_daemon: Daemon, chat_model: Path) -> Iterator[Served]:
    with serving(shared_daemon, chat_model) as served:
        yield served


FORKED = pytest.mark.nightly(
    part="daemons", catches="a request that a forked horse answers otherwise than a resident one"
)


@pytest.fixture(scope="module", params=["resident", pytest.param("fork", marks=FORKED)])
def answering(
    request: pytest.FixtureRequest, daemons: Callable[..., Daemon], chat_model: Path
) -> Iterator[Served]:
    """Inference by a resident horse, and by one horse per request."""
    if request.param == "resident":
        yield request.getfixturevalue("served")
        return
    daemon = daemons(http_port=0, workers=(WorkerConfig(name="infer-0", queue="infer", threads=1),))
    daemon.start()
    with serving(daemon, chat_model) as served:
        yield served
    daemon.close()


# --- the process


def test_health_of_a_ready_daemon_is_200(served):
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}


def test_health_is_not_delayed_by_busy_workers(served):
    zygote = served.daemon.pid("zygote")
    os.kill(zygote, signal.SIGSTOP)  # as while it loads a large model
    try:
        assert httpx.get(f"{served.url}/health", timeout=2).status_code == 200
    finally:
        os.kill(zygote, signal.SIGCONT)


@pytest.mark.slow
def test_health_of_a_daemon_that_does_not_respond_is_503(served):
    supervisor = served.daemon.pid("supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    try:
        answer = httpx.get(f"{served.url}/health", timeout=10)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert answer.status_code == 503
    assert "does not reply" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_killed_gateway_is_restarted_while_its_jobs_continue(served):
    before = served.http()["pid"]
    os.kill(before, signal.SIGKILL)
    after = wait_until(lambda: (h := served.http())["pid"] not in (None, before) and h["url"] and h)
    served.url = after["url"]
    served.openai.close()
    served.openai = openai_client(served.url)
    assert httpx.get(f"{served.url}/health").status_code == 200


@pytest.mark.nightly(
    part="daemons", catches="a gateway that never listens though its port is free again"
)
def test_occupied_port_is_reported_and_retried_and_the_gateway_ends_with_its_daemon(
    make_daemon,
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon = make_daemon(http_port=taken.getsockname()[1])
        daemon.start()
        assert "in use" in wait_until(lambda: daemon.status()["http"]["problem"])
        with socket.create_connection(taken.getsockname()), taken.accept()[0]:
            pass  # it still belongs to whoever had it
    url = wait_until(lambda: daemon.status()["http"]["url"])
    assert httpx.get(f"{url}/v1/models").status_code == 200
    pid = daemon.status()["http"]["pid"]
    daemon.stop()
    assert not psutil.pid_exists(pid)


# --- answers


def test_completion_and_stream_give_the_same_text(answering):
    ask = {"model": "chat", "prompt": "1+1=", "max_tokens": 6, "temperature": 0}
    whole = answering.openai.completions.create(**ask)
    stream = answering.openai.completions.create(**ask, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == whole.choices[0].text
    assert whole.usage.prompt_tokens == 4
    assert whole.usage.completion_tokens <= 6


def test_chat_is_answered(answering):
    answer = answering.openai.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "1+1="}], max_tokens=3, n=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    again = answering.openai.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "1+1="}], max_tokens=3, n=2, seed=1
    )
    assert again.choices == answer.choices


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(
            "{{ 'a' * 10**10 }}",
            id="compiled",
            marks=pytest.mark.nightly(
                part="clients", catches="a template that needs gigabytes when it is compiled"
            ),
        ),
        pytest.param("{{ messages[0].content * 10**9 }}", id="run"),
    ],
)
def test_chat_template_that_wants_gigabytes_fails_its_requests_alone(
    served, tmp_path, chat_model, template
):
    shutil.copytree(chat_model, tmp_path / "hungry")
    (tmp_path / "hungry" / "chat_template.jinja").write_text(template)
    name = f"hungry-{len(template)}"  # the jobs of the other case may still have that model
    model = ModelConfig(name=name, path=str(tmp_path / "hungry"))
    control.load_model(served.daemon.config, model)
    chat = [{"role": "user", "content": "1+1="}]
    served.openai.chat.completions.create(model="chat", messages=chat, max_tokens=2)
    (worker,) = (w for w in served.daemon.status()["workers"] if w["queue"] == "infer")
    pids = [served.http()["pid"], worker["horse"]["pid"]]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    before = [psutil.Process(pid).memory_info().rss for pid in pids]

    def refusal(_: int) -> str:
        with pytest.raises(openai.APIStatusError) as refused:
            served.openai.chat.completions.create(model=name, messages=chat, max_tokens=2)
        return str(cast(Any, refused.value.body)["message"])

    with ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(refusal, range(16)))
    assert texts == {"messages: the chat template needs more than 256 MiB of memory"}
    row = orjson.dumps({"prompt": chat, "answer": "2"}) + b"\n"
    uploaded = served.openai.files.create(file=("chats.jsonl", row), purpose="fine-tune")
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {"grader": {"type": "warmd", "reward": ["correctness"]}},
    }
    job = served.openai.fine_tuning.jobs.create(
        model=name, training_file=uploaded.id, method=method
    )
    served.openai.fine_tuning.jobs.cancel(job.id)
    for pid, rss in zip(pids, before, strict=True):
        (peak,) = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        assert int(peak) << 10 < rss + 60e6
    served.openai.chat.completions.create(model="chat", messages=chat, max_tokens=2)
    control.unload_model(served.daemon.config, name)


def test_client_that_disconnects_in_mid_stream_stops_generation(answering):
    stream = answering.openai.completions.create(
        model="chat", prompt="1", max_tokens=4000, temperature=0, stream=True
    )
    job_id = next(iter(stream)).id.removeprefix("cmpl-")
    assert answering.daemon.client.jobs.get(job_id)["status"] == "started"
    stream.close()
    job = answering.daemon.wait(job_id, timeout_s=10)
    assert job["status"] == "stopped"


def test_embeddings_are_numbers_or_base64(answering):
    texts = ["one", "another one"]
    numbers, packed = (
        answering.openai.embeddings.create(model="chat", input=texts, encoding_format=form)
        for form in ("float", "base64")
    )
    assert [len(item.embedding) for item in numbers.data] == [16, 16]
    assert numbers.usage.prompt_tokens == sum(map(len, texts))
    import base64

    import numpy as np

    for item, other in zip(numbers.data, packed.data, strict=True):
        vector = np.frombuffer(base64.b64decode(str(other.embedding)), "<f4")
        assert vector.tolist() == pytest.approx(item.embedding, abs=1e-6)


def test_token_ids_and_few_dimensions_are_embedded(answering):
    def vectors(given: Any, **options: Any) -> Any:
        found = answering.openai.embeddings.create(
            model="chat", input=given, encoding_format="float", **options
        )
        return [item.embedding for item in found.data]

    one, other = (vectors(text)[0] for text in ("one", "other"))
    answer = answering.openai.completions.create(
        model="chat", prompt=["one", "other"], max_tokens=1, extra_body={"return_token_ids": True}
    )
    ids = [choice.prompt_token_ids for choice in answer.choices]
    assert vectors(ids[0]) == [pytest.approx(one, abs=1e-6)]
    assert vectors(ids) == [pytest.approx(one, abs=1e-6), pytest.approx(other, abs=1e-6)]
    assert vectors("one", dimensions=5) == [pytest.approx(one[:5], abs=1e-6)]
    with pytest.raises(openai.BadRequestError, match="dimensions: must be at most 16") as caught:
        vectors("one", dimensions=17)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError, match="is not among the"):
        vectors([10**6])


def test_a_text_that_is_too_long_to_embed_is_refused_by_its_number(answering):
    with pytest.raises(openai.BadRequestError) as caught:
        answering.openai.embeddings.create(model="chat", input=["one", "1" * 4097])
    error = cast(Any, caught.value.response.json())["error"]
    assert error["param"] == "input"
    assert error["message"] == "input: [1] must have at most 4096 tokens for chat, got 4097"


@pytest.fixture
def scorer(answering: Served, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Rerank by a random cross-encoder and return the response."""
    folder = cross_encoders.save(tmp_path / "scorer")
    control.load_model(answering.daemon.config, ModelConfig(name="scorer", path=str(folder)))

    def rerank(version: int = 1, /, **body: Any) -> Any:
        url = f"{answering.url}/v{version}/rerank"
        return httpx.post(url, json={"model": "scorer", "query": "number?", **body}, timeout=30)

    yield rerank
    control.unload_model(answering.daemon.config, "scorer")


def test_documents_are_ordered_by_their_scores(scorer):
    texts = ["one", "number two", "and a third", "4"]
    found = scorer(documents=texts)
    assert found.status_code == 200, found.text
    answer = found.json()
    scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert sorted(scores) == [0, 1, 2, 3]
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    model, tokenizer = cross_encoders.model(), cross_encoders.tokenizer()
    for index, text in enumerate(texts):
        logit = model(**tokenizer("number?", text, return_tensors="pt")).logits[0, 0]
        assert scores[index] == pytest.approx(float(logit.sigmoid()), abs=1e-6)
    tokens = sum(len("number?") + len(text) + 3 for text in texts)
    assert answer["id"] == found.headers["x-warmd-job"]
    assert answer["model"] == "scorer"
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["meta"] == {"tokens": {"input_tokens": tokens, "output_tokens": 0}}
    assert not any("document" in one for one in answer["results"])
    objects = [{"text": text} for text in texts]
    best = scorer(2, documents=objects, top_n=2, return_documents=True).json()["results"]
    assert best == [
        {**one, "document": {"text": texts[one["index"]]}} for one in answer["results"][:2]
    ]


def test_long_documents_are_refused_by_their_number_or_cut_and_counted(scorer):
    def refusal(**body: Any) -> tuple[str, str]:
        error = scorer(**body).json()["error"]
        return error["param"], error["message"]

    texts = ["one", "1" * 60]
    assert refusal(documents=texts) == (
        "documents",
        "documents: [1] must have at most 64 tokens for scorer, got 70",
    )
    assert refusal(query="1" * 61, documents=["1"]) == (
        "query",
        "query: must have at most 60 tokens for scorer, got 61",
    )
    for option in ({"truncation": True}, {"max_tokens_per_doc": 54}):
        answer = scorer(documents=texts, **option).json()
        assert answer["meta"]["warnings"] == ["1 of 2 documents were cut to fewer tokens"]
        (score,) = (one["relevance_score"] for one in answer["results"] if one["index"])
        (same,) = scorer(documents=["1" * 54]).json()["results"]
        assert score == pytest.approx(same["relevance_score"], abs=1e-6)


def test_a_cross_encoder_scores_and_other_models_embed(scorer, answering):
    error = scorer(model="chat", documents=["1"]).json()["error"]
    assert error["param"] == "model"
    assert "model: must be a cross-encoder" in error["message"]
    with pytest.raises(openai.BadRequestError, match="must be no cross-encoder") as caught:
        answering.openai.embeddings.create(model="scorer", input="1")
    assert caught.value.param == "model"


# --- other clients


def crowding(**body: Any) -> dict[str, Any]:
    return {"model": "chat", "max_tokens": 2000, **body}


CROWDS: dict[str, tuple[str, dict[str, Any]]] = {
    "many completions": ("completions", crowding(prompt=["1"] * 1024, n=16)),
    "one group": ("completions", crowding(prompt="1", n=128)),
    "long prompts": ("completions", crowding(prompt=["1" * 1500] * 512, max_tokens=9)),
    "scored prompts": (
        "completions",
        crowding(prompt=["1" * 1500] * 512, max_tokens=0, echo=True, logprobs=5),
    ),
    "long text to embed": ("embeddings", {"model": "chat", "input": "word " * 1_400_000}),
}


OTHER_CROWDS = pytest.mark.nightly(
    part="clients", catches="a large request of a kind that delays all others"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "one group" else OTHER_CROWDS) for name in CROWDS],
)
def test_five_tokens_come_within_half_a_second_during_a_large_request(served, background, name):
    path, body = CROWDS[name]
    with httpx.Client(verify=False, trust_env=False) as client:
        leaving = background.submit(attack, f"{served.url}/v1/{path}", body)
        times = []
        for _ in range(7):
            begun = time.perf_counter()
            answer = client.post(
                f"{served.url}/v1/completions",
                json={"model": "chat", "prompt": "1", "max_tokens": 5},
                timeout=60,
            )
            times.append(time.perf_counter() - begun)
            assert answer.status_code == 200
        assert sorted(times)[len(times) // 2] < 0.5
        leaving.result()


def attack(url: str, body: dict[str, Any]) -> None:
    """Send a request, and leave after 3 s."""
    with httpx.Client(verify=False, trust_env=False) as client, suppress(httpx.TimeoutException):
        client.post(url, json=body, timeout=3)


# --- files


def test_uploaded_file_is_stored_listed_downloaded_and_deleted(served):
    made = served.openai.files.create(file=("../../evil\n.jsonl", ROWS), purpose="fine-tune")
    assert (made.bytes, made.purpose) == (len(ROWS), "fine-tune")
    assert "/" not in made.filename
    assert served.openai.files.retrieve(made.id) == made
    assert made.id in [file.id for file in served.openai.files.list()]
    (served.daemon.home.path / "files" / ("file-" + "1" * 24)).mkdir()  # somebody spoilt one
    assert made.id in [file.id for file in served.openai.files.list()]
    assert served.openai.files.content(made.id).content == ROWS
    assert served.openai.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        served.openai.files.retrieve(made.id)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../daemon.json", "file-" + "0" * 24, "."[:0], "a" * 400, "a\0b"]
)
def test_training_file_must_be_below_the_folder_of_files(served, name):
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.fine_tuning.jobs.create(model="chat", training_file=name)
    assert caught.value.param == "training_file"


@pytest.mark.parametrize(
    "options",
    [
        {"reward": ["os:getcwd"]},
        {"dataset": "/etc/passwd"},
        {"report_to": ["wandb"]},
        {"model": "/etc"},
        {"nonsense": 1},
        {"num_generations": 1},
    ],
)
def test_training_options_name_neither_code_nor_files(served, options):
    with pytest.raises(openai.BadRequestError) as caught:
        served.tune(**options)
    assert caught.value.param == f"method.reinforcement.hyperparameters.{next(iter(options))}"


def test_unknown_method_is_refused(served):
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.fine_tuning.jobs.create(
            model="chat", training_file="arithmetic", method={"type": "kto"}
        )
    assert caught.value.param == "method.type"


# --- training


@pytest.mark.slow
def test_job_is_trained_and_its_model_serves_requests(served):
    job = served.tune()
    assert (job.status, job.model, job.seed, job.metadata) == (job.status, "chat", 7, {"a": "b"})
    assert job.method.type == "reinforcement"
    done = served.tuned(job.id, "succeeded", "failed")
    assert (done.status, done.fine_tuned_model) == ("succeeded", job.id)
    assert done.finished_at >= done.created_at
    events = list(served.openai.fine_tuning.jobs.list_events(job.id, limit=5))  # all pages
    losses = [event for event in events if event.type == "metrics"]
    assert len({event.id for event in events}) == len(events) > 6
    assert len(losses) == 6
    assert events[0].message.startswith("finished")
    checkpoints = list(served.openai.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    assert [checkpoint.step_number for checkpoint in checkpoints] == [6, 4, 2]
    middle = checkpoints[1].fine_tuned_model_checkpoint
    assert middle == f"{job.id}@4"
    assert served.openai.completions.create(model=middle, prompt="1+1=").model == middle
    with pytest.raises(openai.NotFoundError):
        served.openai.completions.create(model=f"{job.id}@5", prompt="1+1=")
    assert job.id in [model.id for model in served.openai.models.list()]
    answer = served.openai.completions.create(model=job.id, prompt="1+1=", max_tokens=2)
    assert answer.model == job.id
    listed = [item.id for item in served.openai.fine_tuning.jobs.list(limit=1)]
    assert listed[0] == job.id
    assert len(set(listed)) == len(listed)


@pytest.mark.slow
def test_supervised_job_is_trained_on_chats_and_measured_on_a_validation_file(served):
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{n}+1="},
                {"role": "assistant", "content": f"{n + 1}"},
            ]
        }
        for n in range(12)
    ]
    train, held_out = (
        served.openai.files.create(
            file=("chats.jsonl", b"\n".join(map(orjson.dumps, rows))), purpose="fine-tune"
        ).id
        for rows in (chats[:8], chats[8:])
    )
    job = served.openai.fine_tuning.jobs.create(
        model="chat",
        training_file=train,
        validation_file=held_out,
        method={
            "type": "supervised",
            "supervised": {
                "hyperparameters": {
                    "n_epochs": 2,
                    "batch_size": 4,
                    "learning_rate_multiplier": "auto",
                }
            },
        },
    )
    assert (job.method.type, job.validation_file) == ("supervised", held_out)
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (2, 4)
    done = served.tuned(job.id, "succeeded", "failed")
    assert (done.status, done.fine_tuned_model) == ("succeeded", job.id)
    events = list(served.openai.fine_tuning.jobs.list_events(job.id))
    losses = [event.data["loss"] for event in events if event.type == "metrics"]
    assert len(losses) == 4 + 2  # steps, and evaluations before and after
    assert losses[0] < losses[-1]  # newest first
    by_default = served.openai.fine_tuning.jobs.create(model="chat", training_file=train)
    assert by_default.method.type == "supervised"
    served.openai.fine_tuning.jobs.cancel(by_default.id)


def test_unusable_supervised_rows_and_files_are_refused_by_name(served):
    bad = b'{"messages": [{"role": "user", "content": "hi"}]}'
    file = served.openai.files.create(file=("bad.jsonl", bad), purpose="fine-tune").id
    good = served.openai.files.create(file=("good.jsonl", b'{"text": "a"}'), purpose="fine-tune").id

    def refused(training_file: str, **options: Any) -> Any:
        hyperparameters = options.pop("hyperparameters", {})
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        with pytest.raises(openai.BadRequestError) as caught:
            served.openai.fine_tuning.jobs.create(
                model="chat", training_file=training_file, **{"method": method, **options}
            )
        return caught.value

    error = refused(file)
    assert error.param == "training_file"
    assert "line 1: messages[0]: role: must be assistant, for the last message" in error.message
    assert refused(good, validation_file=file).param == "validation_file"
    assert refused("arithmetic").param == "training_file"
    where = "method.supervised.hyperparameters"
    error = refused(good, hyperparameters={"learning_rate_multiplier": 2})
    assert error.param == f"{where}.learning_rate_multiplier"
    error = refused(good, hyperparameters={"eval_dataset": "/etc/passwd"})
    assert error.param == f"{where}.eval_dataset"
    mlm: Any = {"type": "mlm"}
    assert refused(good, validation_file=good, method=mlm).param == "validation_file"


@pytest.mark.slow
def test_job_is_paused_resumed_and_canceled(served):
    job = served.tune(epochs=200)
    served.tuned(job.id, "running")
    assert served.openai.fine_tuning.jobs.pause(job.id).status == "paused"
    assert served.openai.fine_tuning.jobs.resume(job.id).status in ("queued", "running")
    with pytest.raises(openai.ConflictError):
        served.openai.fine_tuning.jobs.resume(job.id)
    served.openai.fine_tuning.jobs.cancel(job.id)
    assert served.tuned(job.id, "cancelled").error is None
    with pytest.raises(openai.ConflictError):
        served.openai.fine_tuning.jobs.cancel(job.id)


@pytest.mark.slow
def test_failed_job_has_the_reason(served):
    ahead = served.tune(epochs=200)
    job = served.tune()
    served.openai.files.delete(job.training_file)  # while it waits
    served.openai.fine_tuning.jobs.cancel(ahead.id)
    done = served.tuned(job.id, "succeeded", "failed")
    assert (done.status, done.error.code) == ("failed", "job_failed")
    assert "dataset" in done.error.message


def fingerprints(served: Served, model: str) -> set[str | None]:
    """Return the `system_fingerprint` of chats and completions, whole and streamed."""
    chat = served.openai.chat.completions.create
    text = served.openai.completions.create
    of_chat: Any = {"model": model, "messages": [{"role": "user", "content": "1"}], "max_tokens": 3}
    of_text: Any = {"model": model, "prompt": "1+1=", "max_tokens": 3}
    found = {chat(**of_chat).system_fingerprint, text(**of_text).system_fingerprint}
    for chunks in (chat(**of_chat, stream=True), text(**of_text, stream=True)):
        # A chat's stream opens before the job has begun.
        found |= {chunk.system_fingerprint for chunk in chunks if _has_text(chunk.choices[0])}
    return found


def _has_text(choice: Any) -> bool:
    text = choice.delta.content if hasattr(choice, "delta") else choice.text
    return bool(text) or choice.finish_reason is not None


@pytest.mark.slow
def test_the_fingerprint_changes_with_the_weights_and_the_precision(served, chat_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(chat_model, folder)
    config = served.daemon.config
    control.load_model(config, ModelConfig(name="one", path=str(folder)))
    control.load_model(config, ModelConfig(name="int8", path=str(folder), precision="int8"))
    try:
        [first] = fingerprints(served, "one")
        [rounded] = fingerprints(served, "int8")
        assert first is not None
        assert first.startswith("fp_")
        assert fingerprints(served, "one") == {first}
        tiny.model(7, positions=4096).save_pretrained(folder)
        [other] = fingerprints(served, "one")
        assert len({first, rounded, other}) == 3
        shutil.copytree(chat_model, folder, dirs_exist_ok=True)
        assert fingerprints(served, "one") == {first}
    finally:
        control.unload_model(config, "one")
        control.unload_model(config, "int8")


def test_unknown_training_job_is_not_found(served):
    for name in ("nope", "infer-20260101-000000-abcd", "grpo-20260101-000000-abcd"):
        with pytest.raises(openai.NotFoundError):
            served.openai.fine_tuning.jobs.retrieve(name)


def test_a_model_that_is_not_warm_cannot_be_unloaded(served):
    url = f"{str(served.openai.base_url).rstrip('/')}/warmd/models/unload"
    answer = httpx.post(url, json={"name": "nope"}, headers={"X-Warmd": "1"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("model: 'nope' is not warm")
