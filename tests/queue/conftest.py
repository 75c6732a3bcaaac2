"""A Redis for the tests of this folder, started once for all files of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workplaces import Workplace, workplace


@pytest.fixture(scope="package")
def shared_place() -> Iterator[Workplace]:
    with workplace() as made:
        yield made


@pytest.fixture
def place(shared_place: Workplace) -> Workplace:
    """The same for all tests, empty."""
    shared_place.connection.flushdb()
    return shared_place
