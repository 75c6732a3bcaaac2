"""Data folders: which files are read (by the rules of `datasets`), and the report of the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
from shell import warmd

from warmd.jobs.data import left_out, texts
from warmd.jobs.data.former import Former
from warmd.jobs.data.reader import Reading
from warmd.jobs.data.sources import files_of, records, splits_note
from warmd.jobs.encode.passages import from_files
from warmd.jobs.errors import SpecError
from warmd.jobs.files.folders import files_in
from warmd.jobs.rewards.problems import load
from warmd.jobs.sft.dataset import Source
from warmd.jobs.sft.options import SftSpec
from warmd.jobs.training.row_job import load_rows

SUFFIXES = (".jsonl", ".json", ".csv")
ROW = b'{"prompt": "a", "completion": "b", "text": "a"}\n'


def make(folder: Path, *names: str, content: bytes = ROW) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def names_in(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in files_in(folder, SUFFIXES).files]


@pytest.mark.parametrize(
    "hidden",
    [
        ".ipynb_checkpoints/rows-checkpoint.jsonl",
        "._rows.jsonl",
        ".rows.jsonl",
        "__MACOSX/rows.jsonl",
        "part/.git/rows.jsonl",
        "part/__pycache__/deep/rows.csv",
    ],
)
def test_hidden_files_and_folders_are_not_read_and_are_named(tmp_path, hidden):
    folder = make(tmp_path / "d", "rows.jsonl", "part/a.jsonl", hidden)
    assert names_in(folder) == ["part/a.jsonl", "rows.jsonl"]
    note = left_out.of_records("dataset", str(folder))
    assert note is not None
    assert note.startswith("files: 1 hidden (")
    assert hidden.startswith(note.removeprefix("files: 1 hidden (").rstrip("/)"))


def test_a_folder_below_a_hidden_one_is_read(tmp_path):
    folder = make(tmp_path / ".cache" / "__data", "rows.jsonl")
    assert names_in(folder) == ["rows.jsonl"]


def test_suffixes_count_in_any_case_everywhere(tmp_path):
    folder = make(tmp_path / "d", "A.JSONL", "b.Json", "sub/c.jsonL")
    assert names_in(folder) == ["A.JSONL", "b.Json", "sub/c.jsonL"]
    one = str(folder / "A.JSONL")
    assert list(texts.read("data", one, Reading())) == ["a"]
    assert [passage.text for passage in from_files(Path(one))] == ["a"]
    documents = make(tmp_path / "t", "A.TXT", "b.Md", content=b"words")
    assert [passage.id for passage in from_files(documents)] == ["A.TXT", "b.Md"]


def test_hidden_copies_are_neither_documents_nor_passages(tmp_path):
    folder = make(tmp_path / "t", "a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "._a.txt")
    assert len(list(texts.read("data", str(folder), Reading()))) == 1
    assert len(from_files(folder)) == 1
    note = left_out.of_texts("data", str(folder))
    assert note == "files: 2 hidden (._a.txt, .ipynb_checkpoints/)"


def test_a_hidden_copy_cannot_be_among_the_held_out_rows(tmp_path):
    rows = b"".join(orjson.dumps({"prompt": f"{n}", "completion": "x"}) + b"\n" for n in range(4))
    folder = make(tmp_path / "d", "rows.jsonl", ".copy/rows.jsonl", content=rows)
    found = Source(dataset=str(folder), eval_samples=2).load()
    assert [row.prompt for row in found.train] == ["0", "1"]
    assert [row.prompt for row in found.held_out] == ["2", "3"]
    assert len(load(str(folder))) == 4


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.jsonl", "test.jsonl"], "test, train"),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"], None),
        (["part_train.jsonl", "dev/rows.jsonl", "x/Eval.JSONL"], "test, train, validation"),
        (["training/a.jsonl", "testing/a.jsonl"], "test, train"),
        (["constrained.jsonl", "latest.jsonl", "trained.jsonl", "development.jsonl"], None),
        (["test_1.jsonl", "valid.jsonl"], None),
    ],
)
def test_a_folder_whose_files_are_of_several_splits_is_said(tmp_path, names, splits):
    folder = make(tmp_path / "d", *names)
    shown = f"{folder} has files of {splits}, which are read as one: {folder}::train reads one"
    note = None if splits is None else f"{shown} of them"
    assert splits_note("dataset", str(folder)) == note
    job = tiny.surroundings(tmp_path / "sft-20261121-184200-x7f2")
    load_rows(SftSpec.parse({"dataset": str(folder), "samples": 1}), job.ctx)
    warnings = [event["message"] for event in job.of_type("warning")]
    assert warnings == ([] if note is None else [f"dataset: {note}"])
    done = warmd("data", "show", str(folder), home=tmp_path / "home")
    assert (note is not None) == ("which are read as one" in done.out)


def test_one_split_of_a_folder_is_read_by_its_name(tmp_path):
    folder = make(tmp_path / "d", "train.jsonl", "test.jsonl")
    assert files_of("dataset", f"{folder}::train") == [folder / "train.jsonl"]


def test_other_files_and_links_are_counted_and_the_first_are_named(tmp_path):
    others = [f"{n}.tsv" for n in range(7)]
    folder = make(tmp_path / "d", "rows.jsonl", *others)
    os.symlink(make(tmp_path / "far", "x.jsonl"), folder / "link")
    os.symlink(tmp_path / "nowhere", folder / "broken.jsonl")
    note = left_out.of_records("dataset", str(folder))
    assert note == (
        "files: 8 of other types (0.tsv, 1.tsv, 2.tsv, 3.tsv, 4.tsv, …); 1 links to folders (link/)"
    )


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_file_with_several_names_is_read_once(tmp_path, link):
    folder = make(tmp_path / "d", "a/rows.jsonl", "other.jsonl")
    link(folder / "a" / "rows.jsonl", folder / "a" / "a.jsonl")
    link(folder / "a" / "rows.jsonl", folder / "z.jsonl")
    make(tmp_path / "far", "x.jsonl")
    link(tmp_path / "far" / "x.jsonl", folder / "b.jsonl")  # the only name in this folder
    read, left = ("a.jsonl", "rows.jsonl") if link is os.link else ("rows.jsonl", "a.jsonl")
    assert names_in(folder) == [f"a/{read}", "b.jsonl", "other.jsonl"]
    assert len(list(records("dataset", str(folder)))) == 3
    note = left_out.of_records("dataset", str(folder))
    assert note == f"files: 2 links to files that are read (a/{left}, z.jsonl)"


def test_a_job_of_an_earlier_version_reads_a_linked_file_twice_and_says_so(tmp_path):
    folder = make(tmp_path / "d", "rows.jsonl")
    os.symlink("rows.jsonl", folder / "loop.jsonl")
    former = Former()
    assert len(list(records("dataset", str(folder), former=former))) == 2
    assert former.note == "files that are left out today: 1 (loop.jsonl)"


def test_a_folder_with_nothing_to_read_says_what_is_in_it(tmp_path):
    folder = make(tmp_path / "d", "._rows.jsonl", "rows.tsv")
    with pytest.raises(SpecError, match=r"file in it, but 1 hidden \(\._rows\.jsonl\); 1 of other"):
        files_of("dataset", str(folder))


@pytest.mark.parametrize("name", ["dataset_info.json", "dataset_dict.json", "config.json"])
def test_the_index_of_another_trainer_is_no_data_and_marks_no_hub_data_set(tmp_path, name):
    folder = make(tmp_path / "d", "mine.jsonl")
    contents: tuple[Any, ...] = ({"mine": {"file_name": "mine.jsonl"}}, {"splits": 3}, [])
    for content in contents:
        (folder / name).write_bytes(orjson.dumps(content))
        assert len(list(records("dataset", str(folder)))) == 1
    assert left_out.of_records("dataset", str(folder)) == (
        f"files: 1 descriptions of data sets ({name})"
    )
    done = warmd("data", "show", str(folder), home=tmp_path / "home")
    assert done.code == 0
    assert f"left out: files: 1 descriptions of data sets ({name})" in done.out


@pytest.mark.parametrize("name", ["dataset_info.json", "dataset_dict.json", "state.json"])
def test_an_index_that_is_no_json_is_refused_by_name(tmp_path, name):
    folder = make(tmp_path / "d", "mine.jsonl")
    (folder / name).write_text("{")
    with pytest.raises(SpecError, match=rf"^dataset: .*{name}: must be JSON, got: "):
        files_of("dataset", str(folder))


def test_a_saved_data_set_names_files_of_its_own_folder_only(tmp_path):
    folder = make(tmp_path / "d", "mine.jsonl")
    lists: tuple[Any, ...] = ([{"filename": "../x.arrow"}], [{"filename": 3}], [{}])
    for files in lists:
        (folder / "state.json").write_bytes(orjson.dumps({"_data_files": files}))
        with pytest.raises(SpecError, match=r"state\.json: must list its data files"):
            files_of("dataset", str(folder))
