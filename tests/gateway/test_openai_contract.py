"""Moving from OpenAI: its files and all calls of its library for fine-tuning."""

from __future__ import annotations

import csv
import inspect
import io
import math
from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest
import tool_chats
import torch
from daemons import Daemon
from openai.resources.files import Files
from openai.resources.fine_tuning import FineTuning
from openai.resources.fine_tuning.alpha.graders import Graders
from openai.resources.fine_tuning.checkpoints.permissions import Permissions
from openai.resources.fine_tuning.jobs.checkpoints import Checkpoints
from openai.resources.fine_tuning.jobs.jobs import Jobs
from openai.resources.models import Models
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import wait_until

from warmd.configs.config import ModelConfig
from warmd.daemon.client import control

MODEL = "chatty"
USER = {"role": "user", "content": "1+2="}
TOOLS = tool_chats.TOOLS
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
SUPERVISED: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "Add."},
            USER,
            {"role": "assistant", "content": "4", "weight": 0},
            {"role": "user", "content": "No."},
            {"role": "assistant", "content": "3", "weight": 1},
        ]
    },
    {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "assistant", "content": "3"},
        ],
        "tools": TOOLS,
        "parallel_tool_calls": False,
    },
]
PREFERENCES: list[dict[str, Any]] = [
    {
        "input": {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": True},
        "preferred_output": [{"role": "assistant", "content": "3"}],
        "non_preferred_output": [{"role": "assistant", "content": "4"}],
    }
]
REINFORCEMENT: list[dict[str, Any]] = [
    {"messages": [USER], "reference_answer": "3", "tools": TOOLS, "parallel_tool_calls": False},
    {"messages": [{"role": "user", "content": "2+2="}], "reference_answer": "4", "tools": TOOLS},
]
GRADER: Any = {
    "type": "string_check",
    "name": "check",
    "operation": "like",
    "input": "{{sample.output_text}}",
    "reference": "{{item.reference_answer}}",
}
# Every call of the library about fine-tuning; the tests below make each of them.
CALLS = {
    Jobs: {"create", "retrieve", "list", "cancel", "list_events", "pause", "resume"},
    Checkpoints: {"list"},
    Permissions: {"create", "retrieve", "list", "delete"},
    Graders: {"run", "validate"},
    Files: {
        *("create", "retrieve", "list", "delete", "content", "retrieve_content"),
        "wait_for_processing",
    },
    Models: {"retrieve", "list", "delete"},
    FineTuning: set[str](),
}


def test_every_call_of_the_library_is_known_here():
    for resource, known in CALLS.items():
        found = {
            name
            for name, member in inspect.getmembers(resource, inspect.isfunction)
            if not name.startswith("_")
        }
        assert found == known, resource


@pytest.fixture(scope="module")
def client(
    shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """OpenAI's client, of a daemon that serves a random model with the chat template of Qwen3."""
    folder = tmp_path_factory.mktemp("chatty")
    tokenizer = tool_chats.tokenizer(tool_chats.source_of("qwen3"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    control.load_model(shared_daemon.config, ModelConfig(name=MODEL, path=str(folder)))
    url = wait_until(lambda: shared_daemon.status()["http"]["url"])
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as made:
        yield made
    control.unload_model(shared_daemon.config, MODEL)


def upload(client: openai.OpenAI, rows: list[dict[str, Any]]) -> str:
    lines = b"\n".join(map(orjson.dumps, rows))
    file = client.files.create(file=("data.jsonl", lines), purpose="fine-tune")
    return client.files.wait_for_processing(file.id).id


def create(client: openai.OpenAI, rows: list[dict[str, Any]], method: Any, **more: Any) -> Any:
    """Queue a job with what OpenAI's guides set."""
    return client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=upload(client, rows),
        method=method,
        suffix="sums",
        seed=7,
        metadata={"made": "by a test"},
        **more,
    )


def ended(client: openai.OpenAI, job_id: str) -> Any:
    def look() -> Any:
        job = client.fine_tuning.jobs.retrieve(job_id)
        return job if job.status in ("succeeded", "failed", "cancelled") else None

    return wait_until(look)


AUTO = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
METHODS: dict[str, Any] = {
    "supervised": {"type": "supervised", "supervised": {"hyperparameters": AUTO}},
    "dpo": {"type": "dpo", "dpo": {"hyperparameters": {**AUTO, "beta": 0.1}}},
    "reinforcement": {
        "type": "reinforcement",
        "reinforcement": {
            "grader": GRADER,
            "hyperparameters": {
                **{"n_epochs": "auto", "learning_rate_multiplier": "auto"},
                **{"num_generations": 2, "max_completion_length": 4},
            },
        },
    },
}
ROWS = {"supervised": SUPERVISED, "dpo": PREFERENCES, "reinforcement": REINFORCEMENT}


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_a_file_of_openais_is_trained_on_and_its_model_answers(client: openai.OpenAI, kind: str):
    queued = create(client, ROWS[kind], METHODS[kind])
    job = ended(client, queued.id)
    assert (job.status, job.error) == ("succeeded", None)
    assert (job.seed, job.metadata) == (7, {"made": "by a test"})
    assert job.model_extra is None or "suffix" not in job.model_extra
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    assert {event.type for event in events} == {"message", "metrics"}
    saved = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    (result_file,) = job.result_files
    about = client.files.retrieve(result_file)
    table = client.files.content(result_file).text
    assert (about.filename, about.purpose) == ("step_metrics.csv", "fine-tune-results")
    assert about.bytes == len(table.encode())
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    assert all(math.isfinite(float(row["train_loss"])) for row in rows)
    made = [job.fine_tuned_model, *(one.fine_tuned_model_checkpoint for one in saved)]
    for name in made:
        assert client.models.retrieve(str(name)).id == name
        said = client.chat.completions.create(
            model=str(name), messages=[{"role": "user", "content": "1+2="}], max_tokens=2
        )
        assert said.choices[0].finish_reason in ("length", "stop")
    assert job.id in [one.id for one in client.fine_tuning.jobs.list()]
    with pytest.raises(openai.ConflictError, match="is the result file of"):
        client.files.delete(result_file)


@pytest.mark.slow
def test_jobs_are_steered_and_their_files_deleted(client: openai.OpenAI):
    rows = [{"messages": [USER, {"role": "assistant", "content": "3"}]}]
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 100_000}}}
    job = create(client, rows, method)
    jobs: Any = client.fine_tuning.jobs
    wait_until(lambda: jobs.retrieve(job.id).status == "running")
    assert jobs.pause(job.id).status == "paused"
    assert jobs.resume(job.id).status in ("queued", "running")
    jobs.cancel(job.id)
    assert ended(client, job.id).status == "cancelled"
    assert jobs.retrieve(job.id).result_files == []
    with pytest.raises(openai.NotFoundError, match="has not finished: it has no result file"):
        client.files.content(f"file-{job.id}")
    assert job.training_file in [file.id for file in client.files.list()]
    with pytest.warns(DeprecationWarning, match="content"):
        text = client.files.retrieve_content(job.training_file)
    assert orjson.loads(text) == rows[0]
    assert client.files.delete(job.training_file).deleted
    assert MODEL in [model.id for model in client.models.list()]


