"""User reward functions: calling conventions and error messages.

The signature of a function decides how it is called:

- `f(prompts, completions, answers)`: three lists of text, by position.
- as TRL does, if it takes `**kwargs` and TRL passes its other parameters: by keywords
  `prompts`, `completions`, `completion_ids`, `trainer_state`, `log_extra`, `log_metric`, and every
  column of the data, each a list with an item for every completion. It may be async.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter
from math import isfinite
from typing import Any, SupportsFloat

from ..errors import JobFailed, SpecError
from ..files import umask
from ..user_code import tracebacks
from ..user_code.forks import end_if_forked
from ..user_code.modules import is_own, named

# Arguments that TRL 1.16 passes with the columns (GRPOTrainer._calculate_rewards).
TRL_KEYWORDS = (
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)
# Beyond it the squares of weighted rewards are infinite in float32, and a step has no gradient.
MOST_REWARD = 1e15
NOT_PASSED = "completion"  # the column that TRL does not pass
_TAKES = "must take (prompts, completions, answers), or TRL's keywords with **kwargs"


class _UserReward:
    """A user function. A child process that it forks never returns from the call."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self.move_here()

    def move_here(self) -> None:
        """Let this process call the function."""
        self._owner = os.getpid()


class PositionalReward(_UserReward):
    """A function `f(prompts, completions, answers)`."""

    def __call__(
        self, prompts: list[str], completions: list[str], answers: list[str | None]
    ) -> list[float]:
        with _errors_named(self._name, self._owner), umask.users():
            scores = self._function(prompts, completions, answers)
        found = _checked(self._name, scores, len(completions), or_none=False)
        return [number for number in found if number is not None]


class KeywordReward(_UserReward):
    """A function with TRL's signature. It returns None for completions without a score."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__(name, function)
        self.is_async = is_async(function)

    # Columns may have any names, also `self`.
    def __call__(self, /, **keywords: Any) -> list[float | None]:
        with _errors_named(self._name, self._owner), umask.users():
            scores = self._function(**keywords)
        return _checked(self._name, scores, len(keywords["completions"]), or_none=True)

    async def asynchronously(self, /, **keywords: Any) -> list[float | None]:
        """The same for an async function; the umask is the caller's, as it is of the process."""
        with _errors_named(self._name, self._owner):
            scores = await self._function(**keywords)
        return _checked(self._name, scores, len(keywords["completions"]), or_none=True)


def imported(name: str, columns: Collection[str]) -> PositionalReward | KeywordReward:
    """Import `module:function`; `columns` are those of the data. Raises SpecError."""
    function = named("reward", name)
    if not callable(function):
        got = "no such name" if function is None else f"a {type(function).__name__}"
        module_name = name.partition(":")[0]
        raise SpecError("reward", f"{name} must be a function of {module_name}, got {got}")
    return _wrap(name, function, columns)


def _wrap(
    name: str, function: Callable[..., Any], columns: Collection[str]
) -> PositionalReward | KeywordReward:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin without an accessible signature
        return PositionalReward(name, function)
    unknown = _unknown_to_trl(signature, columns)
    if unknown is not None and not unknown:
        return KeywordReward(name, function)
    if _takes_three(signature) and not is_async(function):
        return PositionalReward(name, function)
    if unknown:
        raise SpecError(
            "reward",
            f"{name}: the parameter {unknown[0]} must be a column of the data "
            f"({', '.join(columns) or 'it has none'}) or one of {', '.join(TRL_KEYWORDS)}, "
            "got neither",
        )
    kind = "an async function of " if is_async(function) else ""
    raise SpecError("reward", f"{name} {_TAKES}, got {kind}{signature}")


def _unknown_to_trl(signature: inspect.Signature, columns: Collection[str]) -> list[str] | None:
    """Return the required parameters that TRL would not pass.

    None if the function cannot be called in TRL's way at all.
    """
    parameters = signature.parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if Parameter.VAR_KEYWORD not in kinds or Parameter.VAR_POSITIONAL in kinds:
        return None
    needed = [p for p in parameters if p.default is Parameter.empty and p.kind != p.VAR_KEYWORD]
    return [
        p.name
        for p in needed
        if p.kind == p.POSITIONAL_ONLY or p.name not in (*TRL_KEYWORDS, *columns)
    ]


def _takes_three(signature: inspect.Signature) -> bool:
    try:
        signature.bind([], [], [])
    except TypeError:
        return False
    return True


def is_async(function: Any) -> bool:
    """Whether a call returns an awaitable, by TRL's rules."""
    # For a partial its function decides, for an object its __call__.
    while isinstance(function, functools.partial):
        function = function.func
    is_coroutine = inspect.iscoroutinefunction
    return is_coroutine(function) or is_coroutine(type(function).__call__)


@contextmanager
def _errors_named(name: str, owner: int) -> Iterator[None]:
    """Turn an exception of a user function into one line with its file and line.

    A child process that the function forked ends here: `owner` runs the job.
    """
    try:
        yield
    except BaseException as error:  # also SystemExit: it ends the reward, not the job
        end_if_forked(owner, f"back from the reward {name} by an error")
        place = tracebacks.place(error, is_own)
        where = f" at {place}" if place else ""
        raise JobFailed(f"reward {name} failed{where}: {tracebacks.reason(error)}") from error
    end_if_forked(owner, f"back from the reward {name}")


def _checked(name: str, result: Any, num_completions: int, *, or_none: bool) -> list[float | None]:
    """Return the result of a user's function as plain numbers. Raises JobFailed if it is not."""
    kind = "finite numbers or None" if or_none else "finite numbers"
    takes = f"reward {name} must return a list of {num_completions} {kind}"
    try:
        return _numbers(name, takes, result, num_completions, or_none=or_none)
    except JobFailed:
        raise
    except Exception as error:  # methods of the user's objects may raise any
        got = f"a {type(result).__name__} that cannot be read: {tracebacks.reason(error)}"
        raise JobFailed(f"{takes}, got {got}") from error


def _numbers(
    name: str, takes: str, result: Any, num_completions: int, *, or_none: bool
) -> list[float | None]:
    scores = _as_sequence(result)
    if scores is None:
        raise JobFailed(f"{takes}, got a {type(result).__name__}")
    if len(scores) != num_completions:
        raise JobFailed(f"{takes}, got {len(scores)}")
    numbers = [_finite(value) for value in scores]
    large = next((i for i, number in enumerate(numbers) if abs(number or 0) > MOST_REWARD), None)
    if large is not None:
        raise JobFailed(
            f"reward {name} must return numbers from -{MOST_REWARD:g} to {MOST_REWARD:g}, got "
            f"{shown(scores[large])} for completion {large + 1}: advantages are computed in float32"
        )
    for index, (number, value) in enumerate(zip(numbers, scores, strict=True)):
        if number is None and not (or_none and value is None):
            raise JobFailed(f"{takes}, got {shown(value)} for completion {index + 1}")
    return numbers


def _as_sequence(result: Any) -> Sequence[Any] | None:
    """Return a list, a tuple, or an array of a library as a sequence; None for anything else."""
    if isinstance(result, list | tuple):
        return result
    return list(result.tolist()) if getattr(result, "ndim", None) == 1 else None


def _finite(value: Any) -> float | None:
    """Return a number of any library as a float, or None when it is not a finite number."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def shown(value: object) -> str:
    """A value in a few words, for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of 5,000 digits; an object's own __repr__
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
