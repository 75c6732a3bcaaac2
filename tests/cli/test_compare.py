"""`warmd compare`: the model before and after a training, with a real daemon."""

from __future__ import annotations

import pytest
from daemons import Daemon
from shell import Done, warmd

from warmd.cli.commands import compare as compare_command
from warmd.daemon.lifecycle.view import JobFilter
from warmd.jobs import spec_class


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Daemon:
    return shared_daemon


@pytest.fixture(scope="module")
def trained(daemon: Daemon) -> str:
    """A job that moved its model far."""
    job_id = daemon.submit(reward="behaviours:length", learning_rate=0.05)
    assert daemon.wait(job_id)["status"] == "finished"
    return job_id


def compare(daemon: Daemon, *arguments: str) -> Done:
    return warmd(
        "compare", "--temperature", "0", "--max-tokens", "12", *arguments, home=daemon.home.path
    )


def text_of(daemon: Daemon, model: str, prompt: str) -> str:
    """The output of `warmd run`."""
    done = warmd(
        "run", "--model", model, "--temperature", "0", "--max-tokens", "12", prompt,
        home=daemon.home.path,
    )  # fmt: skip
    assert done.code == 0
    return done.out


def test_compare_gives_the_completions_that_each_model_gives_alone(daemon, trained):
    done = compare(daemon, "--json", trained, "1+1=", "2+2=")
    assert done.code == 0
    assert [row["prompt"] for row in done.objects] == ["1+1=", "2+2="]
    for row in done.objects:
        assert row["base"]["model"] == "tiny"
        assert row["trained"]["model"] == trained
        for side, model in (("base", "tiny"), ("trained", trained)):
            assert text_of(daemon, model, row["prompt"]).rstrip("\n") == row[side]["text"].rstrip()
        assert row["base"]["text"] != row["trained"]["text"]


@pytest.mark.slow
def test_compare_takes_a_checkpoint_and_reuses_loaded_models(daemon, trained):
    done = compare(daemon, "--json", f"{trained}@2", "1+1=")
    assert done.objects[0]["trained"]["model"] == f"{trained}@2"
    loaded = {model["name"]: model["loaded_at"] for model in daemon.status()["models"]}
    assert {"tiny", f"{trained}@2"} <= set(loaded)
    again = compare(daemon, "--json", f"{trained}@2", "1+1=")
    assert again.objects[0]["trained"]["text"] == done.objects[0]["trained"]["text"]
    for model in daemon.status()["models"]:
        assert model["loaded_at"] == loaded.get(model["name"], model["loaded_at"])


def test_same_seed_and_weights_give_the_same_text(daemon, trained):
    first, second = (
        warmd(
            "compare", trained, "1+1=", "--json", "--max-tokens", "12", "--seed", "5",
            home=daemon.home.path,
        ).objects[0]
        for _ in range(2)
    )  # fmt: skip
    assert first["seed"] == second["seed"] == 5
    for side in ("base", "trained"):
        assert first[side]["text"] == second[side]["text"]


def test_table_shows_both_side_by_side(daemon, trained):
    done = compare(daemon, trained, "1+1=")
    prompt, names, *_ = done.out.splitlines()
    assert prompt == "> 1+1="
    assert names.split() == ["tiny", trained]


def test_two_models_are_compared_by_name(daemon, trained):
    done = compare(daemon, "--json", trained, "tiny", "1+1=")
    (row,) = done.objects
    assert (row["base"]["model"], row["trained"]["model"]) == (trained, "tiny")
    alone = compare(daemon, "tiny", "1+1=")
    assert alone.is_refusal(2)
    assert "warmd compare tiny MODEL PROMPT" in alone.err


def test_a_prompt_alone_is_no_model(daemon, trained):
    (row,) = compare(daemon, "--json", trained, "tiny").objects
    assert (row["prompt"], row["trained"]["model"]) == ("tiny", trained)


def test_compare_refuses_a_job_without_training(daemon, trained):
    (row,) = compare(daemon, "--json", trained, "1+1=").objects
    assert compare(daemon, row["base"]["job"], "1+1=").is_refusal(2)
    assert compare(daemon, f"{trained}@77", "1+1=").is_refusal(2)


@pytest.mark.slow
def test_without_an_id_it_is_the_latest_training_and_not_the_latest_job(daemon):
    latest = daemon.submit(reward="behaviours:length")
    assert daemon.wait(latest)["status"] == "finished"
    requested = warmd("run", "--model", "tiny", "--max-tokens", "1", "1+1=", home=daemon.home.path)
    assert requested.code == 0
    (row,) = compare(daemon, "--json", "-", "1+1=").objects
    assert row["trained"]["model"] == latest


def test_compare_refuses_prompts_before_any_of_them_is_queued(daemon, trained):
    before = len(daemon.client.jobs.all(JobFilter(limit=None)))
    done = compare(daemon, trained, "1+1=", "1" * 100)
    assert done.is_refusal(2)
    assert "prompt: must have at most 52 tokens" in done.err
    assert len(daemon.client.jobs.all(JobFilter(limit=None))) == before


def test_compare_reports_a_failed_completion_and_shows_the_other(daemon, capsys):
    spec = spec_class("infer").parse({"prompts": "[[9999]]", "model": "tiny"})
    job_id = daemon.client.jobs.submit(spec)
    failed = compare_command._answer(daemon.client, job_id)
    assert (failed["status"], failed["text"]) == ("failed", None)
    compare_command._print(["tiny", "other"], [("1+1=", failed, {"text": "2"})])
    shown = capsys.readouterr()
    assert "token 9999 is not among the" in shown.err
    assert "(no answer)" in shown.out
    assert shown.out.splitlines()[3].endswith("2")
