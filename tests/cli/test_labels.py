"""Names, tags and notes of jobs, with a real Redis."""

import pytest
from breadth import mostly_slow

from warmd.daemon.runs import labels
from warmd.daemon.runs.labels import Labels
from warmd.daemon.runs.rundir import RunDir


def test_a_job_with_a_name_and_tags_is_found_by_them(desk):
    plain = desk.submit()
    one = desk.submit("--name", "lr-3e-4", "--tag", "sweep", "--tag", "gsm8k")
    two = desk.submit("--name", "lr-1e-3", "--tag", "sweep")
    assert [job["id"] for job in desk.rows("jobs")] == [two, one, plain]
    assert [job["id"] for job in desk.rows("jobs", "--tag", "sweep")] == [two, one]
    assert [job["id"] for job in desk.rows("jobs", "--tag", "sweep", "--tag", "gsm8k")] == [one]
    assert [job["id"] for job in desk.rows("jobs", "--name", "lr-*")] == [two, one]
    assert [job["id"] for job in desk.rows("jobs", "--name", "lr-3e-4")] == [one]
    assert desk.rows("jobs", "--tag", "sweep", "--status", "failed") == []
    assert [desk.rows("show", "lr-3e-4")[0][key] for key in ("id", "name", "tags")] == [
        one,
        "lr-3e-4",
        ["sweep", "gsm8k"],
    ]
    assert "lr-3e-4 #sweep #gsm8k" in desk.warmd("jobs").out
    assert "lr-1e-3 #sweep" in desk.warmd("queue").out


def test_tables_of_jobs_without_labels_have_no_column_for_them(desk):
    desk.submit()
    assert "NAME" not in desk.warmd("jobs").out + desk.warmd("queue").out


def test_the_id_of_a_group_is_no_label_of_its_jobs(desk):
    done = desk.warmd(*desk.grpo, "--name", "rates", "--sweep", "learning_rate=1e-5,1e-4")
    sweep_id = done.out.split()[0]
    out = desk.warmd("jobs", "--tag", sweep_id).out
    assert "rates/1" in out
    assert f"#{sweep_id}" not in out


def test_jobs_are_filtered_by_labels_while_no_daemon_runs(desk):
    desk.submit()
    one = desk.submit("--tag", "sweep")
    desk.server.stop()
    assert [job["id"] for job in desk.rows("jobs", "--tag", "sweep")] == [one]


def test_a_name_of_several_jobs_is_refused_as_a_job(desk):
    ids = [desk.submit("--name", "twice"), desk.submit("--name", "twice")]
    done = desk.warmd("cancel", "twice")
    assert done.is_refusal(2)
    assert done.err.startswith("Error: job: 'twice' is the name of 2 jobs: ")
    assert all(job_id in done.err for job_id in ids)


@pytest.mark.parametrize("option", ["--name", "--tag"])
@pytest.mark.parametrize(
    "text",
    mostly_slow(
        ["", "-x", "a b", "x" * 65, "\x1b[31mred", "a\nb", "*", "\u202ea"], but=["", "\x1b[31mred"]
    ),
)
def test_a_name_or_tag_that_no_terminal_should_show_is_refused(desk, option, text):
    done = desk.warmd(*desk.grpo, f"{option}={text}")
    assert done.is_refusal(2)
    assert done.err.startswith(f"Error: {option[2:]}: must be 1 to 64 letters")
    assert desk.rows("queue") == []


def test_a_name_must_not_be_a_job_id(desk):
    done = desk.warmd(*desk.grpo, "--name", "grpo-20261121-184200-x7f2")
    assert done.is_refusal(2)


def test_tables_show_a_model_of_a_job_by_its_name(desk):
    first = desk.train()
    labels.write(RunDir(desk.home.runs / first), Labels(name="first"))
    branch = desk.submit_branch("first")
    assert desk.rows("queue")[0]["model"] == first
    for command in ("jobs", "queue"):
        [line] = [one for one in desk.warmd(command).out.splitlines() if branch in one]
        assert " first " in line
        assert first not in line
    desk.warmd("rm", first)


def test_notes_are_kept_with_their_time_and_shown(desk):
    job_id = desk.submit()
    assert desk.warmd("show", job_id, "--note", "plateau after 40 steps").code == 0
    assert desk.warmd("show", job_id, "--note", "next: half the rate\nand more data").code == 0
    [shown] = desk.rows("show", job_id)
    assert [note["text"] for note in shown["notes"]] == [
        "plateau after 40 steps",
        "next: half the rate\nand more data",
    ]
    lines = [one for one in desk.warmd("show", job_id).out.splitlines() if one[:5] == "note "]
    assert [line.rsplit("  ", 1)[1] for line in lines] == [
        "plateau after 40 steps",
        "next: half the rate and more data",
    ]


@pytest.mark.parametrize(
    "text", mostly_slow(["", " ", "x" * 2001, "\x1b[31mred"], but=["\x1b[31mred"])
)
def test_a_note_that_no_terminal_should_show_is_refused(desk, text):
    job_id = desk.submit()
    done = desk.warmd("show", job_id, "--note", text)
    assert done.is_refusal(2)
    assert done.err.startswith("Error: note: must be 1 to 2000 printable characters")


@pytest.mark.slow
def test_damaged_labels_count_as_none(desk):
    job_id = desk.submit("--name", "good")
    for damage in ("", "[1]", '{"name": 3, "tags": {"a": 1}, "notes": [{"time": 1}]}'):
        (desk.home.runs / job_id / "labels.json").write_text(damage)
        [shown] = desk.rows("show", job_id)
        assert (shown["name"], shown["tags"], shown["notes"]) == (None, [], [])


def test_a_job_like_another_has_its_options_and_those_given(desk):
    first = desk.submit("--learning-rate", "1e-4", "--name", "base")
    done = desk.warmd("submit", "--like", "base", "--set", "learning_rate=2e-4", "--name", "next")
    assert done.code == 0, done.err
    specs = [desk.client.rundir(j).read_spec()["spec"] for j in (first, done.out.strip())]
    assert specs[1] == {**specs[0], "learning_rate": 2e-4}
    assert desk.rows("show", "next")[0]["kind"] == "grpo"
    again = desk.warmd("submit", "grpo", "--like", first, "--learning-rate", "3e-4", "--json")
    assert again.code == 0, again.err


def test_a_job_like_one_of_another_kind_is_refused(desk):
    job_id = desk.submit()
    done = desk.warmd("submit", "mlm", "--like", job_id)
    assert done.is_refusal(2)
    assert done.err == f"Error: like: must be a mlm job, got {job_id}\n"
