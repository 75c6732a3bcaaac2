"""The reward process: runs rewards with a time limit for each call.

The job forks a keeper before it computes anything. The keeper forks the process that runs the
rewards, and a new one after a kill; it runs no user code, so it never hangs. Both end with the job.
"""

from __future__ import annotations

import os
import signal
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ..errors import JobFailed
from ..rewards.prompts import Prompt
from ..rewards.reward_calls import RewardCalls, Scored, answered
from ..rewards.rewards import Reward
from ..rewards.user_rewards import KeywordReward, PositionalReward
from ..user_code.child import Child
from ..user_code.child_server import serve


class RewardFailed(Exception):
    """The rewards of some completions raised, took too long, or ended their process."""


class RewardProcess:
    """The process that runs the rewards. A context manager: leaving it ends the process.

    `prompts`: all prompts that may be scored. `limit_s`: time limit of a call, in seconds.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward | KeywordReward],
        prompts: Sequence[Prompt],
        limit_s: float,
    ) -> None:
        self._limit_s = limit_s
        self._places = {id(prompt): place for place, prompt in enumerate(prompts)}
        self._keeper, theirs = socket.socketpair()
        self._keeper_pid = _fork()
        if self._keeper_pid == 0:
            self._keeper.close()
            _keep(theirs, _Scorer(rewards, prompts))
        theirs.close()
        self._child = self._start()

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()
        self._keeper.close()
        os.waitpid(self._keeper_pid, 0)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        state: Mapping[str, Any],
    ) -> Scored:
        """Score completions, one per prompt. `state`: TRL's trainer_state. Raises RewardFailed.

        After a failure other than an exception the next call uses a new process.
        """
        request = {
            "places": [self._places[id(prompt)] for prompt in prompts],
            "completions": completions,
            "completion_ids": completion_ids,
            "state": state,
        }
        try:
            answer = self._child.ask(request, self._limit_s)
        except TimeoutError as error:
            self._restart()
            raise RewardFailed(f"took longer than {self._limit_s:g} s (reward_timeout)") from error
        except EOFError as error:
            self._restart()
            raise RewardFailed("the reward process ended") from error
        if "error" in answer:
            raise RewardFailed(answer["error"])
        return Scored(**answer["found"])

    def _restart(self) -> None:
        self._child.close()
        self._child = self._start()

    def _start(self) -> Child:
        """Let the keeper end the process and fork a new one."""
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._keeper, [b"."], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise JobFailed(
                "reward: the process that forks the reward process has ended; it may have been "
                "killed, also for want of memory"
            ) from error
        finally:
            theirs.close()
        return Child(ours)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads; the child runs Python code only.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        return os.fork()


def _keep(job: socket.socket, scorer: _Scorer) -> None:
    """Fork a process for each connection from the job, one at a time; end with the job."""
    # Stop requests are for the job, which needs the rewards of its last step: Slurm and some others
    # send them to all processes. The keeper ends with the job's connection.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = 0
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(job, 1, 1)
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            if not data:
                break
            child = _fork()
            if child == 0:
                job.close()
                _outlive_stop_requests()
                scorer.serve(socket.socket(fileno=descriptors[0]))
            os.close(descriptors[0])
    finally:
        os._exit(0)


def _outlive_stop_requests() -> None:
    """The same for the reward process, but not for programs that rewards start.

    Uses a handler: executed programs would inherit SIG_IGN and could not be terminated.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))


class _Scorer:
    """Runs the rewards in the reward process."""

    def __init__(
        self, rewards: Mapping[str, Reward | KeywordReward], prompts: Sequence[Prompt]
    ) -> None:
        self._prompts = prompts
        self._calls = RewardCalls(rewards, prompts)

    def serve(self, job: socket.socket) -> None:
        """Answer requests until the job closes the connection; then end this process."""
        for reward in self._calls.rewards.values():
            if isinstance(reward, PositionalReward | KeywordReward):
                reward.move_here()
        serve(answered(self._answer), job)
        os._exit(0)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        rows = [self._prompts[place] for place in request["places"]]
        found = self._calls.score(
            rows, request["completions"], request["completion_ids"], request["state"]
        )
        return asdict(found)
