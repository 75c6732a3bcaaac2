"""Problems: prompts with their answers, from a data set or built in.

Read at submission, to check the job, and again when the job runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import islice
from typing import Any, Literal, TypeAlias

import orjson

from ..data import keys, templates
from ..data.held_out import split
from ..data.reader import Reader, Reading
from ..data.sources import TAKES
from ..data.templates import AS_IT_IS
from ..errors import SpecError
from ..files import jsonl
from ..files.chats import (
    NO_INPUTS,
    Messages,
    TemplateInputs,
    inputs_of,
    read_messages,
    refuse_inputs,
)
from ..files.numbers import Digits, written

ARITHMETIC = "arithmetic"  # the built-in source; a file of that name is ./arithmetic
NUM_EVAL_SUMS = 1000

Prompt: TypeAlias = str | Messages
Part = Literal["train", "eval"]


@dataclass(frozen=True)
class Problem:
    """A prompt (text, or chat messages) and its expected answer."""

    prompt: Prompt
    answer: str | None  # as the data has it: GSM8K's whole solution with its `####`
    row: int  # the line or row in its file, or the place in the built-in set; from 1
    # All columns of the row except `prompt`, unchanged: for rewards.
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    place: jsonl.Place | None = field(default=None, compare=False)  # None: it is built in
    inputs: TemplateInputs = NO_INPUTS  # of a chat template


def load(
    source: str,
    *,
    template: str = AS_IT_IS,
    samples: int | None = None,
    reading: Reading | None = None,
    check: Callable[[Problem], None] = lambda _: None,
    named_by: str = "dataset",
) -> list[Problem]:
    """Return the first `samples` distinct prompts of a data set or of `arithmetic`; None is all.

    A record has a `prompt`, used unchanged, or a `question`, which replaces `{question}` in the
    template, or `messages` (as in OpenAI's API), and optionally an `answer`. Other keys are kept
    for rewards. Duplicate prompts are skipped. Lines after the last sample are not read.

    `reading`: the rules for reading records, and the counts of what is skipped. `check` raises
    SpecError for a problem that cannot be used. `named_by`: the option that names the source.
    Raises SpecError for an invalid record, with its line, and for too few distinct prompts.
    """
    option = "samples" if named_by == "dataset" else "eval_samples"
    _check_samples(option, samples)
    candidates = _candidates(named_by, source, template, reading or Reading(), check)
    found = [problem for problem, _ in split(candidates, samples, 0)]
    _check_count(option, samples, len(found), source)
    return found


def load_both(
    source: str,
    *,
    template: str = AS_IT_IS,
    samples: int | None = None,
    held_out: int,
    reading: Reading | None = None,
    check: Callable[[Problem], None] = lambda _: None,
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on and the held-out problems, read in one pass as by `load`.

    The `held_out` distinct prompts after the first `samples` are held out; if `samples` is None,
    the last ones are. For `arithmetic` they are sums of the part "eval".
    """
    _check_samples("samples", samples)
    if source == ARITHMETIC:
        measured = list(islice(iter_arithmetic("eval"), held_out))
        _check_count("eval_samples", held_out, len(measured), source)
        return load(source, template=template, samples=samples), measured
    reading = reading or Reading()
    parts: dict[bool, list[Problem]] = {False: [], True: []}
    candidates = _candidates("dataset", source, template, reading, check)
    for problem, is_held_out in split(candidates, samples, held_out):
        parts[is_held_out].append(problem)
    training, measured = parts[False], parts[True]
    if samples is not None:
        _check_count("samples", samples, len(training), source)
        rest = f" after the {samples} of the training"
        _check_count("eval_samples", held_out, len(measured), source, rest)
    elif not (training or measured):
        raise SpecError("dataset", f"must have a prompt, got {source}: {reading.skipped}")
    elif not training:
        raise SpecError(
            "eval_samples",
            f"must be below {len(measured)} (the distinct prompts of {source}), got {held_out}",
        )
    return training, measured


def _check_samples(option: str, samples: int | None) -> None:
    if samples is not None and samples < 1:
        raise SpecError(option, f"must be at least 1, got {samples}")


def _check_count(option: str, wanted: int | None, found: int, source: str, rest: str = "") -> None:
    if wanted is not None and found < wanted:
        raise SpecError(
            option,
            f"must be at most {found} (the distinct prompts of {source}{rest}), got {wanted}",
        )


def _candidates(
    option: str,
    source: str,
    template: str,
    reading: Reading,
    check: Callable[[Problem], None],
) -> Iterator[Problem]:
    """Yield the problems of a source whose prompts are distinct. Raises SpecError."""
    templates.check(template)
    if source == ARITHMETIC:
        return iter_arithmetic("train")

    def convert(values: Mapping[str, Any], place: jsonl.Place) -> Problem:
        problem = problem_of(template, values, place)
        check(problem)
        return problem

    return _distinct(Reader(convert, reading).rows(option, source, f"{TAKES} or {ARITHMETIC}"))


def key_of(problem: Problem) -> bytes:
    """Return what distinguishes a prompt from others."""
    return orjson.dumps(_read_by_the_model(problem))


def _read_by_the_model(problem: Problem) -> Any:
    return [problem.prompt, problem.inputs.content] if problem.inputs else problem.prompt


def fingerprint(problems: Iterable[Problem]) -> str:
    """Return the sha256, in hex, of prompts and answers in order, without their row numbers."""
    digest = sha256()
    for problem in problems:
        digest.update(
            orjson.dumps([_read_by_the_model(problem), problem.answer], option=orjson.OPT_SORT_KEYS)
        )
    return digest.hexdigest()


def check_inputs(problem: Problem, *, chat_template: bool) -> None:
    """Check that a problem with inputs of a chat template goes through it. Raises SpecError."""
    if problem.inputs and isinstance(problem.prompt, str) and not chat_template:
        assert problem.place is not None
        refuse_inputs(problem.inputs, problem.place)


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the columns of all rows, in order."""
    return list(dict.fromkeys(name for row in rows for name in row))


def columns_fingerprint(problems: Iterable[Problem]) -> str:
    """Return the sha256, in hex, of the further columns that rewards receive."""
    digest = sha256()
    for problem in problems:
        seen = {k: v for k, v in problem.columns.items() if k not in ("question", "answer")}
        digest.update(orjson.dumps(seen, option=orjson.OPT_SORT_KEYS) if seen else b"\n")
    return digest.hexdigest()


def iter_arithmetic(part: Part) -> Iterator[Problem]:
    """Yield sums of two numbers from 0 to 99, like `17+58=` and `75`, in a fixed order.

    Each unordered pair occurs once; 1,000 of the 5,050 sums are the part "eval".
    """
    sums = enumerate(_shuffled_pairs(), start=1)
    chosen = islice(sums, NUM_EVAL_SUMS) if part == "eval" else islice(sums, NUM_EVAL_SUMS, None)
    for row, (a, b) in chosen:
        yield Problem(f"{a}+{b}=", str(a + b), row, {"answer": str(a + b)})


@cache
def _shuffled_pairs() -> tuple[tuple[int, int], ...]:
    pairs = [(a, b) for a in range(100) for b in range(a, 100)]
    # Fisher-Yates with a fixed generator, since `random` may change between versions of Python:
    # the linear congruential generator of MMIX (Knuth, The Art of Computer Programming, vol. 2,
    # 3.3.4).
    state = 42
    for i in range(len(pairs) - 1, -1, -1):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        j = (state >> 32) % (i + 1)  # the low bits of such a generator are not random enough
        pairs[i], pairs[j] = pairs[j], pairs[i]
        if state >> 31 & 1:
            pairs[i] = pairs[i][::-1]
    return tuple(pairs)


def _distinct(problems: Iterable[Problem]) -> Iterator[Problem]:
    seen: set[bytes] = set()
    for problem in problems:
        key = key_of(problem)
        if key not in seen:
            seen.add(key)
            yield problem


def problem_of(template: str, values: Mapping[str, Any], place: jsonl.Place) -> Problem:
    """Return the problem of a record. Raises SpecError."""
    keys.refuse_ignored(values, place, reads=keys.CHECKED)
    answer = _answer(values.get("answer"), place)
    columns = {name: value for name, value in values.items() if name != "prompt"}
    inputs = inputs_of(values, place)
    if "prompt" in values:
        prompt = _prompt(values["prompt"], place.field("prompt"))
        keys.check_parallel(values, prompt, place)
        return Problem(prompt, answer, place.line, columns, place, inputs)
    if "question" in values:
        question = jsonl.text(values["question"], place.field("question"))
        keys.check_parallel(values, question, place)
        prompt = templates.fill(template, question)
        return Problem(prompt, answer, place.line, columns, place, inputs)
    if "messages" in values:
        chat = read_messages(values["messages"], place.field("messages"))
        if chat[-1]["role"] == "assistant":
            last = place.field("messages").item(len(chat) - 1).field("role")
            raise last.fault("user, for the last message of a prompt", "assistant")
        keys.check_parallel(values, chat, place)
        return Problem(chat, answer, place.line, columns, place, inputs)
    raise place.fault("an object with question, prompt or messages", jsonl.keys_of(dict(values)))


def _prompt(value: Any, place: jsonl.Place) -> Prompt:
    if not isinstance(value, list):
        return jsonl.text(value, place)
    if not value:
        raise place.fault("text or chat messages", "an empty list")
    return read_messages(value, place)


def _answer(value: Any, place: jsonl.Place) -> str | None:
    if value is None or jsonl.is_text(value):
        return value
    if isinstance(value, int | float | Digits) and not isinstance(value, bool):
        return written(value)
    raise place.field("answer").fault("text or a number", jsonl.kind_of(value))
