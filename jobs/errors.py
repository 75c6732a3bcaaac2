"""The exceptions of warmd.

WarmdError                 one-line message; `exit_code` is the exit code of the CLI
 ├─ SpecError              a wrong option or setting: `field: must be X, got Y`
 ├─ NotFound               no such job, model or checkpoint
 ├─ Conflict               the state does not allow the operation (a second daemon)
 ├─ Unavailable            no daemon or no Redis answers
 ├─ JobFailed              a job failed for a reason that needs no traceback (NaN, no memory)
 └─ CheckpointDamaged      a checkpoint is incomplete or altered
Stopped                    not an error: `run` saved its state and ended early, as requested
"""

LOST_CONTEXT_EXIT = 70  # exit code of a process whose CUDA context is lost


class WarmdError(Exception):
    """Base of the errors that the CLI prints as one line."""

    exit_code = 1


class SpecError(WarmdError):
    """A wrong value: `field` names it; the message has the accepted and the given value."""

    exit_code = 2

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class NotFound(WarmdError):
    """No job, model or checkpoint has that name."""

    exit_code = 2


class Conflict(WarmdError):
    """The state of the object does not allow the operation."""

    exit_code = 2


class Unavailable(WarmdError):
    """No daemon or no Redis answers; the message says how to start one."""

    exit_code = 3


class JobFailed(WarmdError):
    """The job failed; the message is the full reason."""


class CheckpointDamaged(WarmdError):
    """A checkpoint does not match its manifest."""


class Stopped(BaseException):
    """Raised by `run` after it saved its state on request.

    Not an Exception, so that a job's own `except Exception` cannot catch it.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped at step {step}")
        self.step = step
