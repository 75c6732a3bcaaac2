"""Hub data sets on this machine: splits by name in every kind of folder; missing data sets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from warmd.jobs.data.sources import located, records
from warmd.jobs.errors import SpecError

CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: other
  data_files: other/*
---
# A data set
"""


def rows(*names: str) -> Dataset:
    return Dataset.from_list([{"question": name} for name in names])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of a repository with two configs, of which one has two splits."""
    folder = tmp_path / "sums"
    for path, names in {"main/train": "ab", "main/test": "c", "other/part": "d"}.items():
        target = folder / f"{path}-00000-of-00001.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        rows(*names).to_parquet(str(target))
    (folder / "README.md").write_text(CARD)
    return folder


def questions(source: str, folder: Path) -> list[str]:
    found = located("dataset", source, folder)
    return [record.parse()["question"] for record in records("dataset", found)]


def refusal(source: str, folder: Path) -> str:
    with pytest.raises(SpecError) as caught:
        questions(source, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "FOLDER")


def test_a_copy_of_a_repository_is_read_by_config_and_split(repository, tmp_path):
    assert questions("sums:main:train", tmp_path) == ["a", "b"]
    assert questions("sums:main:test", tmp_path) == ["c"]
    assert questions("sums:other", tmp_path) == ["d"]
    assert questions(f"{repository}:other:train", Path("/")) == ["d"]


def test_a_missing_config_or_split_is_refused_with_the_existing_names(repository, tmp_path):
    assert refusal("sums", tmp_path) == (
        "dataset: FOLDER/sums: must be NAME:CONFIG:SPLIT with a config of main, other, got none"
    )
    assert "with a split of train, test, got none" in refusal("sums:main", tmp_path)
    assert "with a split of train, test, got val" in refusal("sums:main:val", tmp_path)


def test_a_folder_of_files_with_a_readme_is_not_a_hub_data_set(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/README.md").write_text("---\nlicense: mit\n---\nconfigs: none\n")
    (tmp_path / "rows/a.csv").write_text("question\na\n")
    (tmp_path / "rows/b.jsonl").write_text('{"question": "b"}')
    assert questions("rows", tmp_path) == ["a", "b"]


def test_a_data_set_of_save_to_disk_is_read_by_split(tmp_path):
    DatasetDict({"train": rows("a"), "test": rows("b")}).save_to_disk(str(tmp_path / "saved"))
    rows("c").save_to_disk(str(tmp_path / "one"))
    assert questions("saved::test", tmp_path) == ["b"]
    assert questions("one", tmp_path) == ["c"]
    assert "with a split of train, test, got none" in refusal("saved", tmp_path)


def test_a_readme_cannot_name_files_outside_its_folder(tmp_path):
    (tmp_path / "secret.csv").write_text("question\nsecret\n")
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums/README.md").write_text(CARD.replace("other/*", "../secret.csv"))
    assert "must be " in refusal("sums:other", tmp_path)


SCRIPT = """
import sys
from pathlib import Path
from warmd.jobs.data.sources import located, records
from warmd.jobs.errors import SpecError
try:
    found = located("dataset", sys.argv[1], Path("."))
    print([record.parse()["question"] for record in records("dataset", found)])
except SpecError as error:
    print(error)
"""


def in_a_process(source: str, home: Path) -> str:
    """The questions of a hub data set, read by a process with its own caches, offline."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-c", SCRIPT, source]
    return subprocess.check_output(arguments, env=environment, cwd=home, text=True).strip()


@pytest.mark.slow
def test_a_data_set_in_the_hub_cache_is_read_offline(repository, tmp_path):
    snapshot = tmp_path / "hub/datasets--org--sums/snapshots/0123"
    snapshot.parent.mkdir(parents=True)
    repository.rename(snapshot)
    refs = snapshot.parents[1] / "refs/main"
    refs.parent.mkdir()
    refs.write_text("0123")
    assert in_a_process("org/sums:main:train", tmp_path) == "['a', 'b']"


@pytest.mark.slow
def test_a_data_set_that_datasets_has_prepared_is_read_offline(repository, tmp_path):
    code = f"import datasets; datasets.load_dataset({str(repository)!r}, 'main')"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    shutil.rmtree(repository)
    (tmp_path / "datasets/sums").rename(tmp_path / "datasets/org___sums")
    assert in_a_process("org/sums:main:test", tmp_path) == "['c']"


@pytest.mark.slow
def test_a_missing_data_set_is_refused_with_advice(tmp_path):
    message = in_a_process("openai/gsm8k:main:train", tmp_path)
    assert message.startswith("dataset: must be a hub data set on this machine, got openai/gsm8k: ")
    assert message.endswith(
        "where the hub can be reached, run: hf download openai/gsm8k --repo-type dataset"
    )


@pytest.mark.slow
def test_an_unreachable_hub_is_not_requested_repeatedly(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment.pop("HF_HUB_OFFLINE", None)
    arguments = [sys.executable, "-c", SCRIPT, "openai/gsm8k:main:train"]
    done = subprocess.run(arguments, env=environment, cwd=tmp_path, text=True, capture_output=True)
    assert "must be a hub data set on this machine, got openai/gsm8k" in done.stdout
    assert "Retrying" not in done.stderr
