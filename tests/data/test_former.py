"""Jobs that an earlier version began keep their data, although a new job reads it otherwise.

The pinned digests are what commit cc9358c computed for the same files.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sft_jobs
import tiny
import torch
from safetensors.torch import load_file

from warmd.jobs.context import RULES
from warmd.jobs.data.former import Former
from warmd.jobs.data.reader import Reading
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.mlm.corpus import Recipe, text_corpus
from warmd.jobs.rewards import problems
from warmd.jobs.sft.dataset import Source
from warmd.jobs.sft.kind import run as run_sft

SFT = "cb4148cb1b4f226bbce7e7270e7761d437cd60fbe9513c847a7f31f886ab6a5a"
GRPO = "1a457f6e3944c4ee33879fb11ad2124d0bf0cafb6b47f0d020e4477550d38d53"
GRPO_COLUMNS = "fbfa5ad7d9aa0afe439ec4ff3883acc4cb92b62cb67c40d674320c9aa1d4642d"
MLM = "03447f8502da180ff6a62faec0cec47a"


# The texts of numbers are orjson's, as they were for the earlier version.
WITH_PLUS = pytest.mark.skipif(
    orjson.dumps(1e23) != b"1e+23", reason="this orjson (3.10) writes 1e23 without plus"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that are read differently today: hidden, in upper case, with long numbers and NaN."""
    found = tmp_path / "data"
    found.mkdir()
    lines = [orjson.dumps({"question": f"{n} plus {n}?", "answer": f"{2 * n}"}) for n in range(8)]
    (found / "rows.jsonl").write_bytes(b"\n".join(lines))
    (found / "._rows.jsonl").write_bytes(b"\n".join(lines[::-1]))
    (found / "more.JSONL").write_bytes(b'{"question": "more?", "answer": "1"}')
    (found / "numbers.jsonl").write_bytes(
        b'{"question": "long?", "answer": 0.12345678901234567890}\n'
        b'{"question": "big?", "answer": 123456789012345678901234}\n'
    )
    table = pa.table({"question": ["none?", "two?"], "answer": [math.nan, 2.5]})
    pq.write_table(table, found / "z.parquet")
    return found


@WITH_PLUS
def test_sft_and_dpo_read_the_same_rows_and_hold_out_the_same(folder):
    source = Source(dataset=str(folder), eval_samples=4)
    found = replace(source, rules=0).load()
    assert (len(found.train), len(found.held_out)) == (16, 4)
    assert found.fingerprint == SFT
    assert next(iter(found.train)).prompt == "7 plus 7?"  # from the hidden file
    assert [row.learned for row in found.held_out][2] == " null"
    assert found.reading.former is not None
    assert found.reading.former.note == (
        "files that are left out today: 1 (._rows.jsonl); without files that are read today: "
        "1 (more.JSONL); 3 records with numbers or NaN that are read differently today, the first: "
        f"{folder}/numbers.jsonl, line 1"
    )
    with pytest.raises(SpecError, match=r"z\.parquet, row 1: must be an object with an answer"):
        source.load()


def test_grpo_reads_the_same_problems(folder):
    spec = GrpoSpec.parse(
        {"dataset": str(folder), "samples": 8, "eval_samples": 4, "reward": ["general"]}
    )
    parts = spec.parts_by(0)
    found = [*parts.training, *parts.held_out]
    assert problems.fingerprint(found) == GRPO
    assert problems.columns_fingerprint(found) == GRPO_COLUMNS
    assert found == problems.load(str(folder), reading=Reading(former=Former()))
    assert spec.parts.training != parts.training


def test_mlm_uses_the_same_corpus_and_a_new_job_another(tmp_path):
    texts = tmp_path / "t"
    texts.mkdir()
    for name in ("a.jsonl", ".a.jsonl", "b.JSONL"):
        lines = [b'{"text": "number %d of %s"}' % (n, name.encode()) for n in range(6)]
        (texts / name).write_bytes(b"\n".join(lines))
    recipe = Recipe(
        **{"data": texts, "tokenizer": None, "vocab_size": 300, "seq_len": 16, "share": 0.2},
        check_stop=lambda: None,
        former=Former(),
    )
    found = text_corpus(tmp_path / "cache", recipe)
    assert (found.name, len(found.train), len(found.validation)) == (MLM, 10, 2)
    assert recipe.former is not None
    assert "today: 1 (.a.jsonl); without files that are read today: 1 (b.JSONL)" in str(
        recipe.former.note
    )
    new = text_corpus(tmp_path / "cache", replace(recipe, former=None))
    assert new.name != found.name


def test_files_that_are_read_as_before_need_no_word(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "a?", "answer": 0.5}\n')
    found = Source(dataset=str(tmp_path), rules=0).load()
    assert found.reading.former is not None
    assert found.reading.former.note is None


