"""Labels of a machine and the needs of a job: how they are read and compared."""

from __future__ import annotations

import pytest

from warmd.configs.labels import line_of, parse_line, read_labels, unmet, with_ranks
from warmd.configs.values import ConfigError

MACHINE = {"gpu": "h200", "memory": "64000000000", "gpus": "2", "zone": "b"}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("gpu=h200", {}),
        ("gpu=H200", {}),
        ("gpu=h200,memory=40G", {}),
        ("memory=64GB", {}),
        ("memory=59GiB", {}),
        ("memory=64GiB", {"memory": "64GiB"}),
        ("gpus=3,zone=b", {"gpus": "3"}),
        ("gpu=a100,disk=1T", {"gpu": "a100", "disk": "1T"}),
        ("gpu=2", {"gpu": "2"}),
        ("none", {}),
    ],
)
def test_amounts_are_met_by_more_and_words_by_the_same_word(text, missing):
    assert unmet(read_labels("needs", text), MACHINE) == missing


def test_every_process_of_a_job_needs_a_core():
    assert with_ranks(None, {"seed": 1}) == {}
    assert with_ranks({"gpus": "1"}, {"processes": 4}) == {"gpus": "1", "cores": "4"}
    assert with_ranks({"cores": "2"}, {"processes": 4}) == {"cores": "4"}
    assert with_ranks({"cores": "8"}, {"processes": 4}) == {"cores": "8"}
    assert with_ranks({"cores": "many"}, {"processes": 4}) == {"cores": "many"}


def test_labels_survive_their_line():
    labels = read_labels("labels", {"zone": "b", "gpu": "h200", "gpus": 2})
    assert list(labels) == ["gpu", "gpus", "zone"]
    assert parse_line(line_of(labels)) == labels
    assert read_labels("labels", line_of(labels)) == labels
    assert read_labels("labels", "") == parse_line("") == {}


@pytest.mark.parametrize(
    "text",
    ["gpu", "gpu=", "=h200", "GPU=1", "a=b=c", "a=1,a=2", "a b=1", "a=b c", "a=1,", "x=\n", 7, [1]],
)
def test_wrong_labels_are_refused_in_one_line(text):
    with pytest.raises(ConfigError, match="needs: must ") as caught:
        read_labels("needs", text)
    assert "\n" not in str(caught.value)


def test_the_label_of_the_format_is_warmds_own():
    with pytest.raises(ConfigError, match="schema, which warmd sets"):
        read_labels("labels", "schema=9")
