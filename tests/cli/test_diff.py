"""`warmd diff` and `warmd show --source`, with a real Redis."""

from warmd.daemon.runs import source


def test_diff_shows_options_data_code_and_results_that_differ_and_nothing_else(desk, tmp_path):
    data = tmp_path / "rows.jsonl"
    ids = []
    for rate, reward, prompt in (("1e-4", 0.25, "a"), ("2e-4", 0.5, "b")):
        rows = [f'{{"prompt": "{prompt} {n}", "answer": "1"}}\n' for n in range(8)]
        data.write_text("".join(rows))
        ids.append(desk.submit("--dataset", str(data), "--learning-rate", rate))
        run = desk.begin()
        rundir = desk.client.rundir(ids[-1])
        rundir.write_result({"steps": 4, "metrics": {"reward": reward}}, revision=1)
        run.finish({"steps": 4, "metrics": {"reward": reward}})
    found = desk.rows("diff", *ids)
    differences = {(d["section"], d["name"]): (d["one"], d["other"]) for d in found}
    assert differences.pop(("data", "dataset"))
    assert differences == {
        ("options", "learning_rate"): (0.0001, 0.0002),
        ("result", "metrics.reward"): (0.25, 0.5),
    }
    lines = desk.warmd("diff", *ids).out.splitlines()
    assert lines[0].split() == ["IN", "WHAT", *ids]
    assert lines[1].split() == ["options", "learning_rate", "0.0001", "0.0002"]


def test_diff_of_a_job_with_itself_is_empty(desk):
    job_id = desk.submit()
    done = desk.warmd("diff", job_id, job_id)
    assert (done.code, done.out, done.err) == (0, "", "nothing differs\n")


def test_show_source_names_folder_versions_and_the_copy_of_each_module(desk):
    job_id = desk.submit()
    rundir = desk.client.rundir(job_id)
    source.record_execution(rundir, 1)
    [shown] = desk.rows("show", job_id, "--source")
    assert shown["folder"]
    assert "torch" in shown["executions"][0]["versions"]
    assert "versions" in desk.warmd("show", job_id, "--source").out


def test_show_source_of_a_job_of_an_earlier_version_is_one_line(desk):
    job_id = desk.submit()
    (desk.client.rundir(job_id).path / "source" / "source.json").unlink()
    done = desk.warmd("show", job_id, "--source")
    assert done.is_refusal(2)
    assert desk.warmd("diff", job_id, job_id).code == 0


def test_jobs_are_shown_by_their_names_and_with_ids_where_two_have_the_same(desk):
    ids = []
    for name, rate in (("slow", "1e-4"), ("fast", "2e-4"), ("slow", "3e-4")):
        ids.append(desk.submit("--name", name, "--learning-rate", rate))
        run = desk.begin()
        run.step(1)
        run.step(2)
        run.finish({"steps": 2})
    one, other, same = ids
    head = desk.warmd("diff", one, other).out.splitlines()[0]
    assert head.split() == ["IN", "WHAT", "slow", "fast"]
    head = desk.warmd("diff", one, same).out.splitlines()[0]
    assert head.split() == ["IN", "WHAT", "slow", one, "slow", same]
    drawn = desk.warmd("plot", one, other, "--metric", "loss").out
    assert "slow  0.5 at step 2" in drawn
    assert "fast  0.5 at step 2" in drawn
    assert one not in drawn
