"""Scores equal those of sentence-transformers, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cross_encoders
import numpy as np
import pytest
import tiny
from environments import environment
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from warmd.jobs.encode.kind import run
from warmd.jobs.encode.options import EncodeSpec

SCRIPT = Path(__file__).parent / "with_sentence_transformers.py"
PACKAGES = ("sentence-transformers>=6,<7",)
QUERIES = ["which number is it?", "one two three " * 9]
TEXTS = [f"number {n}{' and more' * (n % 4)}" for n in range(20)] + ["four five six " * 9, "", "?"]
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
