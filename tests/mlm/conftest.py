"""Fixtures of the MLM tests."""

from __future__ import annotations

import pytest
from mlm_jobs import SOURCE, make_home


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data, configurations, and a cache that all tests share."""
    folder = make_home(tmp_path_factory.mktemp("home"))
    (folder / "sources").mkdir()
    for n in range(8):
        (folder / "sources" / f"module{n}.py").write_text(SOURCE.format(n=n))
    return folder


@pytest.fixture
def name(request):
    """The name of a run directory, unique to this test."""
    return "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
