"""The messages between processes: each comes back from its line, and garbage is named."""

from __future__ import annotations

from contextlib import suppress

import pytest

from warmd.configs.config import ModelConfig, WorkerConfig
from warmd.daemon.host import messages
from warmd.daemon.host.messages import Malformed, Message, decode, encode
from warmd.jobs.context import Activity
from warmd.jobs.files import records

MODEL = messages.LocalModel(ModelConfig(name="m", path="/m"), None)
NESTED: list[Message] = [
    messages.LoadModel(MODEL.config, is_kept=True),
    messages.LoadFolder(MODEL),
    messages.ReloadStatus("workers", "", None, ["a"], [messages.RunningJob("a", "b")], []),
    messages.Stopping([messages.RunningJob("a", "b")]),
    messages.RunJob(
        *("job", "train-0", "/run", 1, 1, None, 5, 1.5),
        model=MODEL,
        gang=messages.GangPlan(["a", "b"], 0, "::1", "secret"),
    ),
    messages.JobEvent("job", {"type": "step", "loss": None, "nested": [{"a": 1}]}),
    messages.JobActivity("job", Activity(name="step", began=1.0, limit_s=2.0, median_s=None)),
    messages.JobActivity("job", None),
    messages.ZygoteSettings(
        1, [messages.WantedModel(MODEL, True)], [messages.HorsePlan("auto", 100, 0)], True
    ),
    messages.WorkerSettings(WorkerConfig(name="a", queue="train"), "redis://", "a", False, 15),
    messages.ModelsLoaded([MODEL.config]),
]


@pytest.mark.parametrize("message", NESTED, ids=lambda message: message.op)
def test_a_message_comes_back_from_its_line(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("op", messages._CLASSES)
def test_the_types_of_all_fields_can_be_decoded(op):
    """Types that msgspec does not know, or that are imported for mypy only, raise other errors."""
    with suppress(ValueError):
        records.convert({}, messages._CLASSES[op])


@pytest.mark.parametrize(
    "line",
    [
        "{}", '{"op": "nosuch"}', '{"op": [1]}', '{"op": "unload"}',
        '{"op": "unload", "name": [1]}',
        '{"op": "stop", "now": 1}', '{"op": "load", "model": {"a": 1}, "is_kept": true}',
        '{"op": "horse", "pid": "5"}', '{"op": "models_loaded", "models": [5]}',
    ],
)  # fmt: skip
def test_an_object_that_is_no_message_is_malformed(line):
    assert isinstance(decode(line), Malformed)


@pytest.mark.parametrize("line", ["", "{", "[]", "5", "null", b"\xff", b"{" * 100_000])
def test_a_line_that_is_no_object_is_skipped(line):
    assert decode(line) is None