@WITH_PLUS
def test_numbers_of_16_and_32_bits_and_long_integers_keep_their_former_texts(tmp_path):
    for name, kind in (("a", np.float32), ("b", np.float16)):
        numbers = pa.array(np.array([0.1, 3.0, 6e-5], kind))
        table = pa.table({"question": [f"{name}{n}" for n in range(3)], "answer": numbers})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    (tmp_path / "c.jsonl").write_bytes(
        b"\n".join(
            b'{"question": "%d?", "answer": %d}' % (number, number)
            for number in (123456789012345678901234, 2**64 + 1, -(2**63) - 1, 2**53 + 1)
        )
    )
    # What commit cc9358c learned, and compared answers with.
    floats = ["0.10000000149011612", "3.0", "0.00005999999848427251"]
    halves = ["0.0999755859375", "3.0", "0.00006002187728881836"]
    learned = ["1.2345678901234569e+23", "1.8446744073709552e+19", "-9.223372036854776e+18"]
    compared = ["123456789012345690000000", "18446744073709552000", "-9223372036854776000"]
    found = Source(dataset=str(tmp_path), rules=0).load()
    assert [row.learned for row in found.train] == [
        f" {text}" for text in (*floats, *halves, *learned, str(2**53 + 1))
    ]
    rows = problems.load(str(tmp_path), reading=Reading(former=Former()))
    assert [row.answer for row in rows] == [*floats, *halves, *compared, str(2**53 + 1)]
    assert found.reading.former is not None
    assert found.reading.former.note == (
        "7 records with numbers or NaN that are read differently today, the first: "
        f"{tmp_path}/a.parquet, row 1"
    )


def test_the_last_of_two_columns_of_one_name_is_read_as_before(tmp_path):
    columns = [pa.array(["a?"]), pa.array(["1"]), pa.array(["2"])]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_arrays(columns, ["question", "answer", "answer"]), path)
    found = Source(dataset=str(path), rules=0).load()
    assert [row.learned for row in found.train] == [" 2"]
    assert found.reading.former is not None
    assert found.reading.former.note == (
        "the last one of two columns of one name, refused today: 1 (rows.parquet)"
    )
    with pytest.raises(SpecError, match="must have distinct column names"):
        Source(dataset=str(path)).load()


# Jobs.


def job(folder: Path, *, rules: int = 0) -> tiny.Surroundings:
    made = tiny.surroundings(folder)
    made.ctx = replace(made.ctx, rules=rules)
    return made


def spec(tmp_path: Path, folder: Path) -> Any:
    options: dict[str, Any] = {"samples": 16, "eval_samples": 4, "batch_size": 4, "save_every": 1}
    return sft_jobs.spec(tmp_path, dataset=str(folder), epochs=2, **options)


def test_a_resumed_job_computes_as_if_it_had_not_been_interrupted_and_says_what_it_reads(
    like_a_work_horse, tmp_path, folder
):
    straight, broken = job(tmp_path / "straight"), job(tmp_path / "broken")
    run_sft(spec(tmp_path, folder), straight.ctx)
    broken.stop_at_step = 3
    with pytest.raises(Stopped):
        run_sft(spec(tmp_path, folder), broken.ctx)
    again = job(tmp_path / "broken")
    run_sft(spec(tmp_path, folder), again.ctx)
    final = [
        load_file(tmp_path / name / "model" / "model.safetensors")
        for name in ("straight", "broken")
    ]
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[0])
    for one in (straight, broken, again):
        [warning] = [w for w in one.of_type("warning") if w["message"].startswith("data: ")]
        assert "read by the rules of the earlier version that this job was" in warning["message"]
        assert "._rows.jsonl" in warning["message"]
        assert one.of_type("begin")[0]["left_out"] is None


def test_a_folder_that_only_an_earlier_version_reads_does_not_fail_its_job(
    like_a_work_horse, tmp_path, folder
):
    for path in folder.iterdir():
        if path.name != "._rows.jsonl":
            path.unlink()
    made = job(tmp_path / "job")
    options: dict[str, Any] = {"samples": 4, "eval_samples": 4, "batch_size": 4}
    run_sft(sft_jobs.spec(tmp_path, dataset=str(folder), epochs=1, **options), made.ctx)
    [warning] = [w for w in made.of_type("warning") if w["message"].startswith("data: ")]
    assert "files that are left out today: 1 (._rows.jsonl)" in warning["message"]


def test_changed_files_are_refused_as_ever(like_a_work_horse, tmp_path, folder):
    broken = job(tmp_path / "broken")
    broken.stop_at_step = 3
    with pytest.raises(Stopped):
        run_sft(spec(tmp_path, folder), broken.ctx)
    hidden = folder / "._rows.jsonl"
    hidden.write_bytes(hidden.read_bytes().replace(b"7 plus 7", b"9 plus 9"))
    with pytest.raises(JobFailed, match=r"^dataset: its rows are not those that the checkpoint"):
        run_sft(spec(tmp_path, folder), job(tmp_path / "broken").ctx)


def test_a_new_job_does_not_read_what_an_earlier_version_read(tmp_path):
    assert Former.of(RULES) is None
    assert Source(dataset="d").reading().former is None
