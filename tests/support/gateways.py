"""A gateway with Redis and no worker: the test acts as the worker and controls the timing."""

from __future__ import annotations

import os
import resource
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from desks import kill_redis
from openai import DefaultHttpxClient, OpenAI
from waiting import wait_until

from warmd.configs.config import DaemonConfig, ModelConfig
from warmd.configs.queues import INFER, QUEUES
from warmd.daemon.client.client import Client
from warmd.daemon.gateway.http.connection import OTHER_FILES
from warmd.daemon.host.home import Home
from warmd.daemon.host.messages import GatewaySettings, encode
from warmd.daemon.lifecycle.follow import Publisher
from warmd.daemon.queue import keys
from warmd.daemon.queue.stream import StreamWriter
from warmd.daemon.runs.events import EventLog
from warmd.daemon.supervise.redis_server import EmbeddedRedis, find_binary

WORKER = "infer-0:test:1"
TLS = ssl.create_default_context()  # shared: reading the certificates takes 30 ms per client
CALLS = [  # of a completion
    {"id": "call_1", "name": "add", "arguments": '{"a":1,"b":2}'},
    {"id": "call_2", "name": "add", "arguments": '{"a":3,"b":4}'},
]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 1}


def openai_client(url: str, **settings: Any) -> OpenAI:
    """OpenAI's client, without retries by default."""
    settings = {"api_key": "unused", "max_retries": 0, "timeout": 30.0, **settings}
    return OpenAI(base_url=f"{url}/v1", http_client=DefaultHttpxClient(verify=TLS), **settings)


