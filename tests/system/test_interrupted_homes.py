"""Homes of an earlier version, cut off in the middle of everything, end as they would have there.

tests/support/make_old_home.py made them at commit cc9358c. What that commit itself makes of them is
in the archive; the current version takes them over and must compute the same bits.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import processor_sums
import pytest
import torch
from old_homes import OldHome, load_bucket, unpacked
from s3_servers import s3_server
from safetensors.torch import load_file

from warmd.daemon.client.client import Client

pytestmark = [
    pytest.mark.nightly(
        part="homes", catches="a format or a computation of cc9358c that is no longer the same"
    ),
    pytest.mark.timeout(300),
]

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / "tests" / "homes" / "0.1.0-cc9358c.tar.xz"
INTERRUPTED = ("replay", "lora", "ranks", "sft", "dpo", "mlm")
WAITING = ("queued_grpo", "queued_sft", "deferred")
PAUSED = ("held_dpo", "released_grpo", "released_mlm")
ENDED = {
    **{f"finished_{kind}": "finished" for kind in ("grpo", "sft", "dpo", "mlm", "eval")},
    "failed": "failed",
    "canceled": "canceled",
}
GROUPS = {"sweep", "curriculum"}
# The stage with a learning rate that ruins the model, and what follows from it.
DIVERGING = {"curriculum_1", "curriculum_2", "curriculum_3"}
# GRPO draws completions with random numbers of their own since RULES 3: what cc9358c had begun
# continues with others, and what had not begun writes other completions.
RESUMED_GRPO = ("replay", "lora", "ranks", "released_grpo", "fetched")
REDRAWN = {*RESUMED_GRPO, "queued_grpo"}
# Where sums are rounded otherwise, a weight may move into the other direction in some steps.
ROUNDING = 3e-3


class Taken:
    """The homes after this version has finished all their jobs."""

    def __init__(self, folder: Path, home: OldHome, cloud: OldHome, decided: list[Any]) -> None:
        """`decided`: the decisions of the sweep, as they were before this version started."""
        self.folder = folder
        self.decided = decided
        self.homes = {"home": home, "cloud": cloud}
        document = orjson.loads((folder / "expected" / "expected.json").read_bytes())
        self.expected: dict[str, Any] = document["outcomes"]
        self.difference = _difference(document)  # why bits are not compared; None: they are
        self.before = {"home": {name: home.job(name)["paused"] for name in PAUSED}}
        self.followed: list[dict[str, Any]] = []
        follower = threading.Thread(target=self._follow, args=(home, "held_dpo"))
        follower.start()
        self.outcomes = {name: one.finish_all() for name, one in self.homes.items()}
        follower.join(timeout=30)

    def home_of(self, name: str) -> OldHome:
        return next(one for one in self.homes.values() if name in one.jobs)

    def check_weights(self, where: str, name: str) -> None:
        """Compare a job's final weights with those that the earlier version computed."""
        if self.difference is not None and name in DIVERGING:
            pytest.skip(f"its learning rate multiplies rounding: {self.difference}")
        found = load_file(self.homes[where].weights(self.outcomes[where]["weights"][name]))
        expected = load_file(self.folder / "expected" / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        for part, values in expected.items():
            if self.difference is None:
                assert torch.equal(found[part], values), f"{name}: other bits in {part}"
            else:
                torch.testing.assert_close(found[part], values, rtol=0, atol=ROUNDING)

    def _follow(self, home: OldHome, name: str) -> None:
        """Read a job's events while it runs."""
        with contextlib.closing(Client(home.config)) as client:
            self.followed += [event for event in client.jobs.follow(home.jobs[name]) if event]


def _difference(document: dict[str, Any]) -> str | None:
    """Return why this environment need not compute the recorded bits; None: it must."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    here = processor_sums.here()
    for name, version in here["versions"].items():
        if version.partition("+")[0] != pins[name]:
            return f"{name} is {version}, not {pins[name]} as in constraints.txt"
    made = document["versions"]["torch"].partition("+")[0]
    if made != pins["torch"]:  # other libraries do not decide how sums are rounded
        return f"the bits are of torch {made}, here is {pins['torch']}"
    if here["sums"] != document["sums"]:
        return "this processor adds in another order than the recording one"
    return None


@pytest.fixture(scope="module")
def taken() -> Iterator[Taken]:
    with (
        pytest.MonkeyPatch.context() as environ,
        unpacked(ARCHIVE) as folder,
        s3_server() as server,
        contextlib.ExitStack() as stack,
    ):
        for name, text in processor_sums.CAPS.items():
            environ.setenv(name, text)
        environ.setenv("AWS_REGION", "us-east-1")
        environ.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.proxy.port}")
        load_bucket(server, folder / "bucket")
        home, cloud = OldHome(folder), OldHome(folder, "cloud")
        state = home.home.sweeps / home.jobs["sweep"] / "state.json"
        decided = orjson.loads(state.read_bytes())["decisions"]
        for one in (home, cloud):
            stack.enter_context(contextlib.closing(one))
            one.start()
        yield Taken(folder, home, cloud, decided)


def test_bits_are_compared_on_this_machine(taken):
    if taken.difference is not None:
        pytest.skip(f"weights are compared within rounding: {taken.difference}")


def test_every_job_is_listed(taken):
    for home in taken.homes.values():
        listed = {job["id"] for job in home.client.jobs.all()}
        assert listed == {path.name for path in home.home.runs.iterdir() if path.is_dir()}
        assert {home.jobs[name] for name in home.jobs.keys() - GROUPS} <= listed


def test_jobs_that_had_ended_are_shown_unchanged(taken):
    for name in (*ENDED, "cloud_finished"):
        home = taken.home_of(name)
        assert home.status_of(name) == ENDED.get(name, "finished")
        assert home.logged(name) == home.before[name]
        assert (home.client.jobs.result(home.jobs[name]) is None) == (
            home.status_of(name) != "finished"
        )
    home = taken.homes["home"]
    assert "the reward is broken" in home.job("failed")["error"]
    assert taken.before["home"] == dict.fromkeys(PAUSED, True)


@pytest.mark.parametrize("name", [*INTERRUPTED, *PAUSED, *WAITING, "stopped"])
def test_a_job_loses_no_step_and_repeats_none(taken, name):
    taken.homes["home"].finish(name)


@pytest.mark.parametrize("name", ["local", "fetched", "cloud_queued"])
def test_a_job_with_its_runs_in_a_bucket_loses_no_step_and_repeats_none(taken, name):
    taken.homes["cloud"].finish(name)


@pytest.mark.parametrize("name", [*INTERRUPTED, *PAUSED, "stopped", "local", "fetched"])
def test_a_job_resumes_from_the_checkpoint_that_the_earlier_version_chose(taken, name):
    where = "home" if name in taken.homes["home"].jobs else "cloud"
    resumed_from = taken.outcomes[where]["resumed_from"][name]
    assert resumed_from == taken.expected[where]["resumed_from"][name] >= 3


def test_an_evaluation_answers_only_what_it_had_not_answered(taken):
    home = taken.homes["home"]
    begun = [event["done"] for event in home.logged("eval") if event["type"] == "begin"]
    assert begun[0] == 0
    assert begun[1] >= 5
    assert not [event for event in home.logged("eval") if event["type"] == "warning"]


def test_a_follower_reads_the_events_of_both_versions(taken):
    home = taken.homes["home"]
    assert taken.followed == home.logged("held_dpo")
    assert taken.followed[: len(home.before["held_dpo"])] == home.before["held_dpo"]


def test_a_reward_log_has_every_step_once(taken):
    lines = (taken.folder / "project" / "replay.rewards.jsonl").read_bytes().splitlines()
    steps = [orjson.loads(line)["step"] for line in lines]
    assert steps == [step for step in range(1, max(steps) + 1) for _ in range(4)]


def test_a_decision_of_a_sweep_is_not_made_again(taken):
    home = taken.homes["home"]
    assert len(taken.decided) == 1
    assert home.client.groups.sweep(home.jobs["sweep"])["decisions"] == taken.decided


def test_a_curriculum_says_from_which_gate_on_another_test_decides(taken):
    home = taken.homes["home"]
    attempts = home.client.groups.curriculum(home.jobs["curriculum"])["attempts"]
    words = [(one["comparison"] or {"words": ""})["words"] for one in attempts]
    (changed,) = (number for number, text in enumerate(words) if "paired t test" in text)
    assert changed == 1  # the first gate had been decided
    assert f"from this gate ({attempts[1]['stage']}) on" in words[1]


@pytest.mark.parametrize("where", ["home", "cloud"])
def test_scores_decisions_and_counters_are_those_of_the_earlier_version(taken, where):
    expected, found = taken.expected[where], taken.outcomes[where]
    if taken.difference is not None:  # the stage in DIVERGING may end otherwise
        assert found["statuses"] == expected["statuses"]
        pytest.skip(f"only the statuses are compared: {taken.difference}")
    assert found["weights"].keys() == expected["weights"].keys()
    for part in expected.keys() - {"weights"}:
        assert found[part] == expected[part], part


@pytest.mark.parametrize("name", RESUMED_GRPO)
def test_a_grpo_job_says_from_which_step_on_its_completions_are_others(taken, name):
    where = "home" if name in taken.homes["home"].jobs else "cloud"
    home = taken.homes[where]
    first = taken.outcomes[where]["resumed_from"][name] + 1
    (message,) = (
        event["message"]
        for event in home.logged(name)
        if event["type"] == "warning" and "results differ" in event["message"]
    )
    assert message.startswith(f"from step {first} on, results differ from those of the earlier")
    assert "completions are drawn with random numbers of their own" in message


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            *(f"finished_{kind}" for kind in ("grpo", "sft", "dpo", "mlm")),
            *(*INTERRUPTED, *PAUSED, *WAITING, "stopped", "sweep_0"),
            *(f"curriculum_{number}" for number in range(4)),
        }
        - REDRAWN
    ),
)
def test_weights_are_those_of_the_earlier_version(taken, name):
    taken.check_weights("home", name)


@pytest.mark.parametrize("name", ["cloud_finished", "cloud_queued", "local"])
def test_weights_of_runs_in_a_bucket_are_those_of_the_earlier_version(taken, name):
    taken.check_weights("cloud", name)


def test_all_weights_are_compared(taken):
    names = {path.stem for path in (taken.folder / "expected").glob("*.safetensors")}
    found = {name for one in taken.outcomes.values() for name in one["weights"]}
    assert names - DIVERGING == found - DIVERGING
