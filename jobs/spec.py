"""Specs: the options of a job kind with their types, bounds and help, checked before submission.

A kind declares a frozen dataclass with `option(...)` fields. `Spec.parse` builds one from values of
the command line, a YAML file or JSON, and raises SpecError naming the first wrong field. The Click
options and the documentation are generated from the same fields.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from ..configs.queues import TRAIN
from .errors import SpecError
from .relations import Relation

# The groups of options in `warmd submit KIND --help` and in the documentation, in this order: the
# most used first.
GROUPS = {
    "data": "Data",
    "model": "Model",
    "sampling": "Sampling",
    "environment": "Environment",
    "reward": "Reward",
    "optimization": "Optimization",
    "loss": "Loss",
    "lora": "LoRA",
    "evaluation": "Evaluation and logging",
    "checkpoints": "Checkpoints",
    "stopping": "Stopping",
}


def option(
    default: Any,
    help: str,
    *,
    group: str,
    default_text: str | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    longest: int | None = None,
    names: Mapping[str, str] | None = None,
    none_word: str = "none",
    former: str | None = None,
) -> Any:
    """Declare a field of a spec. `minimum` and `maximum` are inclusive, `above` is not.

    `longest`: of a text, in characters.

    `default_text` describes the default if it is None. `group` is one of GROUPS; within a group,
    the options most used are declared first. `names`: words for values, such as spellings of
    choices in earlier versions, and the value that each means. `none_word`: the text that means
    None. `former`: of an option that only jobs of earlier versions have, what to use instead; a new
    job is refused with these words, and the option is shown nowhere.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "group": group,
            "default_text": default_text,
            "minimum": minimum,
            "above": above,
            "maximum": maximum,
            "choices": choices,
            "longest": longest,
            "names": names or {},
            "none_word": none_word,
            "former": former,
        },
    )


def override(base: type[Spec], name: str, **changes: Any) -> Any:
    """Declare an inherited option again with another `default`, `help` or bound.

    Everything else stays as `base` declares it.
    """
    (inherited,) = (f for f in fields(base) if f.name == name)
    default = changes.pop("default", inherited.default)
    return field(default=default, metadata={**inherited.metadata, **changes})


@dataclass(frozen=True)
class OptionInfo:
    """One field of a spec, as used by the command line and the documentation."""

    name: str
    type: type  # int, float, bool or str: of the value, or of each item when `many`
    many: bool
    optional: bool  # whether None is a value
    default: Any
    help: str
    group: str  # one of GROUPS
    default_text: str | None  # description of the default if it is None
    minimum: float | None
    above: float | None
    maximum: float | None
    choices: tuple[str, ...] | None
    longest: int | None  # characters of a text
    names: Mapping[str, str]  # words for values
    none_word: str  # the text that means None, of an option that may be None
    former: str | None  # what to use instead of an option that only earlier versions had
    relations: tuple[str, ...]  # to other options, in words: 'with lora'

    @property
    def takes(self) -> str:
        """The accepted values in words: 'an integer of at least 2'."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
        bounds = []
        if self.minimum is not None:
            bounds.append(f"at least {self.minimum:.10g}")
        if self.above is not None:
            bounds.append(f"above {self.above:.10g}")
        if self.maximum is not None:
            bounds.append(f"at most {self.maximum:.10g}")
        if self.longest is not None:
            bounds.append(f"at most {self.longest} characters")
        limits = " and ".join(bounds)
        of = "of " if limits.startswith("at ") else ""
        text = f"{words[self.type]} {of}{limits}".rstrip()
        if self.optional and self.none_word != "none":
            text += f", or {self.none_word}"
        return f"a list, each {text}" if self.many else text

    def convert(self, value: Any) -> Any:
        """Turn text, a YAML or a JSON value into the field's type. Raises SpecError."""
        if value is None or (self.optional and value == self.none_word):
            if self.optional:
                return None
            raise SpecError(self.name, f"must be {self.takes}, got nothing")
        if self.many:
            items = value if isinstance(value, list | tuple) else [value]
            return tuple(self._convert_one(item) for item in items)
        return self._convert_one(value)

    def current(self, value: Any) -> Any:
        """Return the value that a word stands for; any other value unchanged."""
        return self.names.get(value, value) if isinstance(value, str) else value

    def _convert_one(self, value: Any) -> Any:
        converted = self.current(_CONVERTERS[self.type](value))
        if converted is None or not self._within_bounds(converted):
            raise SpecError(self.name, f"must be {self.takes}, got {_shown(value)}")
        return converted

    def _within_bounds(self, value: Any) -> bool:
        if self.choices is not None and value not in self.choices:
            return False
        if self.longest is not None and len(value) > self.longest:
            return False
        if self.minimum is not None and value < self.minimum:
            return False
        if self.above is not None and value <= self.above:
            return False
        return self.maximum is None or value <= self.maximum


