"""Everything warmd raises on purpose.

WarmdError                 one line for a person; `exit_code` is what the CLI ends with
 ├─ SpecError              a job or a setting is wrong: names the field, what it takes, what it got
 ├─ NotFound               no such job, model or checkpoint
 ├─ Conflict               it exists but its state does not allow this (a second daemon)
 ├─ Unavailable            no daemon or no server answers
 ├─ JobFailed              a job cannot go on, for a reason that needs no traceback (NaN, no memory)
 └─ CheckpointDamaged      a checkpoint is incomplete or altered
Stopped                    not an error: `run` saved its state and ended early, as it was asked to
"""


class WarmdError(Exception):
    """Base of the errors that the CLI prints as one line."""

    exit_code = 1


class SpecError(WarmdError):
    """A value is wrong. `field` names it, the message says what it takes and what it got."""

    exit_code = 2

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class NotFound(WarmdError):
    """Nothing goes by that name."""

    exit_code = 2


class Conflict(WarmdError):
    """It exists, but its state does not allow this."""

    exit_code = 2


class Unavailable(WarmdError):
    """No daemon or no server answers; the message says how to start one."""

    exit_code = 3


class JobFailed(WarmdError):
    """The job cannot go on; the message is the whole reason."""


class CheckpointDamaged(WarmdError):
    """A checkpoint does not match its manifest."""


class Stopped(BaseException):
    """Raised by `run` after it saved its state on request.

    Not an Exception, so that a job's own `except Exception` cannot eat it.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped at step {step}")
        self.step = step
