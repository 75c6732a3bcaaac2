"""Tokens on disk: the same rows are tokenized once, changed ones again; old tokens are evicted."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest
import sft_jobs
import tiny
from breadth import mostly_slow
from sft_jobs import spec, write

from warmd.jobs.data.corpus import remove_oldest, size_bytes
from warmd.jobs.data.lengths import Lengths
from warmd.jobs.data.reader import Reading
from warmd.jobs.errors import JobFailed
from warmd.jobs.models.vocabulary import Vocabulary
from warmd.jobs.sft.dataset import Example, Source, Tokenization
from warmd.jobs.sft.kind import run
from warmd.jobs.training.tokens import Examples, tokenized

VOCABULARY = Vocabulary(int(sft_jobs.SIZES["vocab_size"]), "tiny", lambda token: None)

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def lengths(folder: Path, **options: Any) -> dict[str, Any]:
    job = tiny.surroundings(folder)
    run(spec(folder.parent, steps=1, **options), job.ctx)
    (event,) = job.of_type("lengths")
    return event


def make(folder: Path, source: Source, **how: Any) -> Any:
    given = {"tokenizer": sft_jobs.tokenizer(), "max_length": 128} | how
    return tokenized(
        *(folder / "cache", "sft", source.load(), Tokenization(**given)),
        *(lambda: None, lambda *_: None, VOCABULARY),
    )


def test_the_second_job_on_the_same_rows_tokenizes_nothing(tmp_path):
    first, second = lengths(tmp_path / "one"), lengths(tmp_path / "two")
    assert (first.pop("cached"), second.pop("cached")) == (False, True)
    assert first == second


@pytest.mark.parametrize(
    "change",
    mostly_slow([{"max_length": 7}, {"completion_only_loss": False}], but=[{"max_length": 7}]),
)
def test_other_lengths_or_losses_are_other_tokens(tmp_path, change):
    lengths(tmp_path / "one")
    assert not lengths(tmp_path / "two", **change)["cached"]


@pytest.mark.slow
def test_changed_text_or_template_gives_other_tokens_and_a_copy_the_same(tmp_path):
    rows = sft_jobs.ROWS["chat"]
    source = Source(dataset=write(tmp_path / "rows.jsonl", rows))
    first = make(tmp_path, source)
    copy = Source(dataset=write(tmp_path / "copy.jsonl", rows))
    assert not make(tmp_path, copy).is_new
    changed = orjson.loads(orjson.dumps(rows))
    changed[3]["messages"][0]["content"] += "!"
    other = Source(dataset=write(tmp_path / "other.jsonl", changed))
    assert make(tmp_path, other).name != first.name
    tokenizer = sft_jobs.tokenizer()
    tokenizer.chat_template = sft_jobs.TEMPLATE.replace("assistant: ", "bot: ")
    assert make(tmp_path, source, tokenizer=tokenizer).name != first.name


def test_cached_examples_equal_the_tokenized_rows(tmp_path):
    source = Source(
        dataset=write(tmp_path / "rows.jsonl", sft_jobs.ROWS["chat prompt"]), eval_samples=3
    )
    corpus = make(tmp_path, source)
    train, held_out = (
        Examples(corpus, corpus.train, Example),
        Examples(corpus, corpus.validation, Example),
    )
    assert (len(train), len(held_out)) == (11, 3)
    how = Tokenization(tokenizer=sft_jobs.tokenizer(), max_length=128)
    rows = source.load()
    assert list(train) == list(how.encode(rows.train, Lengths(128)))
    assert list(held_out) == list(how.encode(rows.held_out, Lengths(128)))


def test_rows_that_change_while_they_are_read_are_refused_and_not_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = Source(dataset=write(path, sft_jobs.ROWS["text"])).load()
    write(path, sft_jobs.ROWS["text"][::-1])
    how = Tokenization(tokenizer=sft_jobs.tokenizer(), max_length=128)
    with pytest.raises(JobFailed, match=r"^dataset: must not change while it is read"):
        tokenized(tmp_path / "cache", "sft", rows, how, lambda: None, lambda *_: None, VOCABULARY)
    assert not [p for p in (tmp_path / "cache/corpora").iterdir() if p.name[0] != "."]


def test_the_least_recently_used_tokens_are_evicted(tmp_path):
    made = {}
    for number, form in enumerate(("text", "chat", "chat prompt")):
        source = Source(dataset=write(tmp_path / f"{number}.jsonl", sft_jobs.ROWS[form]))
        made[form] = make(tmp_path, source)
        os.utime(made[form].folder, (number, number))
    kept = Examples(made["text"], made["text"].train, Example)
    before = list(kept)
    os.utime(made["text"].folder, (9, 9))
    room = size_bytes(made["text"].folder) + size_bytes(made["chat prompt"].folder)
    freed = remove_oldest(tmp_path / "cache/corpora", room)
    assert freed > 0
    assert {form for form, corpus in made.items() if corpus.folder.exists()} == {
        "text",
        "chat prompt",
    }
    remove_oldest(tmp_path / "cache/corpora", 0)
    assert not any(corpus.folder.exists() for corpus in made.values())
    assert list(kept) == before  # a job that has mapped them keeps them


def test_rows_are_read_one_by_one_however_many_there_are(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        for number in range(3000):
            file.write(orjson.dumps({"text": f"{number}" * 1000}) + b"\n")
    source = Source(dataset=str(path))
    tracemalloc.start()
    try:
        rows = source.load()
        count = sum(1 for _ in rows.train)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 3000
    assert peak < path.stat().st_size / 4


def test_a_reading_counts_what_it_skips_in_all_files(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"rows-{name}.jsonl", [{"text": ""}, {"text": name}])
    reading = Reading(skips_bad_rows=True)
    rows = Source(dataset=str(tmp_path)).rows("dataset", str(tmp_path), reading)
    assert [row.learned for row in rows] == ["a", "b"]
    assert reading.num_skipped == 2
