"""Relations between the options of a kind: those that must go together, and those that must not.

A Spec declares them beside its fields. `Spec.check` enforces them; the command line's help and the
documentation show them with each option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Condition:
    """What holds for some values of an option; `words` follow the option's name."""

    words: str
    holds: Callable[[Any], bool]


# Not 0, which is a value.
GIVEN = Condition("", lambda value: not (value is None or value is False or value in ("", ())))
ABOVE_0 = Condition("above 0", lambda value: value is not None and value > 0)


def is_in(*values: Any) -> Condition:
    """The values named."""
    return Condition(_joined(map(str, values)), lambda value: value in values)


def is_not(*values: Any) -> Condition:
    """All values but those named."""
    return Condition(f"other than {_joined(map(str, values))}", lambda value: value not in values)


@dataclass(frozen=True)
class Relation:
    """What other options must be if one of `options` meets `when` (None: is not its default).

    `together`: at least one of `others` must meet its condition; otherwise none of them may.
    """

    options: tuple[str, ...]
    others: Mapping[str, Condition]
    together: bool
    when: Condition | None

    @property
    def others_in_words(self) -> str:
        """The other options with their conditions: 'eval_samples above 0 or eval_dataset'."""
        return _joined(f"{name} {one.words}".rstrip() for name, one in self.others.items())

    @property
    def note(self) -> str:
        """The relation in the help of each of its options: 'int8: not with loss_type vespo'."""
        words = f"{'' if self.together else 'not '}with {self.others_in_words}"
        return f"{self.when.words}: {words}" if self.when and self.when.words else words

    @property
    def rule(self) -> str:
        """The relation in a message, after the name of an option: 'must go with lora'."""
        if self.together:
            return f"must go with {self.others_in_words}"
        be = f"be {self.when.words}" if self.when and self.when.words else "go"
        return f"must not {be} with {self.others_in_words}"

    def broken_by(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
        """Yield each of its options whose value breaks it."""
        met = any(one.holds(values[name]) for name, one in self.others.items())
        if met == self.together:
            return
        for name in self.options:
            value, default = values[name], defaults[name]
            if self.when.holds(value) if self.when else value != default:
                yield name


def goes_with(
    *options: str, when: Condition | None = None, **others: Condition | str | tuple[str, ...]
) -> Relation:
    """Declare that options have no effect, or no meaning, without any of `others`.

    others: a condition, or the values that it may have.
    """
    return Relation(options, _conditions(others), True, when)


def never_with(
    *options: str, when: Condition | None = None, **others: Condition | str | tuple[str, ...]
) -> Relation:
    """Declare that options, or those of their values that meet `when`, exclude `others`."""
    return Relation(options, _conditions(others), False, when)


def _conditions(others: Mapping[str, Condition | str | tuple[str, ...]]) -> dict[str, Condition]:
    return {name: _condition(one) for name, one in others.items()}


def _condition(one: Condition | str | tuple[str, ...]) -> Condition:
    if isinstance(one, Condition):
        return one
    return is_in(one) if isinstance(one, str) else is_in(*one)


def _joined(words: Any) -> str:
    *rest, last = words
    return f"{', '.join(rest)} or {last}" if rest else last