REFUSED = [
    (
        lambda c: c.fine_tuning.checkpoints.permissions.create("m", project_ids=["p"]),
        openai.BadRequestError,
        "permissions: not supported: every client may name every model",
    ),
    (
        lambda c: c.fine_tuning.checkpoints.permissions.list("m"),
        openai.BadRequestError,
        "permissions: not supported",
    ),
    (
        lambda c: c.fine_tuning.checkpoints.permissions.retrieve("m"),
        openai.BadRequestError,
        "permissions: not supported",
    ),
    (
        lambda c: c.fine_tuning.checkpoints.permissions.delete(
            "p", fine_tuned_model_checkpoint="m"
        ),
        openai.BadRequestError,
        "permissions: not supported",
    ),
    (
        lambda c: c.models.delete(MODEL),
        openai.APIStatusError,
        "Method Not Allowed",
    ),
    (
        lambda c: create(
            c, SUPERVISED, None, integrations=[{"type": "wandb", "wandb": {"project": "p"}}]
        ),
        openai.BadRequestError,
        "integrations[0]: must be configured",
    ),
    (
        lambda c: create(
            c,
            SUPERVISED,
            {
                "type": "supervised",
                "supervised": {"hyperparameters": {"learning_rate_multiplier": 2}},
            },
        ),
        openai.BadRequestError,
        "learning_rate_multiplier: must be 'auto'",
    ),
    (
        lambda c: create(c, [{**SUPERVISED[0], "functions": [{"name": "f"}]}], None),
        openai.BadRequestError,
        "functions: must be absent or empty",
    ),
    (
        lambda c: create(
            c,
            [
                {
                    **SUPERVISED[1],
                    "messages": [USER, {"role": "assistant", "tool_calls": 2 * [CALL]}],
                }
            ],
            None,
        ),
        openai.BadRequestError,
        "parallel_tool_calls: must be true for several calls in one message",
    ),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Retrieve is deprecated")
@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI, call, error, message):
    with pytest.raises(error) as caught:
        call(client)
    assert message in str(caught.value)


@pytest.mark.slow
def test_graders_are_validated_and_tried_as_in_a_job(client: openai.OpenAI):
    graders = client.fine_tuning.alpha.graders
    assert graders.validate(grader=GRADER).grader is not None
    item = {"reference_answer": "3"}
    tried = graders.run(grader=GRADER, model_sample="it is 3", item=item)
    assert (tried.reward, tried.metadata.name, tried.metadata.type) == (1, "check", "string_check")
    assert tried.metadata.scores == {"check": 1}
    similar: Any = {**GRADER, "type": "text_similarity", "evaluation_metric": "fuzzy_match"}
    del similar["operation"]
    both: Any = {"type": "multi", "name": "both", "calculate_output": "0.5 * a + 0.25 * b"}
    both["graders"] = {"a": GRADER, "b": similar}
    tried = graders.run(grader=both, model_sample="3", item=item)
    assert (tried.reward, tried.sub_rewards) == (0.75, {"a": 1, "b": 1})
    refused: list[tuple[Any, str, Any, str]] = [
        ({**GRADER, "operation": "is"}, "3", item, "operation of the grader must be one of eq, ne"),
        (GRADER, "3", {}, "item: must have reference_answer, which the grader names, got none"),
        (GRADER, "3" * 10_001, item, "model_sample: must have at most 10000 characters"),
        (GRADER, "3", {"reference_answer": "3" * 10_001}, "item: must be at most 10000 bytes here"),
        ({"type": "warmd", "reward": ["math"]}, "3", item, "grader.type: must not be warmd here"),
        (
            {**GRADER, "reference": "{{item.a}}" * 2},
            "3",
            {"a": "3" * 9_000},
            "must have at most 10000 characters, filled in",
        ),
    ]
    for grader, sample, given, message in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            graders.run(grader=grader, model_sample=sample, item=given)
        assert message in str(caught.value)