def talker(folder: Path, model: Path) -> Path:
    """Write a model folder that passes all checks for chats and images before loading."""
    shutil.copytree(model, folder)
    config = orjson.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_bytes(orjson.dumps({**config, "model_type": "qwen2_vl"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def scorer(folder: Path) -> Path:
    """Write a model folder that passes the checks for cross-encoders before loading."""
    folder.mkdir()
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    (folder / "config.json").write_bytes(orjson.dumps({**config, "id2label": {"0": "score"}}))
    return folder


class Gateway:
    """One gateway process and its Redis."""

    def __init__(self, home: Path, model: Path, *, scores: bool = False, **settings: Any) -> None:
        """`scores`: whether there is a model `scorer` in addition to `tiny`."""
        settings = {"http_port": 0, **settings}
        models = {"tiny": talker(home.with_name(f"{home.name}-model"), model)}
        if scores:
            models["scorer"] = scorer(home.with_name(f"{home.name}-scorer"))
        self.config = DaemonConfig(
            home=home,
            models=tuple(ModelConfig(name=name, path=str(path)) for name, path in models.items()),
            **settings,
        )
        self.home = Home(home)
        self.home.create()
        self.server = EmbeddedRedis(self.home, find_binary(None))
        self.server.start()
        self.client = Client(self.config)
        self._clients: list[OpenAI] = []
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "warmd.daemon.gateway", str(self.home.path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(encode(GatewaySettings(self.config.to_json(), self.server.url)))
        self.process.stdin.close()
        with self.process.stdout as said:
            self.said = orjson.loads(said.readline())
        self.url = self.said["url"] or ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.hang_up()
        self.kill()
        self.client.close()
        kill_redis(self.server)

    def openai(self, **settings: Any) -> OpenAI:
        self._clients.append(openai_client(self.url, **settings))
        return self._clients[-1]

    def hang_up(self) -> None:
        """Close the connections of every client."""
        while self._clients:
            self._clients.pop().close()

    def arriving_files(self) -> list[Path]:
        """Return the uploads that have arrived in part."""
        return list(self.home.path.glob("files/.staging-*/*"))

    @contextmanager
    def few_places(self, number: int) -> Iterator[None]:
        """Lower the limit of open files, so that the gateway takes so many connections."""
        pid, limit = self.process.pid, resource.RLIMIT_NOFILE
        before = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (number + OTHER_FILES, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, limit, before)

    # --- the queue, and the part of the worker --------------------------------------------------

    def waiting(self, queue: str = INFER) -> list[str]:
        """Return the waiting jobs of a queue, the next one first."""
        key = self.client.store.queue(queue).key
        found: Any = self.client.connection.lrange(key, 0, -1)
        return [keys.text(job_id) for job_id in found]

    def take(self, queue: str = INFER, *, timeout_s: float = 10) -> Execution:
        """Start an execution of the next job, as a worker does."""

        def pop() -> Any:
            key = self.client.store.queue(queue).key
            return self.client.connection.lmove(key, keys.taken(WORKER), "LEFT", "RIGHT")

        started = self.client.store.begin(wait_until(pop, timeout_s=timeout_s), queue, WORKER)
        assert started is not None
        return Execution(self, *started)

    def status(self, job_id: str) -> str:
        status: str = self.client.jobs.get(job_id)["status"]
        return status

    def drop_waiting(self) -> None:
        """Cancel all waiting jobs, of all queues."""
        for queue in QUEUES:
            for job_id in self.waiting(queue):
                self.client.jobs.cancel(job_id)


class Execution:
    """An execution that the test controls."""

    def __init__(self, gateway: Gateway, job: Any, started: Any) -> None:
        self.gateway = gateway
        self.job = job
        self.started = started
        self.rundir = gateway.client.rundir(job.id)
        self._writer = StreamWriter(gateway.client.connection)
        self._publisher = Publisher(self._writer, job.id, self.rundir.events)
        self.emit("started", pid=1, threads=1, queued_s=0.0)

    def emit(self, type: str, **fields: Any) -> None:
        publish = self._publisher.publish
        with EventLog(self.rundir.events, execution=self.started.number, publish=publish) as events:
            events.emit(type, **fields)
        self._writer.flush()

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.rundir.read_spec()["spec"]
        return spec

    def write(self, text: str, index: int = 0) -> None:
        self.emit("text", index=index, text=text, tokens=1)

    def finish(self, *texts: str, **fields: Any) -> None:
        choices = [
            {"index": index, "text": text, "finish_reason": "stop"}
            for index, text in enumerate(texts)
        ]
        result = {"choices": choices, "usage": USAGE, "timings": {}, "seed": 1, **fields}
        self.rundir.write_result(result, revision=1)
        self.emit("finished", result=result)
        self.gateway.client.store.finish(self.job, self.started.claim)

    def finish_with_calls(self) -> None:
        """Write a message with reasoning, a text and CALLS, and end."""
        self.emit("text", index=0, text="", tokens=2, reasoning="h")
        self.emit("text", index=0, text="Let me", tokens=2, reasoning="m")
        self.emit("text", index=0, text="", tokens=9, calls=CALLS[:1])
        self.emit("text", index=0, text="", tokens=9, calls=CALLS[1:])
        choice = {"index": 0, "text": "Let me", "finish_reason": "tool_calls"}
        self.finish(choices=[{**choice, "reasoning": "hm", "calls": CALLS}])

    def finish_with_tokens(self, tokens: list[int], token_strs: list[str], text: str) -> None:
        choice = {"index": 0, "text": text, "tokens": tokens, "token_strs": token_strs}
        self.finish(choices=[choice], max_model_len=64)

    def fail(self, error: str, traceback: str | None = None) -> None:
        self.emit("failed", error=error, traceback=traceback)
        self.gateway.client.store.fail(self.job, self.started.claim, error)

    def die(self) -> Execution:
        """End as if killed, and return the execution by another worker."""
        self.gateway.client.store.requeue(self.job, self.started.claim)
        return self.gateway.take()

    @property
    def stop_asked(self) -> str | None:
        (control,) = self.gateway.client.store.control_requests([(self.job, self.started.claim)])
        return control.stop


class Answerer(threading.Thread):
    """A worker that completes every answer."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(daemon=True)
        self.gateway = gateway
        self.done = threading.Event()

    def run(self) -> None:
        store = self.gateway.client.store
        source, target = store.queue("infer").key, keys.taken(WORKER)
        while not self.done.is_set():
            popped: Any = store.connection.blmove(source, target, 1, "LEFT", "RIGHT")
            begun = store.begin(popped, "infer", WORKER) if popped is not None else None
            if begun is None:
                continue
            job = Execution(self.gateway, *begun)
            if "text" in job.spec:
                number = len(job.spec["text"])
                if job.spec["query"] is None:
                    job.finish(embeddings=[[0.5, -1.0]] * number, tokens=number)
                else:
                    job.finish(scores=[0.5] * number, tokens=number, cut=number - 1)
            elif job.spec.get("reply") == "tokens":
                job.finish_with_tokens([1], ["a"], "a")
            elif "n" in job.spec:
                job.write("so")
                job.finish(*["so"] * job.spec["n"])
            else:
                job.fail("nobody evaluates here")
