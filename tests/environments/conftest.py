"""What several tests of environments and agents share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateways import Gateway


@pytest.fixture(scope="module")
def gateway_of_file(tiny_model: Path) -> Iterator[Gateway]:
    """The gateway of a file's tests; the jobs of its home run in the process of the test."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:  # a short path, for sockets
        made = Gateway(Path(folder, "home"), tiny_model)
        yield made
        made.close()


@pytest.fixture
def gateway(gateway_of_file: Gateway) -> Gateway:
    """The same, started again where a test has killed it."""
    if gateway_of_file.process.poll() is not None:
        gateway_of_file.start()
    return gateway_of_file
