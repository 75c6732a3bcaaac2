"""Paths in a job's options: `~` is a home; an unknown user's home is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shell import warmd

from warmd.configs.config import DaemonConfig
from warmd.daemon.client.checking import document_of
from warmd.jobs import spec_class
from warmd.jobs.errors import SpecError

NOBODY_S = "~nobody-here/x"


@pytest.mark.parametrize(
    ("kind", "name", "others"),
    [
        ("grpo", "dataset", {}),
        ("grpo", "model", {}),
        ("mlm", "data", {}),
        ("mlm", "architecture", {"data": "x"}),
        ("mlm", "tokenizer", {"data": "x"}),
        ("infer", "input", {"output": "x"}),
        ("infer", "output", {"input": "x"}),
        ("infer", "image", {"prompt": "a"}),
        ("infer", "json_schema", {"prompt": "a"}),
        ("encode", "input", {"output": "x.npz"}),
    ],
)
def test_an_unknown_users_home_is_refused_at_submit_by_the_option_name(
    tmp_path: Path, kind: str, name: str, others: dict[str, Any]
):
    spec = spec_class(kind).parse({**others, name: NOBODY_S})
    with pytest.raises(SpecError, match=f"^{name}: must be a path, got '{NOBODY_S}': .*$"):
        document_of(spec, DaemonConfig(home=tmp_path), init=None, model=None)


@pytest.mark.parametrize(
    ("kind", "name", "others"),
    [("grpo", "dataset", {}), ("mlm", "data", {}), ("infer", "input", {"output": "x"})],
)
def test_tilde_is_the_home_of_the_submitting_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, others: dict[str, Any]
):
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = spec_class(kind).parse({**others, name: "~/rows.jsonl"}).located(Path("/elsewhere"))
    assert getattr(spec, name) == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("compare", NOBODY_S, "a"), "job"),
        (("checkpoints", "export", "grpo", NOBODY_S), "dest"),
        (("run", "--model", NOBODY_S, "a"), "model"),
        (("run", "--model", "long" * 100, "a"), "model"),
    ],
)
def test_an_impossible_path_is_named_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], name: str
):
    done = warmd(*arguments, home=tmp_path)
    assert done.is_refusal(2)
    assert done.err.startswith(f"Error: {name}: must be ")
