"""Evaluations in a daemon: killed and resumed, compared, ranked, and by the commands."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest
from daemons import Daemon
from shell import warmd
from waiting import wait_until

from warmd.daemon.lifecycle.queueing import Queueing
from warmd.jobs import spec_class
from warmd.jobs.errors import SpecError

GAMES = Path(__file__).parents[1] / "environments"
SLOW = {"repeats": 16, "temperature": 1.0, "max_tokens": 40, "samples": 40}


def spec(**options: Any) -> Any:
    return spec_class("eval").parse({"model": "tiny", **options})


def rows(daemon: Daemon, job_id: str) -> list[dict[str, Any]]:
    """The whole rows: of a job that runs, the last line may be in the file in part."""
    path = daemon.home.runs / job_id / "rows.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [orjson.loads(line) for line in lines if line.endswith(b"\n")]


@pytest.mark.nightly(
    part="episodes", catches="a killed evaluation that loses, repeats or changes a row"
)
def test_a_killed_evaluation_resumes_at_its_row_and_equals_an_uninterrupted_one(
    shared_daemon: Daemon,
):
    daemon = shared_daemon
    straight = daemon.client.jobs.submit(spec(**SLOW))
    wanted = daemon.wait(straight, timeout_s=120)["result"]
    killed = daemon.client.jobs.submit(spec(**SLOW))

    def has_begun() -> dict[str, Any] | None:
        started = daemon.events(killed, "started")
        return started[-1] if len(rows(daemon, killed)) >= 10 else None

    os.kill(wait_until(has_begun)["pid"], signal.SIGKILL)
    job = daemon.wait(killed, timeout_s=120)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert job["result"]["metrics"] == wanted["metrics"]
    assert rows(daemon, killed) == rows(daemon, straight)
    assert [row["row"] for row in rows(daemon, killed)] == list(range(1, 41))
    assert job["result"]["timings"]["questions"] <= 30
    assert {row["weights"] for row in rows(daemon, killed)} == {wanted["weights"]["digest"]}


def test_the_second_model_is_compared_with_the_first_and_both_are_ranked(
    shared_daemon: Daemon, tmp_path: Path
):
    home = shared_daemon.home.path
    copy = tmp_path / "other"
    shutil.copytree(shared_daemon.config.models[0].path, copy)
    data = tmp_path / "sums.jsonl"
    data.write_bytes(
        b"".join(b'{"prompt": "%d+1=", "answer": "%d"}\n' % (n, n + 1) for n in range(12))
    )
    # Other questions from the same data, in the same home.
    played = warmd(
        *("eval", "tiny", "--environment", "games:Digits", "--dataset", str(data)),
        *("--max-turn-length", "4", "--max-turns", "1", "--json"),
        home=home,
        folder=GAMES,
    )
    assert played.code == 0, played.err
    done = warmd(
        *("eval", "tiny", str(copy), "--dataset", str(data), "--max-tokens", "4", "--json"),
        home=home,
    )
    assert done.code == 0, done.err
    first, second = done.objects
    assert (first["comparison"], second["against"]) == (None, first["job"])
    found = second["comparison"]["reward"]
    assert (found["n"], found["difference"]) == (12, 0)
    assert found["words"] == "undecided: no difference on 12 questions"
    text = warmd("eval", "tiny", "--dataset", str(data), "--samples", "3", home=home)
    assert text.code == 0, text.err
    assert text.out.startswith("MODEL  METRIC")
    assert "report.md" in text.err
    other_name = tmp_path / "copy.jsonl"
    other_name.write_bytes(data.read_bytes())
    entries = warmd(
        "jobs", "--kind", "eval", "--best", str(other_name), "--json", home=home
    ).objects
    assert [(entry["rank"], entry["n"], entry["job"]) for entry in entries] == [
        (1, 12, played.objects[0]["job"]),
        (1, 12, first["job"]),
        (2, 12, second["job"]),
        (1, 3, entries[3]["job"]),
    ]
    assert entries[1]["against_best"] is None
    assert entries[2]["against_best"]["verdict"] == "undecided"
    unknown = warmd("jobs", "--kind", "eval", "--best", str(tmp_path / "none.jsonl"), home=home)
    assert unknown.is_refusal(2)
    jobs = warmd("jobs", "--json", home=home).objects
    assert first["job"] in [job["id"] for job in jobs]


def test_tables_count_completions_without_a_score(
    shared_daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = shared_daemon.home.path
    (tmp_path / "partly.py").write_text(
        "def odd(completions, number, **keywords):\n    return [n % 2 or None for n in number]\n"
    )
    data = tmp_path / "numbers.jsonl"
    data.write_bytes(b"".join(b'{"prompt": "%d", "number": %d}\n' % (n, n) for n in range(1, 8)))
    monkeypatch.chdir(tmp_path)
    how = ("--dataset", str(data), "--reward", "partly:odd", "--max-tokens", "2")
    table = warmd("eval", "tiny", *how, home=home)
    assert table.code == 0, table.err
    assert "4 (unscored: 3 of 7)" in table.out
    assert (
        "4 (unscored: 3 of 7)"
        in warmd("jobs", "--kind", "eval", "--best", str(data), home=home).out
    )
    (entry,) = warmd("jobs", "--kind", "eval", "--best", str(data), "--json", home=home).objects
    assert (entry["n"], entry["unscored"], entry["completions"]) == (4, 3, 7)


def test_nothing_is_queued_if_one_model_is_refused(shared_daemon: Daemon):
    before = len(shared_daemon.client.jobs.all())
    done = warmd("eval", "tiny", "./nowhere", "--samples", "2", home=shared_daemon.home.path)
    assert done.is_refusal(2)
    assert done.err.startswith("Error: model: must be a model folder, got")
    assert len(shared_daemon.client.jobs.all()) == before


def test_a_comparison_waits_for_the_job_that_it_names(shared_daemon: Daemon):
    client = shared_daemon.client
    first = client.jobs.submit(spec(samples=30, max_tokens=4))
    second = client.jobs.submit(spec(samples=30, max_tokens=4, against=first))
    job = shared_daemon.wait(second)
    assert (job["status"], job["result"]["against"]) == ("finished", first)
    answer = client.jobs.submit(spec_class("infer").parse({"prompt": "1", "model": "tiny"}))
    later = client.jobs.submit(spec(samples=2), Queueing(delay_s=3600))
    with pytest.raises(SpecError, match=f"after: must be {later}, which is still to end, got inf"):
        client.jobs.submit(spec(against=later), Queueing(after=answer))
    client.jobs.cancel(later)
    with pytest.raises(SpecError, match="against: must be a job of kind eval, got infer-"):
        client.jobs.submit(spec(against=answer))


def test_an_evaluation_has_a_name_and_tags(shared_daemon):
    home = shared_daemon.home.path
    how = ("--samples", "2", "--name", "named-eval", "--tag", "t")
    refused = warmd("eval", "tiny", "demo", *how, home=home)
    assert refused.err == "Error: name: must go with one model, got 2: --tag marks them all\n"
    (done,) = warmd("eval", "tiny", *how, "--json", home=home).objects
    (shown,) = warmd("show", "named-eval", "--json", home=home).objects
    assert (shown["id"], shown["tags"]) == (done["job"], ["t"])
