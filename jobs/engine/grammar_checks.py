"""Checks grammars of llguidance before they are used, and words its errors. Imports no torch."""

from __future__ import annotations

from ..errors import SpecError
from ..user_code.child_server import MEMORY_BYTES
from ..user_code.limited_processes import LimitedProcesses

LIMIT_S = 0.6  # processor time of a grammar, which takes milliseconds
_WAIT_S = 20.0  # for that, on a busy machine
_MOST_REASON = 300  # characters: llguidance shows whole expressions

_processes = LimitedProcesses(f"{__package__}.grammar_checker", shows_output=False)


def check(grammar: str, shown: str, field: str, *, noun: str = "schema") -> None:
    """Compile a grammar that names no tokens, in a process with limits.

    Raises SpecError for the option `field`, which quotes `shown`: for an unsupported grammar, and
    for one that takes more time or memory than any usual one. `noun`: what the user has given.
    """
    try:
        answer = _processes.answer({"grammar": grammar}, _WAIT_S, processor_s=LIMIT_S)
    except TimeoutError as error:
        problem = f"takes more than {LIMIT_S:g} s of a processor"
        raise _too_complex(field, noun, shown, problem) from error
    except EOFError as error:  # llguidance ends the process where it gets no memory
        problem = f"needs more than {MEMORY_BYTES >> 20} MiB"
        raise _too_complex(field, noun, shown, problem) from error
    if "unsupported" in answer:
        raise SpecError(field, unsupported(answer["unsupported"], noun))


def _too_complex(field: str, noun: str, given: str, problem: str) -> SpecError:
    article = "an" if noun[0] in "aeiou" else "a"
    shown = given if len(given) <= 80 else f"{given[:80]}…"
    takes = f"must be {article} {noun} that compiles in time"
    return SpecError(field, f"{takes}, got {shown!r}: it {problem}")


def unsupported(error: str, noun: str) -> str:
    """Return the message for an error of llguidance. `noun`: as for `check`."""
    reason = error.strip().partition("\n")[0][:_MOST_REASON]
    if reason == "NoExtensionBias":
        reason = "no text satisfies it; does it refer to itself without end?"
    return f"unsupported {noun}: {reason}"
