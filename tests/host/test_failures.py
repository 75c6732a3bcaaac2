"""Errors that pass from one process of a daemon to another keep their class."""

from __future__ import annotations

import pytest

from warmd.daemon.host.fetch import NoModelFolder
from warmd.daemon.host.messages import Failure, decode, encode
from warmd.jobs.errors import (
    CheckpointDamaged,
    Conflict,
    JobFailed,
    NotFound,
    SpecError,
    Unavailable,
    WarmdError,
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SpecError("model", "must be: this"), SpecError),
        (NotFound("no model"), NotFound),
        (NoModelFolder("no folder"), NotFound),
        (Conflict("in use"), Conflict),
        (Unavailable("starting"), Unavailable),
        (JobFailed("no memory"), JobFailed),
        (CheckpointDamaged("damaged"), WarmdError),
        (WarmdError("other"), WarmdError),
    ],
)
def test_an_error_is_the_same_in_the_process_that_receives_it(error, kind):
    failure = decode(encode(Failure.of(error)))
    assert isinstance(failure, Failure)
    found = failure.to_exception()
    assert type(found) is kind
    assert (str(found), found.exit_code) == (str(error), error.exit_code)
    if isinstance(found, SpecError):
        assert (found.field, found.problem) == ("model", "must be: this")
