"""What a GRPO job would refuse in its first second is refused when it is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from warmd.jobs.errors import SpecError
from warmd.jobs.grpo.options import GrpoSpec


def refusal(model: Path, folder: Path, *rows: dict[str, Any], **options: Any) -> str | None:
    data = folder / "rows.jsonl"
    data.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    values = {"dataset": str(data), "samples": len(rows), "reward": ["math"]}
    try:
        GrpoSpec.parse(values | options).check_model_files(model)
    except SpecError as error:
        return str(error)
    return None


def test_a_prompt_that_does_not_fit_the_model_is_refused_by_its_row(tiny_model, tmp_path):
    rows = [{"prompt": "short"}, {"prompt": "long" * 20}]
    assert refusal(tiny_model, tmp_path, *rows) == (
        "max_prompt_length: the prompt of row 2 has 80 tokens and the model takes 64 together with "
        "the completion; set a max_prompt_length, to cut it, or a smaller max_completion_length"
    )
    assert refusal(tiny_model, tmp_path, *rows, max_prompt_length=10) is None
    assert refusal(tiny_model, tmp_path, {"prompt": "x" * 63}) is None
    assert refusal(tiny_model, tmp_path, {"prompt": "x" * 63}, max_completion_length=2) is not None


def test_a_prompt_of_megabytes_is_refused_as_fast(tiny_model, tmp_path):
    said = refusal(tiny_model, tmp_path, {"prompt": "x" * 5_000_000})
    assert said is not None
    assert said.startswith("max_prompt_length: the prompt of row 1 has at least 99999 tokens")


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": [{"role": "user", "content": "1+1"}]}, {}),
        ({"prompt": "1+1"}, {"chat_template": True}),
    ],
)
def test_a_chat_is_refused_for_a_tokenizer_without_a_template(tiny_model, tmp_path, row, options):
    assert refusal(tiny_model, tmp_path, row, **options) == (
        "chat_template: the tokenizer of this model has none"
    )
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_model.glob("*.json"):
        (other / file.name).write_bytes(file.read_bytes())
    (other / "chat_template.jinja").write_text("{{ messages }}")
    assert refusal(other, tmp_path, row, **options) is None


def test_what_a_folder_does_not_say_is_left_to_the_job(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8}))
    chat = [{"role": "user", "content": "1+1"}]
    assert refusal(folder, tmp_path, {"prompt": "far too long"}, {"prompt": chat}) is None
