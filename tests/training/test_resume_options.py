"""Options that may change when a job is resumed, and their effect."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
from daemons import Daemon
from shell import warmd

from warmd.daemon.client.client import Client
from warmd.jobs import spec_class
from warmd.jobs.errors import Conflict, SpecError, Stopped
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.spec import OptionInfo

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def spec(**options: Any) -> GrpoSpec:
    """A job of 3 steps of a tiny model, rewarded for digits."""
    small = {
        "samples": 6,
        "steps": 3,
        "num_generations": 4,
        "max_completion_length": 6,
        "reward": ["tiny:digit_share"],
        "learning_rate": 1e-2,
        "keep": 100,
    }
    return GrpoSpec.parse(small | options)


def rates(surroundings: tiny.Surroundings) -> list[float]:
    return [event["learning_rate"] for event in surroundings.of_type("step")]


# Which options.


def another(info: OptionInfo, value: Any) -> Any:
    """A value that the option takes and does not have."""
    if info.choices is not None:
        return next(choice for choice in info.choices if choice != value)
    if info.many:
        return [*(value or ()), "more"]
    if info.type is bool:
        return not value
    if info.type is str:
        return {"save_every": "7", "keep_best": "loss"}.get(info.name, "other")
    if info.maximum is not None and value == info.maximum:
        return value / 2
    return (value or 0) + (1 if info.type is int else 0.001)


@pytest.mark.parametrize("kind", ["grpo", "mlm"])
def test_options_that_past_steps_depend_on_are_refused_by_name(kind):
    old = spec_class(kind).parse({})
    fixed = set(old.options()) - set(old.changeable)
    must_be_fixed = {"model", "seed", "batch_size", "gradient_accumulation", "weight_decay"}
    assert must_be_fixed < fixed
    for name in fixed:
        value = another(old.options()[name], getattr(old, name))
        with pytest.raises(SpecError, match=f"^{name}: cannot change on resume") as refusal:
            old.revised({name: value})
        assert "--init-from JOB" in str(refusal.value)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["grpo", "mlm"])
def test_options_of_future_steps_may_change(kind):
    measured = {"eval_samples": 4} if kind == "grpo" else {}  # eval_every goes with it
    old = spec_class(kind).parse({"lr_scheduler": "cosine", **measured})
    for name in set(old.changeable) - {"report_to", "time_limit"}:
        value = another(old.options()[name], getattr(old, name))
        assert old.revised({name: value}).changes(old.to_json()) == {
            name: [getattr(old, name), value]
        }


def test_a_refusal_names_the_original_value():
    with pytest.raises(SpecError) as refusal:
        GrpoSpec.parse({"batch_size": 8}).revised({"batch_size": 4})
    assert str(refusal.value) == (
        "batch_size: cannot change on resume (the job began with 8); "
        "start a new job from its weights with --init-from JOB"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"learning_rate": "-1"},
            "learning_rate: must be a number above 0 and at most 1, got '-1'",
        ),
        ({"lerning_rate": "1"}, "lerning_rate: unknown option of grpo; did you mean learning_rate"),
        ({"save_every": "soon"}, "save_every: must be steps"),
        ({"report_to": ["wandb"]}, "report_to: must be installed"),
        ({"steps": "0"}, "steps: must be an integer of at least 1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values, message):
    with pytest.raises(SpecError) as refusal:
        GrpoSpec.parse({}).revised(values)
    assert str(refusal.value).startswith(message)


def test_the_same_value_is_no_change():
    old = GrpoSpec.parse({"batch_size": 4})
    assert old.revised({"batch_size": "4", "reward": ["correctness"], "steps": 80}) == old


def test_unknown_options_of_another_version_are_ignored():
    old = GrpoSpec.parse({})
    options = old.to_json()
    del options["keep"]
    assert old.changes({**options, "of_long_ago": 1}) == {}


# Effects.


@pytest.mark.slow
def test_an_extension_has_the_learning_rates_of_a_run_of_that_length(tmp_path):
    whole = tiny.surroundings(tmp_path / "whole")
    run(spec(steps=6), whole.ctx)
    run(spec(), tiny.surroundings(tmp_path / "run").ctx)
    more = tiny.surroundings(tmp_path / "run")
    run(spec().extended(6), more.ctx)
    assert rates(more) == rates(whole)[3:]
    assert min(rates(more)) > 0
    assert rates(more) == sorted(rates(more), reverse=True)
    [extended] = more.of_type("extended")
    assert (extended["steps_before"], extended["steps_total"]) == (3, 6)
    assert extended["learning_rate"] == rates(more)[0]
    assert extended["learning_rate_before"] == pytest.approx(1e-2 / 3)


def test_another_learning_rate_counts_from_the_next_step_on(tmp_path):
    first = tiny.surroundings(tmp_path)
    first.stop_at_step = 2
    with pytest.raises(Stopped):
        run(spec(steps=4), first.ctx)
    second = tiny.surroundings(tmp_path)
    run(spec(steps=4).revised({"learning_rate": 1e-3}), second.ctx)
    assert rates(first) == pytest.approx([1e-2, 0.75e-2])
    assert rates(second) == pytest.approx([0.5e-3, 0.25e-3])
    [revised] = second.of_type("revised")
    assert revised["changes"] == {"learning_rate": [1e-2, 1e-3]}
    assert revised["message"] == "learning_rate 0.001 (was 0.01)"
    assert second.of_type("extended") == []


def test_an_edited_spec_is_refused_before_the_first_step(tmp_path):
    run(spec(steps=2), tiny.surroundings(tmp_path).ctx)
    again = tiny.surroundings(tmp_path)
    with pytest.raises(SpecError, match=r"^temperature: cannot change on resume"):
        run(spec(steps=4, temperature=0.5), again.ctx)
    assert again.of_type("step") == []


def test_a_job_that_stopped_at_a_step_resumes_as_if_uninterrupted(tmp_path):
    whole = tiny.surroundings(tmp_path / "whole")
    run(spec(steps=4), whole.ctx)
    stopped = tiny.surroundings(tmp_path / "run")
    object.__setattr__(stopped.ctx, "stop_at", 2)
    for _ in range(2):  # killed after that save, it is begun again and has nothing to do
        with pytest.raises(Stopped) as reached:
            run(spec(steps=4), stopped.ctx)
        assert reached.value.step == 2
    rest = tiny.surroundings(tmp_path / "run")
    run(spec(steps=4), rest.ctx)
    assert rates(stopped) + rates(rest) == rates(whole)


# Through the daemon.


@pytest.fixture(scope="module")
def finished(shared_daemon: Daemon) -> str:
    """A job of 6 steps that is finished."""
    job_id = shared_daemon.submit()
    assert shared_daemon.wait(job_id)["status"] == "finished"
    return job_id


@pytest.fixture
def resume(shared_daemon: Daemon, finished: str) -> Callable[..., Any]:
    return lambda *words: warmd("resume", finished, *words, home=shared_daemon.home.path)


def test_a_finished_job_of_the_same_length_is_not_changed(shared_daemon, finished, resume):
    spec_file = shared_daemon.client.rundir(finished).path / "spec.json"
    before = spec_file.read_bytes()
    for words in ((), ("--steps", "6")):
        assert resume(*words).out == f"{finished} finished\n"
    for words in (("--learning-rate", "1"), ("--set", "keep=2")):
        refusal = resume(*words)
        assert refusal.is_refusal(2)
        assert "is finished" in refusal.err
    assert spec_file.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "num_generations=4"), "num_generations: cannot change on resume"),
        (("--set", "nothing=4"), "nothing: unknown option"),
        (("--set", "steps"), "set: must be KEY=VALUE"),
        (("--steps", "5"), "steps: must be at least 6, its latest checkpoint, got 5"),
        (("--steps", "many"), "steps: must be an integer"),
        (("--learning-rate", "fast"), "learning_rate: must be a number above 0"),
        (("--save-every", "0"), "save_every: must be steps"),
    ],
)
def test_impossible_changes_are_refused_at_the_command_line(
    shared_daemon, finished, resume, words, message
):
    refusal = resume(*words)
    assert refusal.is_refusal(2)
    assert refusal.err.startswith(f"Error: {message}")
    assert shared_daemon.client.jobs.get(finished)["status"] == "finished"


def test_changes_take_effect_and_are_recorded(shared_daemon):
    job_id = shared_daemon.submit(keep=100, learning_rate=1e-3)
    shared_daemon.wait(job_id)
    words = ("--steps", "9", "--learning-rate", "2e-3", "--save-every", "1", "--set", "keep=99")
    done = warmd("resume", job_id, *words, home=shared_daemon.home.path)
    assert done.out == f"{job_id} queued\n"
    assert shared_daemon.wait(job_id)["result"]["steps"] == 9
    changes = {
        "steps": [None, 9],
        "learning_rate": [1e-3, 2e-3],
        "save_every": ["2", "1"],
        "keep": [100, 99],
    }
    [revised] = shared_daemon.events(job_id, "revised")
    assert revised["changes"] == changes
    document = shared_daemon.client.rundir(job_id).read_spec()
    assert [r["changes"] for r in document["revisions"]] == [changes]
    assert document["revisions"][0]["revision"] == document["revision"]
    saved = [event["step"] for event in shared_daemon.events(job_id, "checkpoint")]
    assert saved[-3:] == [7, 8, 9]
    steps = shared_daemon.events(job_id, "step")
    assert [event["step"] for event in steps] == list(range(1, 10))
    assert steps[6]["learning_rate"] == pytest.approx(2e-3 * 3 / 9)


@pytest.mark.slow
def test_one_of_two_simultaneous_resumes_succeeds(shared_daemon, finished):
    (shared_daemon.folder / "gate").touch()
    job_id = shared_daemon.submit(reward="behaviours:gated", samples=12)
    shared_daemon.client.jobs.cancel(job_id)
    (shared_daemon.folder / "gate").unlink()
    shared_daemon.wait(job_id)
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def resume(steps: int) -> None:
        client = Client(shared_daemon.config)
        barrier.wait()
        try:
            outcomes.append(client.jobs.resume(job_id, changes={"steps": steps}))
        except Conflict as conflict:
            outcomes.append(str(conflict))
        finally:
            client.close()

    threads = [threading.Thread(target=resume, args=(20 + n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("queued") == 1
    assert all("nothing to resume" in outcome for outcome in outcomes if outcome != "queued")
    document = shared_daemon.client.rundir(job_id).read_spec()
    assert len(document["revisions"]) == 1
    result = shared_daemon.wait(job_id)["result"]
    assert result["steps"] == document["spec"]["steps"]


def test_a_spec_edited_by_hand_fails_by_name_and_the_checkpoints_stay(shared_daemon):
    job_id = shared_daemon.submit(samples=4)
    shared_daemon.wait(job_id)
    rundir = shared_daemon.client.rundir(job_id)
    checkpoints = sorted(os.listdir(rundir.checkpoints))
    document = orjson.loads((rundir.path / "spec.json").read_bytes())
    document["spec"] |= {"steps": 8, "temperature": 0.5}
    document["revision"] += 1
    Path(rundir.path / "spec.json").write_bytes(orjson.dumps(document))
    with pytest.raises(Conflict, match="changed by hand: then remove its digest"):
        rundir.read_spec()
    del document["digest"]
    Path(rundir.path / "spec.json").write_bytes(orjson.dumps(document))
    assert shared_daemon.client.jobs.resume(job_id) == "queued"
    job = shared_daemon.wait(job_id)
    assert job["status"] == "failed"
    assert job["error"].startswith("temperature: cannot change on resume (the job began with 1.0)")
    assert sorted(os.listdir(rundir.checkpoints)) == checkpoints


# The code of rewards.


@pytest.mark.slow
def test_a_resume_with_changed_reward_code_warns_and_strict_refuses(sturdy, tmp_path):
    code = "def f(p, c, a):\n    return [len(text) / {} for text in c]\n"
    (tmp_path / "mine.py").write_text(code.format(10))
    job = sturdy.submit("mine:f", folder=tmp_path, samples=4, save_every=1)
    assert sturdy.wait(job)["status"] == "finished"
    command = ("resume", job, "--steps", "6")
    (tmp_path / "mine.py").write_text(code.format(20))
    refused = warmd(*command, "--strict", home=sturdy.home.path)
    assert (refused.code, refused.out) == (2, "")
    assert (
        f"reward: changed since the latest checkpoint of {job}: {tmp_path}/mine.py" in refused.err
    )
    done = warmd(*command, home=sturdy.home.path)
    assert done.code == 0
    assert f"{tmp_path}/mine.py changed since the latest checkpoint" in done.err
    assert sturdy.wait(job)["status"] == "finished"
    [warning] = sturdy.events(job, "warning")
    assert warning["files"] == [f"{tmp_path}/mine.py"]
    assert "changed since checkpoint-4" in warning["message"]
