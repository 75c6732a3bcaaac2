"""The corpus: built once, never stale, with whole documents on one side of the split."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, strategies as st
from small_disks import small_disk

from warmd.jobs.codegraph.sequences import train_tokenizer
from warmd.jobs.data.columns import Columns
from warmd.jobs.data.held_out import split_by_content
from warmd.jobs.data.reader import Reading
from warmd.jobs.data.texts import read
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.mlm import corpus
from warmd.jobs.mlm.corpus import Recipe, graph_corpus, text_corpus

SOURCE = '''
def double(number: int) -> int:
    """Twice {name}."""
    return add(number, number)


class {name}:
    def value(self) -> int:
        return double({number})
'''


@pytest.fixture
def texts(tmp_path):
    """A JSONL file of 60 records; the last ten equal the first ten."""
    rows = [{"text": f"the number {n % 50} is followed by {n % 50 + 1}"} for n in range(60)]
    return jsonl(tmp_path / "texts.jsonl", rows)


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    (folder / "inner").mkdir(parents=True)
    for number in range(10):
        text = SOURCE.format(name=f"Class{number}", number=number)
        (folder / "inner" / f"module{number}.py").write_text(text)
    (folder / "broken.py").write_text("def (:")
    return folder


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return path


def recipe(data: Path, **changes: Any) -> Recipe:
    usual: dict[str, Any] = {"tokenizer": None, "vocab_size": 300, "seq_len": 64, "share": 0.2}
    return Recipe(data=data, check_stop=lambda: None, **usual | changes)


# Built once.


def test_the_second_job_builds_nothing(tmp_path, texts):
    first = text_corpus(tmp_path / "cache", recipe(texts))
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    second = text_corpus(tmp_path / "cache", recipe(texts))
    assert (first.is_new, second.is_new) == (True, False)
    assert second.name == first.name
    assert {path: path.stat().st_mtime_ns for path in second.folder.rglob("*")} == before
    assert second.facts == first.facts == {"documents": 60}


@pytest.mark.parametrize("change", [{"seq_len": 32}, {"share": 0.3}, {"vocab_size": 280}])
def test_every_option_of_a_corpus_gives_another_corpus(tmp_path, texts, change):
    first = text_corpus(tmp_path / "cache", recipe(texts))
    assert text_corpus(tmp_path / "cache", recipe(texts, **change)).name != first.name


def test_a_changed_letter_of_the_data_gives_another_corpus(tmp_path, texts):
    first = text_corpus(tmp_path / "cache", recipe(texts))
    texts.write_bytes(texts.read_bytes().replace(b"number 7 ", b"number 8 ", 1))
    assert text_corpus(tmp_path / "cache", recipe(texts)).name != first.name


def test_the_state_of_a_tokenizer_after_a_call_does_not_change_the_corpus(tmp_path, texts):
    def made(text: str) -> Any:
        return corpus.as_pretrained(train_tokenizer([text], 300))

    one = made("one two three")
    first = text_corpus(tmp_path / "cache", recipe(texts, tokenizer=one))
    one("some text", truncation=True, max_length=5, padding="max_length")
    assert text_corpus(tmp_path / "cache", recipe(texts, tokenizer=one)).name == first.name
    other = made("seven eight nine")
    assert text_corpus(tmp_path / "cache", recipe(texts, tokenizer=other)).name != first.name


def test_records_and_paragraphs_of_the_same_bytes_are_two_corpora(tmp_path, texts):
    copy = texts.with_suffix(".txt")
    copy.write_bytes(texts.read_bytes())
    first = text_corpus(tmp_path / "cache", recipe(texts))
    assert text_corpus(tmp_path / "cache", recipe(copy, share=0.2)).name != first.name


def test_the_same_data_in_another_folder_gives_the_same_examples(tmp_path, texts):
    copy = jsonl(tmp_path / "copy.jsonl", [])
    copy.write_bytes(texts.read_bytes())
    one = text_corpus(tmp_path / "one", recipe(texts))
    other = text_corpus(tmp_path / "other", recipe(copy))
    assert one.name == other.name
    assert all(np.array_equal(one.columns[name], other.columns[name]) for name in one.columns)
    assert np.array_equal(one.train, other.train)


def test_a_build_that_is_stopped_leaves_nothing_behind(tmp_path, texts):
    calls = iter(range(100))

    def stop() -> None:
        if next(calls) == 20:
            raise Stopped(0)

    with pytest.raises(Stopped):
        text_corpus(
            tmp_path / "cache",
            Recipe(
                data=texts, tokenizer=None, vocab_size=300, seq_len=64, share=0.2, check_stop=stop
            ),
        )
    assert list((tmp_path / "cache").iterdir()) == []
    assert text_corpus(tmp_path / "cache", recipe(texts)).is_new


def test_a_build_on_a_full_disk_fails_in_one_line_and_leaves_nothing(tmp_path, texts):
    (cache := tmp_path / "cache").mkdir()
    with small_disk(cache, "8k"):
        with pytest.raises(JobFailed, match=r"^data: no room .*No space left .*`warmd data clear`"):
            text_corpus(cache, recipe(texts))
        assert list(cache.iterdir()) == []
    assert text_corpus(cache, recipe(texts)).is_new


@pytest.mark.parametrize("name", ["ids.bin", "lengths.npy", "held_out.npy", "corpus.json"])
def test_a_corpus_that_has_lost_a_part_is_built_again(tmp_path, texts, name):
    first = text_corpus(tmp_path / "cache", recipe(texts))
    ids = first.columns["ids"].copy()
    (first.folder / name).write_bytes((first.folder / name).read_bytes()[:-5])
    again = text_corpus(tmp_path / "cache", recipe(texts))
    assert again.is_new
    assert np.array_equal(again.columns["ids"], ids)


def build_and_tell(cache: Path, data: Path, answers: Any) -> None:
    found = text_corpus(cache, recipe(data))
    answers.put((found.is_new, len(found.train)))


def test_two_jobs_at_once_build_one_corpus(tmp_path, texts):
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    children = [
        fork.Process(target=build_and_tell, args=(tmp_path / "cache", texts, answers))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    found = sorted(answers.get(timeout=60) for _ in children)
    for child in children:
        child.join()
    assert [is_new for is_new, _ in found] == [False, True]
    assert found[0][1] == found[1][1]


# The split.


@given(st.lists(st.integers(0, 2**64 - 1), max_size=60), st.floats(0, 0.9), st.randoms())
def test_the_split_depends_on_the_documents_only(digests, share, random):
    chosen = split_by_content(digests, share)
    different = set(digests)
    shuffled = digests * 2
    random.shuffle(shuffled)
    assert split_by_content(shuffled, share) == chosen
    assert chosen <= different
    assert len(chosen) < len(different) or not different
    if share > 0 and len(different) > 1:
        assert len(chosen) >= 1
        assert abs(len(chosen) - share * len(different)) <= 1
    else:
        assert not chosen


def test_equal_documents_are_on_the_same_side_of_the_split(tmp_path, texts):
    found = text_corpus(tmp_path / "cache", recipe(texts, share=0.3))
    sides: dict[bytes, set[bool]] = {}
    for side, numbers in ((False, found.train), (True, found.validation)):
        for number in numbers:
            sides.setdefault(found.example(int(number))["ids"].tobytes(), set()).add(side)
    assert len(sides) == 50
    assert all(len(found_on) == 1 for found_on in sides.values())
    assert sum(found_on == {True} for found_on in sides.values()) == 15


def test_documents_of_a_separate_data_set_are_held_out_and_not_trained_on(tmp_path):
    rows = [{"text": f"document number {n}"} for n in range(10)]
    data = jsonl(tmp_path / "data.jsonl", rows)
    apart = jsonl(tmp_path / "apart.jsonl", [*rows[:2], {"text": "another document"}])
    found = text_corpus(tmp_path / "cache", recipe(data, held_out_data=apart))
    assert (len(found.train), len(found.validation)) == (8, 3)
    again = text_corpus(tmp_path / "cache", recipe(data, held_out_data=apart))
    assert (again.name, again.is_new) == (found.name, False)
    jsonl(apart, rows[:1])
    changed = text_corpus(tmp_path / "cache", recipe(data, held_out_data=apart))
    assert (len(changed.train), len(changed.validation)) == (9, 1)


def test_sources_of_a_separate_folder_are_held_out(tmp_path, sources):
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "new.py").write_text(SOURCE.format(name="Other", number=77))
    whole = graph_corpus(tmp_path / "cache", recipe(sources, share=0.0))
    found = graph_corpus(tmp_path / "cache", recipe(sources, held_out_data=apart))
    assert len(found.train) == len(whole.train)
    assert len(found.validation) > 0 == len(whole.validation)


def test_the_tokenizer_is_not_trained_on_held_out_documents(tmp_path):
    # A word that only one document has becomes a token if that document is trained on.
    words = [letter * 12 for letter in "abcdefghij"]
    data = jsonl(tmp_path / "words.jsonl", [{"text": " ".join([word] * 30)} for word in words])
    found = text_corpus(tmp_path / "cache", recipe(data, vocab_size=400, seq_len=512, share=0.3))
    assert found.lengths[found.train].max() < 40
    assert found.lengths[found.validation].min() > 100


# Text.


def test_a_long_document_becomes_several_examples_without_loss(tmp_path):
    text = " ".join(str(number) for number in range(200))
    data = jsonl(tmp_path / "long.jsonl", [{"text": text}])
    found = text_corpus(tmp_path / "cache", recipe(data, seq_len=32))
    assert found.lengths.max() == 32
    pieces = [found.example(number)["ids"] for number in range(len(found.train))]
    assert all((piece[0], piece[-1]) == (1, 2) for piece in pieces)  # [CLS] … [SEP]
    tokens = [int(token) for piece in pieces for token in piece[1:-1]]
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(found.folder / corpus.TOKENIZER)
    assert tokenizer.decode(tokens) == text


def documents(source: Path, **reading: Any) -> Iterator[str]:
    return read("data", str(source), Reading(**reading))


def test_documents_are_jsonl_records_paragraphs_or_files(tmp_path):
    rows = jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": " "}, {"text": "two", "n": 1}])
    assert list(documents(rows)) == ["one", "two"]
    (tmp_path / "b.txt").write_text("\n\none\nmore\n \n\ntwo")
    assert list(documents(tmp_path / "b.txt")) == ["one\nmore\n", "two"]
    folder = tmp_path / "folder"
    (folder / "z").mkdir(parents=True)
    (folder / "z" / "a.md").write_text("second")
    (folder / "b.txt").write_text("first\n\nstill")
    (folder / "empty.py").write_text("\n")
    (folder / "picture.png").write_bytes(b"\x89")
    assert list(documents(folder)) == ["first\n\nstill", "second"]


@pytest.mark.parametrize("row", [b'{"txt": "a"}', b'{"text": 1}', b"[1]", b"{"])
def test_a_record_without_text_is_named_by_its_line(tmp_path, row):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + row + b"\n")
    with pytest.raises(SpecError, match=r"^data: .*a.jsonl, line 2: .*must be .*, got "):
        list(documents(tmp_path / "a.jsonl"))
    assert list(documents(tmp_path / "a.jsonl", skips_bad_rows=True)) == ["a"]


def test_text_columns_of_a_table_are_documents(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "README.md").write_text("Two tables.")
    (folder / "a.csv").write_text("content,n\none,1\n")
    (folder / "b.csv").write_text("content\ntwo\n")
    columns = Columns({"text": "content"})
    assert list(documents(folder, columns=columns)) == ["one", "two"]
    found = text_corpus(tmp_path / "cache", recipe(folder, columns=columns))
    assert found.facts == {"documents": 2, "left_out": "columns (records): n (1)"}


def test_skipped_records_are_counted_in_the_facts_of_the_corpus(tmp_path):
    data = jsonl(tmp_path / "a.jsonl", [{"text": "one two"}, {"txt": ""}, {"text": "three"}])
    found = text_corpus(tmp_path / "cache", recipe(data, skip_bad_rows=True))
    assert (found.facts["documents"], found.facts["rows_skipped"]) == (2, 1)
    assert "line 2" in found.facts["first_fault"]


def test_data_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"^data: must be UTF-8 text, got "):
        corpus.check_texts("data", str(tmp_path / "a.txt"), Reading())
    (tmp_path / "b.txt").write_text("\n")
    with pytest.raises(SpecError, match=r"^data: must hold text, got "):
        corpus.check_texts("data", str(tmp_path / "b.txt"), Reading())
    with pytest.raises(SpecError, match=r"^data: must be a text, JSONL, CSV or Parquet file, "):
        corpus.check_texts("data", str(tmp_path / "nowhere"), Reading())
    with pytest.raises(SpecError, match=r"^dataset: must be a readable file, got .*: No such file"):
        list(read("dataset", str(tmp_path / "nowhere.txt"), Reading()))


# Python sources.


def test_sources_become_examples_of_code_and_graph(tmp_path, sources):
    found = graph_corpus(tmp_path / "cache", recipe(sources, seq_len=96))
    assert found.facts["documents"] == 10
    assert found.facts["skipped"] == 1
    assert found.facts["triples"] == 100
    assert set(found.columns) == {"ids", "rel_ids", "chain_ids", "depth_ids", "role_ids"}
    assert found.lengths.max() <= 96
    assert len(found.validation) >= 2 * 3  # of two files: a module, a class and functions
    assert not graph_corpus(tmp_path / "cache", recipe(sources, seq_len=96)).is_new


def test_no_name_of_a_held_out_file_is_trained_on(tmp_path, sources):
    from transformers import AutoTokenizer

    found = graph_corpus(tmp_path / "cache", recipe(sources, seq_len=256))
    tokenizer: Any = AutoTokenizer.from_pretrained(found.folder / corpus.TOKENIZER)

    def names(numbers: Any) -> set[str]:
        texts = [tokenizer.decode(found.example(int(number))["ids"]) for number in numbers]
        return {name for name in (f"Class{n}" for n in range(10)) if any(name in t for t in texts)}

    train, validation = names(found.train), names(found.validation)
    assert (len(train), len(validation)) == (8, 2)
    assert not train & validation


def test_a_folder_without_sources_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"^data: must be a folder of Python sources, got"):
        corpus.check_sources("data", tmp_path)


def test_data_that_gives_no_example_fails(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "a.py").write_text("")
    with pytest.raises(JobFailed, match=r"^data: it has no example to train on$"):
        graph_corpus(tmp_path / "cache", recipe(folder, tokenizer=_untrained()))
    assert list((tmp_path / "cache").iterdir()) == []


def _untrained() -> Any:
    return corpus.as_pretrained(train_tokenizer(["a"], 300))
