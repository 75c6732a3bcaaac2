"""Scores completions one prompt at a time; user functions run in a separate process.

A job of the queue infer shares its process with others, so it must not run code of a user. The
process is a new one (the job has threads: no fork) and ends with the job. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, TypeAlias

from ..errors import JobFailed
from ..user_code.child import SpawnedChild
from ..user_code.child_server import parent, serve
from ..user_code.modules import own_modules
from .options import RewardsSpec
from .problems import Problem, columns_of
from .prompts import Prompt
from .reward_calls import RewardCalls, answered
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
    names = RewardsSpec.options()
    head = {
        "options": {name: value for name, value in spec.to_json().items() if name in names},
        "columns": columns_of(one.columns for one in problems),
        "folders": list(folders),
    }
    process = SpawnedChild(__name__)
    process.send(head)
    try:
        yield _Remote(process, spec.reward_timeout)
    except BaseException:
        process.kill()  # it may hang in a reward
        raise
    process.close()


def score(
    functions: Mapping[str, Reward | KeywordReward], prompt: Prompt, completions: Sequence[str]
) -> Scores:
    """Return the scores of the completions of a prompt. Raises JobFailed."""
    count = len(completions)
    with RewardCalls(functions, [prompt]) as calls:
        found = calls.score([prompt] * count, completions, [[]] * count).scores
    return {name: [row[number] for row in found] for number, name in enumerate(functions)}


class _Remote:
    """The rewards in another process. Raises JobFailed for an error, its end and a time limit."""

    def __init__(self, process: SpawnedChild, limit_s: float | None) -> None:
        self._process = process
        self._limit_s = limit_s
        self._is_ready = False

    def __call__(self, prompt: Prompt, completions: Sequence[str]) -> Scores:
        limit_s = self._limit_s
        if not self._is_ready:  # the time limit of calls is not for importing the functions
            slow = f"importing the functions took longer than {_START_S:g} s"
            self._answer(None, limit_s and _START_S, slow, "while it imported the functions")
            self._is_ready = True
        request = {"prompt": asdict(prompt), "completions": completions}
        slow = f"took longer than {limit_s or 0:g} s (reward_timeout) for row {prompt.row}"
        scores: Scores = self._answer(request, limit_s, slow, f"at row {prompt.row}")
        return scores

    def _answer(
        self, request: dict[str, Any] | None, limit_s: float | None, slow: str, when: str
    ) -> Any:
        """Return the answer to a request; None: to the first one, which is sent."""
        try:
            if request is not None:
                self._process.send(request, limit_s)
            answer = self._process.receive(limit_s)
        except TimeoutError as error:
            raise JobFailed(f"reward: {slow}") from error
        except EOFError as error:
            raise JobFailed(f"reward: its process ended {when}: see `warmd logs`") from error
        if "error" in answer:
            raise JobFailed(answer["error"])
        return answer["found"]


class _Functions:
    """The other end: imports the functions for the first request, and scores for the next ones."""

    def __init__(self, folders: ExitStack) -> None:
        self._folders = folders
        self._functions: dict[str, Reward | KeywordReward] | None = None

    def __call__(self, request: dict[str, Any]) -> Scores | None:
        if self._functions is not None:
            return score(self._functions, Prompt(**request["prompt"]), request["completions"])
        self._folders.enter_context(own_modules(request["folders"]))
        columns = dict.fromkeys(request["columns"])
        spec = RewardsSpec.parse(request["options"])
        self._functions = spec.reward_functions([Problem("", None, 1, columns)])
        return None


if __name__ == "__main__":
    with ExitStack() as stack:
        serve(answered(_Functions(stack)), parent())
