"""Prompts that do not end on a token boundary, and templates that render them differently alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dpo_jobs
import pytest
import sft_jobs
import tiny
from breadth import mostly_slow
from odd_tokenizers import merging
from sft_jobs import message, write

from warmd.jobs.dpo.kind import run as run_dpo
from warmd.jobs.errors import Stopped
from warmd.jobs.sft.kind import run as run_sft

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

KINDS: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {
    "sft": (sft_jobs, run_sft, [{"completion": "ca"}, {"completion": "ba"}]),
    "dpo": (
        dpo_jobs,
        run_dpo,
        [{"chosen": "ca", "rejected": "a"}, {"chosen": "ba", "rejected": "a"}],
    ),
}
# Puts the system text into the last user message, as some templates do.
MOVING = (
    "{% for m in messages %}{% if m['role'] != 'system' %}"
    "{% if loop.last and m['role'] == 'user' %}{{ messages[0]['content'] }} {% endif %}"
    "{{ m['content'] }} {% endif %}{% endfor %}"
)


def warnings(
    folder: Path, kind: str, rows: list[dict[str, Any]], *, is_resumed: bool = False
) -> list[str]:
    jobs, run, _ = KINDS[kind]
    job = tiny.surroundings(folder, sft_jobs.small("llama"))
    tokenizer = job.ctx.models.tokenizer = merging()  # type: ignore[attr-defined]
    tokenizer.chat_template = MOVING
    data = write(folder / "data.jsonl", rows)
    made = jobs.spec(folder, dataset=data, learning_rate=1e-3)
    if is_resumed:
        job.stop_at_step = 2
        with pytest.raises(Stopped):
            run(made, job.ctx)
        job.stop_at_step = None
        job.events.clear()
    run(made, job.ctx)
    return [event["message"] for event in job.of_type("warning")]


@pytest.mark.parametrize("kind", mostly_slow(KINDS, but=("dpo",)))
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_prompt_that_ends_within_a_token_gives_a_warning(tmp_path, kind, is_cached):
    merges, fits = ({"prompt": "ab ", **row} for row in KINDS[kind][2])
    for _ in range(1 + is_cached):
        (said,) = warnings(tmp_path / str(_), kind, [fits, merges, fits, merges])
    assert said.startswith(
        "dataset: the prompt alone has other tokens than at the beginning of prompt and completion "
        "in 2 of 4 records (the first: "
    )
    assert "line 2: from ' ' on)" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_warning_for_other_prompts_and_none_on_a_resume(tmp_path, kind):
    merges, fits = ({"prompt": "ab ", **row} for row in KINDS[kind][2])
    assert not warnings(tmp_path / "fits", kind, [fits, {**merges, "prompt": "ab"}])
    assert not warnings(tmp_path / "resumed", kind, [merges] * 9, is_resumed=True)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, but=("dpo",)))
def test_a_template_that_renders_a_prompt_differently_gives_a_warning(tmp_path, kind):
    chat = [message("system", "a"), message("user", "b")]
    sides = {
        name: [message("assistant", text)]
        for name, text in (("completion", "d"), ("chosen", "d"), ("rejected", "e"))
        if name in KINDS[kind][2][0]
    }
    (said,) = warnings(tmp_path, kind, [{"prompt": chat, **sides}] * 2)
    assert "in 2 of 2 records" in said
