"""`submit --dry-run`: estimates from earlier jobs, from limits of this machine, and computed."""

import orjson
import pytest
from shell import warmd

from warmd.cli.view.render import moment
from warmd.configs.config import load
from warmd.daemon.host.home import Home
from warmd.jobs.bench.floor import HARDWARE, Limits, ModelSize, StepWork, step_work
from warmd.jobs.sft.options import SftSpec

SIZE = ModelSize(
    parameters=1000, trained=1000, layers=2, hidden_size=10, intermediate_size=20, vocab_size=30
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home whose machine has been measured: 1 GFLOPS and 1 GB/s."""
    made = Home(tmp_path / "home")
    made.create()
    made.machine_limits.parent.mkdir()
    made.machine_limits.write_text('{"flops": 1e9, "bytes_s": 1e9, "device": "cpu"}')
    monkeypatch.chdir(tmp_path)
    return made


def test_the_floor_counts_gemms_memory_traffic_and_kernel_starts():
    work = StepWork(learned=100, scored=50, passes=1, pass_tokens=100, decoded=7)
    limits = Limits(flops=1000, bytes_s=100, memory_bytes=1, layer_s=0.5)
    head = 30 * 10
    products = 6 * (100 * (1000 - head) + 50 * head) / 1000
    traffic = (4 * 1000 * 7 + 28 * 1000) / 100
    starts = 2 * 0.5 * (3 + 7)
    assert work.floor_s(SIZE, limits) == pytest.approx(products + traffic + starts)


def test_training_memory_is_sixteen_bytes_per_parameter_and_activations():
    work = StepWork(learned=100, scored=100, passes=1, pass_tokens=8)
    per_token = 4 * 2 * (12 * 10 + 5 * 20) + 12 * 30
    assert work.memory_bytes(SIZE) == (16_000, 16_000 + 8 * per_token)


def test_a_lora_adapter_needs_moments_of_its_own_weights_only():
    config = {"num_hidden_layers": 2, "hidden_size": 10, "intermediate_size": 20, "vocab_size": 30}
    size = ModelSize.of(config, 100_000, lora=4)
    assert size is not None
    assert size.trained == 4 * 2 * (4 * 2 * 10 + 3 * (10 + 20))
    work = StepWork(learned=1, scored=1, passes=1, pass_tokens=0)
    assert work.memory_bytes(size)[0] == 16 * size.trained + 4 * 100_000


def test_the_tokens_of_a_step_are_those_of_its_records(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "one two", "completion": " three"}\n' * 20)
    spec = SftSpec.parse({"dataset": str(data), "batch_size": 4}).located(tmp_path)
    found = step_work(spec, lambda text: len(text.split()))
    assert found is not None
    assert found[0].learned == 4 * 3


def test_without_a_similar_job_time_is_computed_from_the_measured_limits(home):
    words = ("submit", "grpo", "--samples", "80", "--dry-run")
    found = warmd(*words, "--json", home=home.path).objects[0]["estimate"]
    assert found["seconds"]["source"] == "computed"
    assert 0 < found["seconds"]["low"] < found["seconds"]["value"] < found["seconds"]["high"]
    assert (found["steps"], found["jobs"]) == (80, [])
    assert [one["name"] for one in found["hardware"]] == [one.name for one in HARDWARE]
    assert {one["seconds"]["source"] for one in found["hardware"]} == {"computed"}
    out = warmd(*words, home=home.path).out
    assert "computed by the floor model" in out
    assert "computed from published rates and not measured" in out
    assert "# memory: " in out
    assert "# records: 80 of arithmetic, 1 epoch" in out
    assert list(home.runs.iterdir()) == []


def test_with_similar_jobs_time_memory_and_disk_are_theirs(desk):
    desk.submit()
    run = desk.begin()
    for step in (1, 2, 3, 4):
        run.step(step)
    run.log.emit("checkpoint", step=4, bytes=1000, seconds=0.1, blocked_s=0.0)
    run.log.emit("finished", result={}, peak_bytes=7_000_000)
    desk.submit("--num-generations", "4")  # another geometry
    found = desk.rows(*desk.grpo, "--samples", "400", "--dry-run")[0]["estimate"]
    assert found["jobs"] == [run.id]
    assert found["seconds"]["source"] == "measured"
    assert found["seconds"]["value"] == pytest.approx(400 * found["step_s"], rel=0.5)
    assert (found["peak_bytes"]["source"], found["peak_bytes"]["value"]) == ("measured", 7_000_000)
    assert found["disk_bytes"]["low"] == 3 * 1000
    assert found["hardware"] == []  # the model has no weights to compute from
    [like] = desk.rows("submit", "--like", run.id, "--dry-run")
    assert (like["kind"], like["estimate"]["steps"]) == ("grpo", 4)


@pytest.mark.slow
def test_jobs_with_other_data_are_used_with_a_note(desk, tmp_path):
    desk.submit()
    run = desk.begin()
    for step in (1, 2, 3):
        run.step(step)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"prompt": "{n}", "answer": "1"}}\n' for n in range(8)))
    words = (*desk.grpo[:4], "--dataset", str(other), "--samples", "8", "--dry-run")
    assert f"as in {run.id}, which had other data" in desk.warmd(*words).out


@pytest.mark.slow
def test_a_machine_is_measured_once_with_a_note(tmp_path):
    words = ("submit", "grpo", "--samples", "80", "--dry-run")
    done = warmd(*words, home=tmp_path / "home")
    assert "measuring the speed of this machine" in done.err
    again = warmd(*words, home=tmp_path / "home")
    assert again.err == ""
    stored = load(home=tmp_path / "home", environ={}).home
    [path] = (stored / "cache").glob("limits-*.json")
    speed = orjson.loads(path.read_bytes())
    assert speed["flops"] > 1e6
    assert f"(measured {moment(speed['measured_at'])} at load " in done.out
    path.write_bytes(orjson.dumps({**speed, "flops": 1e18}))
    later = warmd(*words, "--measure", home=tmp_path / "home")
    assert "measuring the speed of this machine" in later.err
    kept = orjson.loads(path.read_bytes())
    assert kept["flops"] == 1e18
    assert kept["measured_at"] > speed["measured_at"]


def test_measure_goes_with_dry_run_only(home):
    assert warmd("submit", "grpo", "--measure", home=home.path).is_refusal(2)
