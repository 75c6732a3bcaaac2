"""Scores completions one prompt at a time; user functions run in a separate process.

A job of the queue infer shares its process with others, so it must not run code of a user. The
process is a new one (the job has threads: no fork), ends with the job, and exchanges JSON lines: no
pickle. Imports no torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from select import select
from typing import IO, Any, TypeAlias

import orjson

from ..errors import JobFailed
from ..user_code.modules import own_modules
from .options import RewardsSpec
from .problems import Problem, columns_of
from .prompts import Prompt
from .reward_calls import RewardCalls
from .rewards import Reward
from .user_rewards import KeywordReward

# The scores of completions of a prompt, by reward; None: no score for this completion.
Scores: TypeAlias = dict[str, list[float | None]]
Score: TypeAlias = Callable[[Prompt, Sequence[str]], Scores]

_START_S = 60.0  # for the process to start and import the functions, if there is a time limit


@contextmanager
def scorer(
    spec: RewardsSpec, problems: Sequence[Problem], folders: Sequence[str]
) -> Iterator[Score]:
    """Yield the object that scores completions with the rewards of a spec.

    folders: where functions of users are imported from. Calls raise JobFailed.
    """
    if not spec.has_own_rewards:
        functions = spec.reward_functions(problems)
        yield lambda prompt, completions: score(functions, prompt, completions)
        return
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    columns = columns_of(one.columns for one in problems)
    with process:  # waits for its end
        try:
            yield _Remote(process, spec, columns, folders)
        except BaseException:
            process.kill()  # it may hang in a reward
            raise


def score(
    functions: Mapping[str, Reward | KeywordReward], prompt: Prompt, completions: Sequence[str]
) -> Scores:
    """Return the scores of the completions of a prompt. Raises JobFailed."""
    count = len(completions)
    with RewardCalls(functions, [prompt]) as calls:
        found = calls.score([prompt] * count, completions, [[]] * count).scores
    return {name: [row[number] for row in found] for number, name in enumerate(functions)}


class _Remote:
    """The job's connection to the process that runs the rewards."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        spec: RewardsSpec,
        columns: Sequence[str],
        folders: Sequence[str],
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self._limit_s = spec.reward_timeout
        names = RewardsSpec.options()
        options = {name: value for name, value in spec.to_json().items() if name in names}
        self._send({"options": options, "columns": list(columns), "folders": list(folders)})
        self._is_ready = False

    def __call__(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        """Raises JobFailed for an error of a reward, its end, and after the time limit."""
        if not self._is_ready:
            self._await_start()
        self._send({"prompt": asdict(prompt), "completions": list(completions)})
        if self._limit_s is not None and not select([self._output], [], [], self._limit_s)[0]:
            raise JobFailed(
                f"reward: took longer than {self._limit_s:g} s (reward_timeout) for row "
                f"{prompt.row}"
            )
        scores: Scores = self._receive(f"at row {prompt.row}")["scores"]
        return scores

    def _await_start(self) -> None:
        """Wait until the functions are imported: `reward_timeout` is for their calls only."""
        if self._limit_s is not None and not select([self._output], [], [], _START_S)[0]:
            raise JobFailed(f"reward: importing the functions took longer than {_START_S:g} s")
        self._receive("while it imported the functions")
        self._is_ready = True

    def _receive(self, when: str) -> dict[str, Any]:
        line = self._output.readline()
        if not line:
            raise JobFailed(f"reward: its process ended {when}: see `warmd logs`")
        answer: dict[str, Any] = orjson.loads(line)
        if "error" in answer:
            raise JobFailed(answer["error"])
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._input.write(orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS) + b"\n")
            self._input.flush()
        except OSError as error:
            raise JobFailed("reward: its process has ended: see `warmd logs`") from error


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Import the functions, report it, and answer requests until the job closes its end."""
    head = orjson.loads(requests.readline())
    with own_modules(head["folders"]):
        functions: dict[str, Reward | KeywordReward] = {}

        def start() -> dict[str, Any]:
            spec = RewardsSpec.parse(head["options"])
            columns = dict.fromkeys(head["columns"])
            functions.update(spec.reward_functions([Problem("", None, 1, columns)]))
            return {}

        def scores(line: bytes) -> dict[str, Any]:
            request = orjson.loads(line)
            found = score(functions, Prompt(**request["prompt"]), request["completions"])
            return {"scores": found}

        _answer(answers, start)
        for line in requests:
            _answer(answers, partial(scores, line))


def _answer(answers: IO[bytes], make: Callable[[], dict[str, Any]]) -> None:
    try:
        answer = make()
    # Also SystemExit: it ends the reward, not the job.
    except (Exception, SystemExit) as error:
        answer = {"error": str(error) or type(error).__name__}
    answers.write(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    answers.flush()


def _main() -> None:
    import os

    # Output of a reward must not be mixed with the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
