"""`warmd plot`: the curves of a job's events, without Redis."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given, strategies as st
from needs import needs
from shell import Done, warmd
from terminal import seen_on_a_terminal

from warmd.cli.view.chart import MARKERS, chart
from warmd.daemon.host.home import Home
from warmd.daemon.runs.curves import chosen, curves_of
from warmd.daemon.runs.events import EventLog
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.errors import Conflict, SpecError


def run_dir(home: Path, losses: list[float | None], kind: str = "grpo", **fields: Any) -> str:
    """The run directory of a job that trained so; returns its id."""
    Home(home).create()
    rundir = RunDir.create(Home(home).runs, kind, {"spec": {}})
    with EventLog(rundir.events, execution=1) as log:
        for step, loss in enumerate(losses, start=1):
            log.emit("step", step=step, steps_total=9, loss=loss, **fields)
            log.emit("eval", step=step, phase="during", reward=step / 10)
    return rundir.path.name


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def plot(home: Path, *arguments: str) -> Done:
    return warmd("plot", *arguments, home=home)


def test_the_latest_jobs_loss_and_reward_are_drawn_with_numbers_on_both_axes(home):
    run_dir(home, [4.0, 3.0, 2.0, 1.0], reward=0.5)
    done = plot(home)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    heads = [line.split()[0] for line in lines if " at step " in line]
    assert heads == ["loss", "reward", "eval_reward"]
    assert lines[0].startswith("loss  1 at step 4  grpo-")
    assert lines[1].startswith("4.00 ┤⠉")
    assert lines[13].startswith("1.00 ┤")
    assert lines[14].split() == ["1", "2", "4"]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.out


def test_without_a_job_the_latest_training_is_drawn_even_after_a_completion(home):
    trained = run_dir(home, [4.0, 3.0, 2.0, 1.0])
    requested = run_dir(home, [], kind="infer")
    assert f"at step 4  {trained}" in plot(home).out
    assert f"at step 4  {trained}" in plot(home, "-").out
    assert "no step has ended yet" in plot(home, requested).err


def test_plotting_needs_no_redis_and_changes_nothing(home):
    run_dir(home, [2.0, 1.0])
    before = sorted(home.rglob("*"))
    assert plot(home).code == 0
    assert sorted(home.rglob("*")) == before


def test_json_has_one_curve_per_line(home):
    job = run_dir(home, [2.0, None, 1.0], rewards={"math": 0.25})
    done = plot(home, "--json", "--metric", "loss", "--metric", "rewards.math")
    assert done.objects == [
        {"job": job, "metric": "loss", "steps": [1, 3], "values": [2.0, 1.0]},
        {"job": job, "metric": "rewards.math", "steps": [1, 2, 3], "values": [0.25] * 3},
    ]


def test_several_jobs_in_one_chart_are_distinguishable_without_color(home):
    first, second = run_dir(home, [4.0, 1.0]), run_dir(home, [1.0, 4.0])
    lines = plot(home, first, second, first, "--metric", "loss").out.splitlines()
    assert lines[0] == "loss"
    assert lines[1].startswith("4.00 ┤o")
    assert lines[1].endswith("x")
    assert lines[-2:] == [f"o {first}  1 at step 2", f"x {second}  4 at step 2"]


@pytest.mark.slow
def test_on_a_terminal_the_chart_fits_its_width_and_has_colors(home):
    run_dir(home, [3.0, 2.0])
    # A size that the terminal does not say itself comes from COLUMNS.
    seen = seen_on_a_terminal("plot", WARMD_HOME=str(home), COLUMNS="44")
    assert "\x1b[36m" in seen
    widths = [len(line) for line in click.unstyle(seen).split("\r\n")]
    assert max(widths) == 44


@pytest.mark.slow
def test_a_png_file_is_written_atomically(home, tmp_path):
    needs(find_spec("matplotlib"), "matplotlib")
    job, other = run_dir(home, [3.0, 2.0]), run_dir(home, [3.0, 1.0])
    image = tmp_path / "curves.png"
    done = plot(home, job, other, "--png", str(image))
    assert (done.code, done.out, done.err) == (0, "", f"wrote {image}\n")
    assert image.read_bytes().startswith(b"\x89PNG\r\n")
    done = plot(home, "--png", str(tmp_path / "nowhere" / "x.png"))
    assert done.is_refusal(1)


@pytest.mark.slow
def test_without_matplotlib_a_png_is_refused_with_what_to_install(home, tmp_path):
    run_dir(home, [3.0, 2.0])
    # An interpreter without matplotlib.
    script = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from warmd.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "plot", "--home", home, "--png", tmp_path / "x.png"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "Error: png: needs matplotlib, which is not installed: pip install 'warmd[plot]'\n"
    )


def test_a_metric_that_no_job_has_and_a_job_without_steps_are_one_line(home):
    run_dir(home, [3.0])
    done = plot(home, "--metric", "los")
    assert done.is_refusal(2)
    assert done.err == "Error: metric: must be one of eval_reward, loss, got 'los'\n"
    run_dir(home, [])
    done = plot(home)
    assert done.is_refusal(2)
    assert "no step has ended yet" in done.err


def test_an_evaluation_after_a_resume_counts_once():
    def evaluated(acc: float) -> dict[str, Any]:
        return {"seq": 1, "execution": 1, "time": 0.0, "type": "eval", "step": 5, "mlm_acc": acc}

    [curve] = curves_of("job", [evaluated(0.1), evaluated(0.2)]).values()
    assert (curve.metric, curve.steps, curve.values) == ("eval_mlm_acc", [5], [0.2])


def test_a_metric_of_evaluations_is_found_without_its_prefix():
    assert chosen(["mlm_acc"], ["loss", "eval_mlm_acc"]) == ["eval_mlm_acc"]
    assert chosen(["mlm_loss"], ["mlm_loss", "eval_mlm_loss"]) == ["mlm_loss"]
    assert chosen([], ["tokens", "loss", "eval_mlm_acc", "eval_links"]) == ["loss", "eval_mlm_acc"]
    assert chosen([], ["tokens"]) == ["tokens"]
    with pytest.raises(SpecError, match=r"^metric: must be one of loss, got 'x'"):
        chosen(["x"], ["loss"])
    with pytest.raises(Conflict):
        chosen([], [])


numbers = st.floats(-1e30, 1e30)


@given(
    st.lists(st.lists(numbers, min_size=1, max_size=40), min_size=1, max_size=8),
    st.integers(20, 150),
    st.booleans(),
)
def test_any_curves_are_drawn_within_the_width(values, width, in_color):
    lines = [(range(len(ys)), ys) for ys in values]
    drawn = [click.unstyle(row) for row in chart(lines, width=width, height=13, in_color=in_color)]
    assert len(drawn) == 14
    assert max(map(len, drawn)) <= width
    body = "".join(row.partition("┤")[2] or row.partition("│")[2] for row in drawn[:-1])
    assert body.strip()
    if len(lines) > 1 and not in_color:
        assert set(body) <= set(MARKERS) | {" "}