def path_of(name: str, text: str, folder: Path) -> Path:
    """Return the path of option `name`, relative to `folder`; a leading ~ is expanded.

    Raises SpecError for '', which would be `folder`, and when the user after the ~ does not exist.
    """
    if not text:
        raise SpecError(name, "must be a path, got ''")
    try:
        return folder / Path(text).expanduser()
    except RuntimeError as error:
        raise SpecError(name, f"must be a path, got {_shown(text)}: {error}") from error


def shown(value: Any) -> str:
    """Return the value of an option for a message, at most 80 characters long."""
    return "its default" if value is None else _shown(value)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _word(value: Any) -> str:
    """Return a value as it is written on the command line, at most 80 characters long."""
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    is_plain = 0 < len(text) <= 80 and " " not in text and text.isprintable()
    return text if is_plain else _shown(value)


def _to_int(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        number = int(value) if isinstance(value, int | str) else None
    except ValueError:
        return None
    # JSON and Redis hold 64-bit integers.
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _to_float(value: Any) -> float | None:
    # YAML 1.1 reads 1e-5 (no dot) as text; here it is a number.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _to_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return {"true": True, "yes": True, "false": False, "no": False}.get(value.lower())
    return None


def _to_str(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return None if "\0" in text else text


_CONVERTERS = {int: _to_int, float: _to_float, bool: _to_bool, str: _to_str}


@dataclass(frozen=True, kw_only=True)
class HttpMethod:
    """How a training kind is requested over HTTP: a method of `/v1/fine_tuning/jobs`.

    A request must not name code or files of this machine. So it may set text options only if they
    have choices, or are `harmless_text`.
    """

    type: str  # `method.type` of the request
    training_file: str  # the option that names the data
    validation_file: str | None = None  # the option that names held-out data
    builtin_data: str | None = None  # the value of `training_file` that is not a file
    harmless_text: tuple[str, ...] = ()  # options whose text names neither code nor a file
    renamed: Mapping[str, str] = field(default_factory=dict)  # OpenAI's name -> option


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Base of every kind's spec. Fields are int, float, bool, str, `X | None`, `tuple[X, ...]`."""

    kind: ClassVar[str]
    queue: ClassVar[str] = TRAIN
    argument: ClassVar[str | None] = None  # the option that may be a positional argument
    http: ClassVar[HttpMethod | None] = None  # None: not among the fine-tuning methods
    is_kept: ClassVar[bool] = False  # whether ended jobs stay that are not of the queue train
    takes_weights: ClassVar[bool] = False  # whether `model` may be a checkpoint (--init-from)
    names_jobs: ClassVar[tuple[str, ...]] = ()  # options whose value is another job
    of_new_model: ClassVar[tuple[str, ...]] = ()  # options of a job that makes its model
    # Of a kind from outside warmd: the module that has `run`. It is imported once, before the forks
    # of jobs, and may import torch; the module of the Spec must not.
    run_module: ClassVar[str | None] = None
    # Whether `run` computes with WarmModel.adapter; other kinds get the merged model.
    takes_adapters: ClassVar[bool] = False

    # Options of other programs that users look for here, and what to know instead.
    not_supported: ClassVar[Mapping[str, str]] = {}

    # The relations between the options that this class declares or inherits: those of the classes
    # that it derives from hold, too.
    relations: ClassVar[tuple[Relation, ...]] = ()

    # The options that may change when a job is resumed; the others determined the results so far.
    # `otherwise` is the advice for those.
    changeable: ClassVar[tuple[str, ...]] = ()
    otherwise: ClassVar[str] = "submit a new job"

    @classmethod
    def options(cls) -> dict[str, OptionInfo]:
        """Return every option by name, ordered by group, then as declared.

        Within a group, options that the kind declares come before inherited ones.
        """
        kind: Any = cls  # mypy considers the class of a frozen dataclass unhashable
        return dict(_options(kind))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Build a checked spec from names and raw values. Raises SpecError on the first problem."""
        known = cls.options()
        for name in values:
            if name not in known:
                raise SpecError(str(name), f"unknown option of {cls.kind}{cls._hint(name)}")
        spec = cls(**{name: known[name].convert(value) for name, value in values.items()})
        spec.check()
        return spec

    @classmethod
    def of_stored(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a stored job, with its version's defaults for missing options.

        A default that changes in a later version must not change a job that began before.
        """
        return dict(options)

    @classmethod
    def _hint(cls, name: Any) -> str:
        if name in cls.not_supported:
            return f"; {cls.not_supported[name]}"
        # Imported here: difflib costs 5 ms at every start of the command line.
        import difflib

        close = difflib.get_close_matches(str(name), cls.options(), n=1)
        return f"; did you mean {close[0]}?" if close else ""

    @classmethod
    def every_relation(cls) -> tuple[Relation, ...]:
        """Return the relations of this class and of those that it derives from, those first."""
        declared = (vars(base).get("relations", ()) for base in reversed(cls.__mro__))
        return tuple(relation for relations in declared for relation in relations)

    def check(self) -> None:
        """Check constraints between fields, without reading files. Raises SpecError."""
        values = {name: getattr(self, name) for name in self.options()}
        defaults = {name: info.default for name, info in self.options().items()}
        for relation in self.every_relation():
            for name in relation.broken_by(values, defaults):
                others = " and ".join(
                    f"{other} {_word(values[other])}" for other in relation.others
                )
                raise SpecError(name, f"{relation.rule}, got {_word(values[name])} with {others}")

    def as_trained(self, model_settings: Mapping[str, Any] | None) -> Self:
        """Return the spec with the prompt of its model's training, unless it has one of its own.

        `model_settings`: as of `check_inputs`; `trained_prompt` is a data.TrainedPrompt, or None.
        """
        return self

    def check_inputs(self, model_settings: Mapping[str, Any] | None) -> None:
        """Check the files that the spec names, before submission. Raises SpecError.

        `model_settings` is the content of the model's config.json with `has_chat_template` of its
        tokenizer, or None when the model is not on this machine yet.
        """
        for name, info in self.options().items():
            if info.former is not None and getattr(self, name) != info.default:
                raise SpecError(name, f"is no longer an option: {info.former}")

    def check_chats(self, folder: Path) -> None:
        """Check chats by the template of the tokenizer in `folder`. Raises SpecError."""

    def check_model_files(self, folder: Path) -> str | None:
        """Check what needs other files of the model folder than config.json. Raises SpecError.

        Returns what was left to the job in one sentence, None for nothing.
        """
        return None

    def check_completions(self, most: int) -> None:
        """Check that at most so many completions are requested at once. Raises SpecError."""

    def check_layers(self, folder: Path) -> None:
        """Check what depends on the layers of the model in `folder`. Raises SpecError."""

    def located(self, folder: Path) -> Self:
        """Return the spec with paths made absolute: the daemon has another working directory.

        Raises SpecError for an invalid path.
        """
        return self

    def extended(self, steps: int) -> Self:
        """Return the spec with `steps` in total. Raises SpecError for a kind without steps."""
        raise SpecError("steps", f"a {self.kind} job has none")

    def revised(self, values: Mapping[str, Any]) -> Self:
        """Return the spec with changed (raw) values, to resume its job with.

        Raises SpecError for a wrong value and for an option that may not change.
        """
        known, values = self.options(), dict(values)
        spec = self.extended(values.pop("steps")) if "steps" in values else self
        for name in values:
            if name not in known:
                raise SpecError(str(name), f"unknown option of {self.kind}{self._hint(name)}")
            if known[name].former is not None:
                raise SpecError(name, f"cannot change on resume; {self.otherwise}")
        spec = replace(spec, **{name: known[name].convert(v) for name, v in values.items()})
        spec.changes(self.to_json())
        spec.check()
        return spec

    def changes(self, options: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the options that differ from `options` (an earlier `to_json`): [then, now].

        Raises SpecError for an option that may not change. Options that only one of the two
        versions of warmd knows are ignored.
        """
        known, now = self.options(), self.to_json()
        then = {n: known[n].current(options[n]) for n in now if n in options}
        found = {n: [then[n], now[n]] for n in then if then[n] != now[n]}
        for name in found:
            if name not in self.changeable:
                raise SpecError(
                    name,
                    f"cannot change on resume (the job began with {shown(then[name])}); "
                    f"{self.otherwise}",
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return every option by name, as plain JSON values; `parse` reads it back."""
        values = {
            name: getattr(self, name)
            for name, info in self.options().items()
            if info.former is None or getattr(self, name) != info.default
        }
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


@cache  # reading the annotations takes 1 ms, and a list of jobs parses many specs
def _options(spec: Any) -> dict[str, OptionInfo]:
    hints = get_type_hints(spec)
    own = list(inspect.get_annotations(spec))
    groups = list(GROUPS)

    def position(f: Any) -> tuple[int, int]:
        return groups.index(f.metadata["group"]), own.index(f.name) if f.name in own else len(own)

    declared = sorted(fields(spec), key=position)
    notes: dict[str, list[str]] = {f.name: [] for f in declared}
    for relation in spec.every_relation():
        for name in relation.options:
            notes[name].append(relation.note)
    return {f.name: _option_info(f, hints[f.name], tuple(notes[f.name])) for f in declared}


def _option_info(f: Any, hint: Any, relations: tuple[str, ...]) -> OptionInfo:
    optional = many = False
    if isinstance(hint, UnionType):
        optional = True
        (hint,) = (arm for arm in get_args(hint) if arm is not NoneType)
    if get_origin(hint) is tuple:
        many = True
        hint = get_args(hint)[0]
    if hint not in _CONVERTERS or f.default is MISSING:
        raise TypeError(f"{f.name}: a spec field needs a default and a plain type, not {hint}")
    return OptionInfo(
        name=f.name,
        type=hint,
        many=many,
        optional=optional,
        default=f.default,
        relations=relations,
        **f.metadata,
    )
